"""The tensors that one layer keeps between steps, for one guidance branch.

`Kept` is the table of them: whoever asks which there are, how many bytes they take, or which action
reads and writes them reads it there. Memory is planned from it before anything is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import ClassVar, NamedTuple, Protocol, cast

import torch

from chipsparse.config import Action, CachePrecision, Part, SparsityConfig
from chipsparse.kernels.checks import block_count
from chipsparse.kernels.fp8_quantization import FP8
from chipsparse.kernels.token_layout import padded_rows
from chipsparse.sparse.plan import SparsityPlan

# The most bytes of column sums that a refresh holds at a time: it goes over as many heads at once
# as fit, one at least.
COLUMN_SUMS_BYTES = 2 << 30
# Index lists that are not read back have room for a multiple of this: their rows stay aligned.
CAPACITY_MULTIPLE = 16


class Size(Enum):
    """A dimension of a tensor that is kept; see `sizes_of`."""

    HEADS = auto()
    HEAD_CHANNELS = auto()
    ROWS = auto()  # query rows
    ROW_BLOCKS = auto()
    COLUMN_BYTES = auto()  # of the bits of all columns
    LIST_ENTRIES = auto()  # of an index list
    CHANNELS = auto()
    TOKENS = auto()
    PADDED_TOKENS = auto()
    TOKEN_BLOCKS = auto()
    NEURONS = auto()


class Numbers(Enum):
    """The dtype of a tensor that is kept."""

    FLOAT32 = auto()
    INT32 = auto()
    UINT8 = auto()
    MODEL = auto()  # as the hidden states
    CACHE = auto()  # likewise, or e4m3 where caches are in FP8


REFRESH = frozenset({Action.REFRESH})
SPARSE = frozenset({Action.SPARSE})
IN_FULL = frozenset({Action.DENSE, Action.REFRESH})


@dataclass(frozen=True)
class Declared:
    """A row of the table `Kept`."""

    field: str  # of the `PartCache` that holds the tensor
    part: Part  # of the layer whose cache that is
    sizes: tuple[Size, ...]  # after the batch
    numbers: Numbers
    written: frozenset[Action]  # actions that record it or change it in place
    read: frozenset[Action] = SPARSE  # actions that need it
    only_fp8: bool = False  # kept only where caches are in FP8
    # Kept only where it takes no more. Such tensors are part of the working memory: they stay on
    # the device, wherever the others are.
    most_bytes: int | None = None


class Kept(Enum):
    """Every tensor that a layer keeps between steps."""

    MEAN = Declared(
        "mean",
        "mlp",
        (Size.TOKEN_BLOCKS, Size.NEURONS),
        Numbers.FLOAT32,
        written=IN_FULL | SPARSE,
    )
    OUTPUT = Declared(
        "output",
        "mlp",
        (Size.TOKENS, Size.CHANNELS),
        Numbers.MODEL,
        written=IN_FULL | SPARSE,
    )
    ACTIVATION = Declared(
        "activation",
        "mlp",
        (Size.PADDED_TOKENS, Size.NEURONS),
        Numbers.CACHE,
        written=IN_FULL | SPARSE,
    )
    TOKEN_SCALE = Declared(
        "token_scale",
        "mlp",
        (Size.TOKENS,),
        Numbers.FLOAT32,
        written=IN_FULL,
        only_fp8=True,
    )
    LSE = Declared(
        "lse",
        "attention",
        (Size.HEADS, Size.ROWS),
        Numbers.FLOAT32,
        written=IN_FULL,
        read=REFRESH,
    )
    COLUMNS = Declared(
        "columns",
        "attention",
        (Size.HEADS, Size.ROW_BLOCKS, Size.COLUMN_BYTES),
        Numbers.UINT8,
        written=REFRESH,
    )
    RESIDUAL = Declared(
        "residual",
        "attention",
        (Size.HEADS, Size.ROWS, Size.HEAD_CHANNELS),
        Numbers.CACHE,
        written=REFRESH,
    )
    RESIDUAL_SCALE = Declared(
        "residual_scale",
        "attention",
        (Size.HEADS, Size.ROWS),
        Numbers.FLOAT32,
        written=REFRESH,
        only_fp8=True,
    )
    # Made of COLUMNS. That costs a large layer nothing compared with its attention; a small one
    # would wait for the host to launch it at every step.
    LISTS = Declared(
        "lists",
        "attention",
        (Size.HEADS, Size.ROW_BLOCKS, Size.LIST_ENTRIES),
        Numbers.INT32,
        written=REFRESH,
        most_bytes=4 << 20,
    )

    # Members are single objects. Enum's own hash is Python code, which every layer would run.
    __hash__ = object.__hash__

    def __init__(self, declared: Declared) -> None:
        # Plain attributes: `value` is Python code, too.
        self.declared = declared
        self.field = declared.field
        self.part = declared.part
        self.most_bytes = declared.most_bytes
        self.is_placed = declared.most_bytes is None  # memory plans say where it is
        self.changes_in_place = Action.SPARSE in declared.written


PLACED = tuple(kept for kept in Kept if kept.is_placed)


class IndexLists(NamedTuple):
    """The selected columns of every query block as lists; see `packed_to_indices`."""

    indices: torch.Tensor  # int32 `[B, H, G, capacity]`
    counts: torch.Tensor  # int32 `[B, H, G]`, the lengths


@dataclass(eq=False)
class PartCache:
    """Base of the caches of one part of a layer: dataclasses with a field for each `Kept` of it.

    Such a field is None where nothing was recorded, and while its tensor is in host memory.
    """

    placed: ClassVar[tuple[Kept, ...]] = ()  # the part's rows of `PLACED`

    in_fp8: bool = False  # a refresh rounds the residual or the activations to e4m3
    refreshed_at: int = -1  # step of the last refresh; -1 before the first

    def recorded(self) -> dict[Kept, torch.Tensor]:
        """Return the placed tensors that are on the device, in the table's order."""
        fields = vars(self)
        return {kept: fields[kept.field] for kept in self.placed if fields[kept.field] is not None}

    def put(self, tensors: Mapping[Kept, torch.Tensor]) -> None:
        """Set the fields of these tensors."""
        vars(self).update({kept.field: tensor for kept, tensor in tensors.items()})

    def clear(self, tensors: Mapping[Kept, torch.Tensor]) -> None:
        """Set the fields of these tensors to None."""
        vars(self).update(dict.fromkeys(kept.field for kept in tensors))


class RefreshedAttention(Protocol):
    """An `AttentionCache` with all that a sparse step reads."""

    columns: torch.Tensor
    residual: torch.Tensor
    residual_scale: torch.Tensor | None
    lists: IndexLists | None
    capacity: int
    kept_fraction: torch.Tensor | float


@dataclass(eq=False)
class AttentionCache(PartCache):
    """The memory of self-attention between dense, refresh and sparse steps."""

    placed = tuple(kept for kept in PLACED if kept.part == "attention")

    # Log-sum-exp of the last dense or refresh step, float32 `[B, H, N]`.
    lse: torch.Tensor | None = None
    # Bitmask of the selected columns, uint8 `[B, H, G, ceil(N / 8)]`.
    columns: torch.Tensor | None = None
    # The output of the refresh less that of the selected columns, `[B, H, N, D]`.
    residual: torch.Tensor | None = None
    # (e4m3) by which its rows are multiplied, float32 `[B, H, N]`.
    residual_scale: torch.Tensor | None = None
    # The selected columns as lists, where they are small; else every step makes them of `columns`.
    lists: IndexLists | None = None
    # Entries of an index list. The host knows them from the refresh, so that no sparse step need
    # wait for the device.
    capacity: int | None = None
    kept_fraction: torch.Tensor | float = 0.0  # mean fraction of columns, may be 0-d

    def after_dense(self) -> torch.Tensor:
        """Return the log-sum-exp that a refresh reads; `RuntimeError` before a dense step."""
        if self.lse is None:
            raise RuntimeError("a refresh of attention follows no dense step: there is no LSE")
        return self.lse

    def selected(self) -> torch.Tensor:
        """Return the bitmask of the selected columns; `RuntimeError` before a refresh."""
        if self.columns is None:
            raise RuntimeError("columns of attention are read before a refresh selected them")
        return self.columns

    def refreshed(self) -> RefreshedAttention:
        """Return this cache with its fields known to be there; `RuntimeError` before a refresh."""
        if self.columns is None or self.residual is None or self.capacity is None:
            raise RuntimeError("a sparse step of attention follows no refresh")
        return cast(RefreshedAttention, self)


class RefreshedMLP(Protocol):
    """An `MLPCache` with all that a sparse step reads."""

    mean: torch.Tensor
    output: torch.Tensor
    activation: torch.Tensor
    token_scale: torch.Tensor | None


@dataclass(eq=False)
class MLPCache(PartCache):
    """The memory of a feed-forward layer between steps."""

    placed = tuple(kept for kept in PLACED if kept.part == "mlp")

    # Mean pre-activation of a token block when its neuron was last computed, float32 `[B, G, F]`.
    mean: torch.Tensor | None = None
    # The layer's output, `[B, N, C]`.
    output: torch.Tensor | None = None
    # Neurons after the activation function, `[B, N, F]`.
    activation: torch.Tensor | None = None
    # (e4m3) by which those of a token are multiplied, float32 `[B, N, 1]`.
    token_scale: torch.Tensor | None = None

    def refreshed(self) -> RefreshedMLP:
        """Return this cache with its fields known to be there; `RuntimeError` before a refresh."""
        if self.mean is None or self.output is None or self.activation is None:
            raise RuntimeError("a sparse step of an MLP follows no refresh")
        return cast(RefreshedMLP, self)


class LayerCache:
    """The caches of one transformer block and guidance branch."""

    def __init__(self, *, in_fp8: bool = False) -> None:
        self.attention = AttentionCache(in_fp8)
        self.mlp = MLPCache(in_fp8)

    def nbytes(self) -> int:
        """Return the bytes on the device, each storage once; without the index lists."""
        tensors = [*self.attention.recorded().values(), *self.mlp.recorded().values()]
        if isinstance(self.attention.kept_fraction, torch.Tensor):
            tensors.append(self.attention.kept_fraction)
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def _rounds(config: SparsityConfig) -> bool:
    return config.memory.cache_precision == "fp8"


def placed_tensors(config: SparsityConfig, part: Part) -> list[Kept]:
    """Return the tensors that a sparse layer of this config keeps, wherever they are."""
    return [
        kept
        for kept in PLACED
        if kept.part == part and (_rounds(config) or not kept.declared.only_fp8)
    ]


def with_caches(config: SparsityConfig, *, in_fp8: bool) -> SparsityConfig:
    """Return the config with its caches kept in FP8 or in full."""
    precision: CachePrecision = "fp8" if in_fp8 else "model"
    return replace(config, memory=replace(config.memory, cache_precision=precision))


def read_and_written(
    config: SparsityConfig,
    part: Part,
    action: Action,
) -> tuple[frozenset[Kept], frozenset[Kept]]:
    """Return the tensors that an action of a layer reads, and those that it records or changes.

    Where the memory decides about FP8, the tensors of both precisions are among them.
    """
    may_round = config.memory.cache_precision != "model"
    rows = [
        kept for kept in Kept if kept.part == part and (may_round or not kept.declared.only_fp8)
    ]
    return (
        frozenset(kept for kept in rows if action in kept.declared.read),
        frozenset(kept for kept in rows if action in kept.declared.written),
    )


def sizes_of(layer: int, plan: SparsityPlan) -> dict[Size, int]:
    """Return every `Size` in one layer, for one guidance branch of this process."""
    layout = plan.layout
    rows = len(layout.query_rows)
    tokens = layout.mlp_tokens(layer)
    return {
        Size.HEADS: layout.own.heads,
        Size.HEAD_CHANNELS: layout.head_dim,
        Size.ROWS: rows,
        Size.ROW_BLOCKS: block_count(rows, plan.config.block_size),
        Size.COLUMN_BYTES: -(-layout.tokens // 8),
        Size.LIST_ENTRIES: plan.attention_keep_count(layer) + CAPACITY_MULTIPLE,
        Size.CHANNELS: layout.width,
        Size.TOKENS: tokens,
        Size.PADDED_TOKENS: padded_rows(tokens),
        Size.TOKEN_BLOCKS: block_count(tokens, plan.config.block_size),
        Size.NEURONS: layout.kind(layer).intermediate_size,
    }


def kept_bytes(kept: Kept, layer: int, *, plan: SparsityPlan, dtype: torch.dtype) -> int:
    """Return the bytes of one layer's tensor, for one guidance branch.

    The hidden states are in ``dtype``. Lists are counted without their lengths.
    """
    item_bytes = {
        Numbers.FLOAT32: 4,
        Numbers.INT32: 4,
        Numbers.UINT8: 1,
        Numbers.MODEL: dtype.itemsize,
        Numbers.CACHE: (FP8 if _rounds(plan.config) else dtype).itemsize,
    }
    sizes = sizes_of(layer, plan)
    entries = math.prod(sizes[size] for size in kept.declared.sizes)
    return plan.layout.batch * entries * item_bytes[kept.declared.numbers]
