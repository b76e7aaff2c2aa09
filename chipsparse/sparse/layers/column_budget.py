"""The number of columns that a layer keeps at a refresh, by score, and the static ones.

Static columns are always kept: the text's, and columns that the user names as bits of the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
import torch
from bitarray import bitarray, frozenbitarray

from chipsparse.kernels.mask_packing import unpack_mask
from chipsparse.layout import ModelLayout
from chipsparse.sparse.cache.tensors import CAPACITY_MULTIPLE
from chipsparse.sparse.plan import SparsityPlan

NO_LISTS = (str, bytes, bytearray, Mapping, Set)  # iterables without bools in order
StaticColumns = bitarray | np.ndarray | torch.Tensor | Sequence[bool]


@dataclass(frozen=True)
class AttentionBudget:
    """The number of columns that a refresh keeps for each query block, static ones included."""

    keep_count: int  # columns kept by score, static ones included
    static_columns: torch.Tensor | None  # bool `[N]` of columns that are always kept, or None
    static_count: int = 0  # how many static columns there are
    # Entries of an index list; None for as many as the longest needs, for which the host waits.
    capacity: int | None = None
    branches: int = 1  # guidance branches that the batch holds, which keep the same columns

    @property
    def most_columns(self) -> int:
        """The longest list, unless column sums are NaN: their rows keep every column."""
        return max(self.keep_count, self.static_count)

    def without_waiting(self, tokens: int) -> AttentionBudget:
        """The same with room for `most_columns`, known without reading the lists' lengths."""
        rounded = -(-self.most_columns // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE
        return replace(self, capacity=min(tokens, rounded))


def static_columns(
    layout: ModelLayout,
    of_user: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor | None:
    """Return the columns that all query blocks keep, bool ``[N]``: the text's and the user's."""
    if layout.text_tokens == 0 and of_user is None:
        return None
    text = torch.ones(layout.tokens, dtype=torch.bool, device=device)
    text[layout.grid_columns] = False
    return text if of_user is None else text | of_user


class ColumnBudgets:
    """The budgets of one generation's refreshes."""

    def __init__(
        self,
        static_bits: frozenbitarray | None = None,
        order: torch.Tensor | None = None,
    ) -> None:
        self._static_bits = static_bits
        self._order = order
        self._static_columns: dict[ModelLayout, torch.Tensor | None] = {}

    def of(self, layer: int, plan: SparsityPlan, device: torch.device) -> AttentionBudget:
        """Return a layer's budget on a device, with lists as long as they get."""
        layout = plan.layout
        if layout not in self._static_columns:
            of_user = self.static_mask(layout, device)
            self._static_columns[layout] = static_columns(layout, of_user, device)
        named = 0 if self._static_bits is None else self._static_bits.count()
        return AttentionBudget(
            keep_count=plan.attention_keep_count(layer),
            static_columns=self._static_columns[layout],
            static_count=layout.text_tokens + named,
            branches=layout.guided_in_batch,
        )

    def static_mask(self, layout: ModelLayout, device: torch.device) -> torch.Tensor | None:
        """The user's columns, bool ``[N]`` in the tokens' order; None where there are none."""
        bits = self._static_bits
        order = self._order
        if bits is None:
            return None
        packed = torch.frombuffer(bytearray(bits.tobytes()), dtype=torch.uint8)
        own = unpack_mask(packed, len(bits), backend="reference").to(device)
        mask = torch.zeros(layout.tokens, dtype=torch.bool, device=device)
        mask[layout.grid_columns] = own if order is None else own[order]
        return mask


def static_bits(columns: object) -> frozenbitarray:
    """Return a bit for each column, in order, as the kernels pack them: ``endian="little"``.

    Takes a bitarray of either bit order, a bool array or tensor ``[N]``, or a list of bools. Raises
    `ValueError` for anything else, or where there is no column.
    """
    if isinstance(columns, torch.Tensor):
        is_plain = columns.layout == torch.strided and not columns.is_meta
        if is_plain and columns.dtype == torch.bool:
            columns = columns.detach().cpu().numpy()
    if isinstance(columns, torch.Tensor):
        raise ValueError(
            "static_columns: expected bools of shape [N], got "
            f"{str(columns.dtype).removeprefix('torch.')} of shape {list(columns.shape)} on "
            f"{columns.device}",
        )
    if isinstance(columns, np.ndarray):
        if columns.dtype != np.bool_ or columns.ndim != 1:
            raise ValueError(
                "static_columns: expected bools of shape [N], got "
                f"{columns.dtype} of shape {list(columns.shape)}",
            )
        columns = columns.tolist()
    if not isinstance(columns, bitarray):
        if not isinstance(columns, Iterable) or isinstance(columns, NO_LISTS):
            raise ValueError(
                "static_columns: expected a bitarray, a bool array or a list of bools, got "
                f"{type(columns).__name__}",
            )
        columns = list(columns)
        other = next((item for item in columns if not isinstance(item, (bool, np.bool_))), None)
        if other is not None:
            raise ValueError(
                f"static_columns: expected True or False for each column, got {other!r}; numbers "
                "of columns become bools with mask = [False] * N; mask[number] = True",
            )
        columns = [bool(item) for item in columns]
    if not columns:
        raise ValueError("static_columns: there is no column; pass None to keep none")
    return frozenbitarray(columns, endian="little")


def check_static_bits(bits: frozenbitarray, layout: ModelLayout) -> None:
    """Raises `ValueError` where a model call has another number of columns than there are bits."""
    if len(bits) != layout.grid_tokens:
        grids = " and ".join("x".join(map(str, grid)) for grid in layout.grids)
        raise ValueError(
            f"static_columns has {len(bits)} columns, but this call has {layout.grid_tokens} video "
            f"or image tokens (frames x rows x columns: {grids}); text columns are always kept and "
            "not among them",
        )
