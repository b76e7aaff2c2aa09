"""Which columns a layer keeps at a refresh: so many by score and at random, some in any case."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import torch
from bitarray import frozenbitarray

from chipsparse.cache.tensors import CAPACITY_MULTIPLE
from chipsparse.config import SparsityConfig
from chipsparse.layers.kept_columns import read_kept_columns
from chipsparse.layers.static_columns import static_mask
from chipsparse.layout import ModelLayout
from chipsparse.plan import SparsityPlan
from chipsparse.report.kept_columns import KeptColumns
from chipsparse.step import StepContext


@dataclass(frozen=True)
class AttentionBudget:
    """The number of columns that a refresh keeps for each query block."""

    keep_count: int  # columns kept by score, static ones included
    random_count: int  # further random columns
    static_columns: torch.Tensor | None  # bool `[1, N]` of columns that are always kept, or None
    seed: int  # seed of the random columns, below 2**32
    static_count: int = 0  # how many static columns there are
    # Entries that the lists of columns get; None for as many as the longest needs, for which the
    # host waits.
    capacity: int | None = None
    first_head: int = 0  # number of the first head, where these are not all of the layer's
    first_block: int = 0  # number of the first query block, where these are not all of a head's
    branches: int = 1  # guidance branches that the batch holds, which keep the same columns

    @property
    def most_columns(self) -> int:
        """The longest list, unless column sums are NaN: their rows keep every column."""
        return max(self.keep_count, self.static_count) + self.random_count

    def without_waiting(self, tokens: int) -> AttentionBudget:
        """The same with room for `most_columns`, known without reading the lists' lengths."""
        rounded = -(-self.most_columns // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE
        return replace(self, capacity=min(tokens, rounded))


def static_columns(
    tokens: int,
    *,
    text_tokens: int,
    text_first: bool = False,
    always: torch.Tensor | None = None,
    device: torch.device,
) -> torch.Tensor | None:
    """Return the columns that every query block keeps whatever their score.

    Returns:
        bool ``[1, N]``, or None where there are none.
    """
    if text_tokens == 0 and always is None:
        return None
    column = torch.arange(tokens, device=device)
    text = column < text_tokens if text_first else column >= tokens - text_tokens
    return (text if always is None else text | always)[None]


class ColumnBudgets:
    """The budgets of one generation's refreshes."""

    def __init__(
        self,
        config: SparsityConfig,
        static_bits: frozenbitarray | None = None,
        order: torch.Tensor | None = None,
    ) -> None:
        self._config = config
        self._static_bits = static_bits
        self._order = order
        self._static_columns: dict[ModelLayout, torch.Tensor | None] = {}

    def of(
        self, layer: int, plan: SparsityPlan, context: StepContext, key: torch.Tensor
    ) -> AttentionBudget:
        """The budget of a layer whose keys are ``[B, H, N, D]``, with lists as long as they get."""
        layout, tokens = plan.layout, key.shape[2]
        share = layout.share
        if layout not in self._static_columns:
            self._static_columns[layout] = static_columns(
                tokens,
                text_tokens=layout.text_tokens,
                text_first=layout.text_first,
                always=self.static_mask(layout, key.device),
                device=key.device,
            )
        seed = f"0 {context.branch} {context.step} {layer}"
        return AttentionBudget(
            keep_count=plan.attention_keep_count(layer),
            random_count=plan.attention_random_count(),
            static_columns=self._static_columns[layout],
            seed=zlib.crc32(seed.encode()),
            static_count=layout.text_tokens
            + (0 if self._static_bits is None else self._static_bits.count()),
            first_head=0 if share is None else share.first_head,
            first_block=0 if share is None else share.first_row // self._config.block_size,
            branches=layout.guided_in_batch,
        )

    def static_mask(self, layout: ModelLayout, device: torch.device) -> torch.Tensor | None:
        """The user's columns, bool ``[N]`` in the tokens' order; None where there are none."""
        if self._static_bits is None:
            return None
        return static_mask(self._static_bits, layout, self._order, device)

    def kept(
        self, packed: torch.Tensor, layout: ModelLayout, where: tuple[str, str, int]
    ) -> KeptColumns:
        """Return the columns of one layer; see `read_kept_columns`."""
        return read_kept_columns(
            packed,
            layout,
            self._config,
            static=self.static_mask(layout, packed.device),
            order=self._order,
            where=where,
        )
