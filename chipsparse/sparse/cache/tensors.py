"""The tensors that one layer keeps between steps, for one guidance branch.

Each is declared with its sizes: memory is planned before anything is computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from chipsparse.config import CachePrecision, Part, SparsityConfig
from chipsparse.kernels.checks import block_count
from chipsparse.kernels.fp8_quantization import FP8
from chipsparse.kernels.token_layout import padded_rows
from chipsparse.layout import ModelLayout
from chipsparse.sparse.plan import Action

# The numbers of a tensor: as the hidden states, or those of caches, which may be in FP8.
Numbers = Literal["float32", "uint8", "model", "cache"]

# A layer's lists of columns are kept between steps where they take no more. To make them costs a
# large layer nothing beside its attention; a small one waits for the host to launch it.
LISTS_BYTES = 4 << 20
# The most bytes of column sums that a refresh holds at a time: it goes over as many heads at once
# as fit, one at least.
COLUMN_SUMS_BYTES = 2 << 30
CAPACITY_MULTIPLE = 16  # divides a list's entries where they are not read back: rows stay aligned


@dataclass(frozen=True)
class Kept:
    """The declaration of a tensor that a layer keeps between steps."""

    part: Part  # the part of the layer whose cache it is
    sizes: tuple[str, ...]  # names of its dimensions behind the batch; see `kind_bytes`
    numbers: Numbers = "float32"  # its dtype
    of_fp8: bool = False  # kept only where caches are in FP8
    rewritten: bool = False  # a sparse step changes it in place, so that it moves both ways


# The tensors of `MLPCache` and `AttentionCache`, by the field that holds each.
KINDS = {
    "mean": Kept("mlp", ("token blocks", "neurons"), rewritten=True),
    "output": Kept("mlp", ("tokens", "channels"), "model", rewritten=True),
    "activation": Kept("mlp", ("padded tokens", "neurons"), "cache", rewritten=True),
    "token_scale": Kept("mlp", ("tokens",), of_fp8=True),
    "lse": Kept("attention", ("heads", "rows")),
    "columns": Kept("attention", ("heads", "row blocks", "column bytes"), "uint8"),
    "residual": Kept("attention", ("heads", "rows", "head channels"), "cache"),
    "residual_scale": Kept("attention", ("heads", "rows"), of_fp8=True),
}


@dataclass(eq=False)
class PartCache:
    """Base of the caches of one part of a layer: dataclasses whose fields hold tensors of `KINDS`.

    Such a field is None where nothing was recorded, and while its tensor is in host memory.
    """

    in_fp8: bool = False  # a refresh rounds the residual or the activations to e4m3

    def on_device(self) -> dict[str, torch.Tensor]:
        held = vars(self)
        return {kind: held[kind] for kind in KINDS if held.get(kind) is not None}


@dataclass(eq=False)
class AttentionCache(PartCache):
    """The memory of self-attention between dense, refresh and sparse steps."""

    # Log-sum-exp of the last dense or refresh step, float32 `[B, H, N]`.
    lse: torch.Tensor | None = None
    # Packed bits of the kept columns, uint8 `[B, H, G, ceil(N / 8)]`.
    columns: torch.Tensor | None = None
    # The output of the refresh less that of the kept columns, `[B, H, N, D]`.
    residual: torch.Tensor | None = None
    # (e4m3) by which its rows are multiplied, float32 `[B, H, N]`.
    residual_scale: torch.Tensor | None = None
    # The kept columns as lists, with their lengths (see `packed_to_indices`), where they are small;
    # else they are made of `columns` at every step. They are part of the working memory, wherever
    # the cache lives.
    lists: tuple[torch.Tensor, torch.Tensor] | None = None
    # Entries of the lists of kept columns, known to the host since the refresh so that no sparse
    # step need wait for it; None before the columns are chosen.
    capacity: int | None = None
    kept_fraction: torch.Tensor | float = 0.0  # mean share of columns, may be 0-d


@dataclass(eq=False)
class MLPCache(PartCache):
    """The memory of a feed-forward layer between steps."""

    # Mean pre-activation of a token block when its neuron was last computed, float32 `[B, G, F]`.
    mean: torch.Tensor | None = None
    # The layer's output, `[B, N, C]`.
    output: torch.Tensor | None = None
    # Neurons after the activation function, `[B, N, F]`.
    activation: torch.Tensor | None = None
    # (e4m3) by which those of a token are multiplied, float32 `[B, N, 1]`.
    token_scale: torch.Tensor | None = None


class LayerCache:
    """The caches of one transformer block and guidance branch."""

    def __init__(self, *, in_fp8: bool = False) -> None:
        self.attention = AttentionCache(in_fp8)
        self.mlp = MLPCache(in_fp8)

    def nbytes(self) -> int:
        """Return the bytes on the device, each storage once; without the lists of columns."""
        tensors = [*self.attention.on_device().values(), *self.mlp.on_device().values()]
        if isinstance(self.attention.kept_fraction, torch.Tensor):
            tensors.append(self.attention.kept_fraction)
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def _rounds(config: SparsityConfig) -> bool:
    return config.memory.cache_precision == "fp8"


def kept_kinds(config: SparsityConfig, part: Part) -> frozenset[str]:
    """Return the tensors that a sparse layer of this config keeps."""
    own = (name for name, kept in KINDS.items() if kept.part == part)
    return frozenset(name for name in own if _rounds(config) or not KINDS[name].of_fp8)


def with_caches(config: SparsityConfig, *, in_fp8: bool) -> SparsityConfig:
    """Return the config with its caches kept in FP8 or in full."""
    precision: CachePrecision = "fp8" if in_fp8 else "model"
    return replace(config, memory=replace(config.memory, cache_precision=precision))


def read_and_written(
    config: SparsityConfig,
    part: Part,
    action: Action,
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the tensors that an action of a layer reads, and those that it records or changes.

    Where the memory decides about FP8, the tensors of both precisions are among them.
    """
    may_round = config.memory.cache_precision != "model"
    kept = kept_kinds(with_caches(config, in_fp8=may_round), part)
    none = frozenset[str]()
    lse = kept & {"lse"}
    if action is Action.SPARSE:
        return kept - lse, frozenset(kind for kind in kept if KINDS[kind].rewritten)
    if action is Action.REFRESH:
        return lse, kept
    if action is Action.DENSE:
        return none, lse if part == "attention" else kept
    return none, none


def kind_bytes(
    kind: str,
    layer: int,
    *,
    layout: ModelLayout,
    config: SparsityConfig,
    dtype: torch.dtype,
) -> int:
    """Return the bytes of one layer's tensor of a kind, for one guidance branch."""
    rows = len(layout.query_rows)
    tokens = layout.mlp_tokens(layer)
    sizes = {
        "heads": layout.own.heads,
        "head channels": layout.head_dim,
        "rows": rows,
        "row blocks": block_count(rows, config.block_size),
        "column bytes": -(-layout.tokens // 8),
        "channels": layout.width,
        "tokens": tokens,
        "padded tokens": padded_rows(tokens),
        "token blocks": block_count(tokens, config.block_size),
        "neurons": layout.kind(layer).intermediate_size,
    }
    item_bytes = {
        "float32": 4,
        "uint8": 1,
        "model": dtype.itemsize,
        "cache": (FP8 if _rounds(config) else dtype).itemsize,
    }
    kept = KINDS[kind]
    return layout.batch * math.prod(sizes[name] for name in kept.sizes) * item_bytes[kept.numbers]
