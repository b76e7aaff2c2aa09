"""The second linear layer of an MLP on the changes of the chosen neurons only."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from chipsparse.kernels.checks import (
    block_count,
    check_block_size,
    check_dtype,
    check_floating,
    check_shape,
)
from chipsparse.kernels.dispatch import Call, Operation, gluon, triton_or_reference
from chipsparse.kernels.triton_support import not_half_reason

OP = "sparse_mlp_down"


@dataclass(slots=True, eq=False)
class SparseMLPDown(Call[torch.Tensor]):
    """Adds ``delta @ weight[:, S].T`` to the cached output, where S is the block's neuron list.

    The bias of the layer is in the cached output already (Chipmunk's sparse MLP delta).
    ``output_cache`` is MUTATED. Sums are fp32 and rounded once, to the cache's dtype.

    Args:
        delta: ``[B, N, K]`` fp16, bf16, fp32 or fp64, from `sparse_mlp_up`, of any strides; the
            kernels copy it where its tokens are not contiguous and padded (see `token_layout`).
        weight: ``[C, F]``, dtype of delta; read in place and never kept. The kernels gather whole
            neurons, so they want its channels contiguous: the transpose of a contiguous [F, C].
        neuron_indices: int32 ``[B, G, K]``, below F, as given to `sparse_mlp_up`.
        output_cache: ``[B, N, C]`` floating point.
        addend: ``[B, N, C]`` floating point to add to what is returned, or None: the other half of
            a fused projection, computed densely.
        block_size: token rows per block; the last of the G = ceil(N / block_size) may be ragged.

    Returns:
        A new contiguous ``[B, N, C]`` in delta's dtype: the updated ``output_cache`` as stored,
        plus ``addend`` where given, rounded once.
    """

    delta: torch.Tensor
    weight: torch.Tensor
    neuron_indices: torch.Tensor
    output_cache: torch.Tensor
    _: KW_ONLY
    addend: torch.Tensor | None = None
    block_size: int = 128

    def check(self) -> None:
        """Raises ``ValueError`` where shapes or dtypes do not fit."""
        delta = self.delta
        weight = self.weight
        check_floating(delta=delta, output_cache=self.output_cache)
        check_block_size(block_size=self.block_size)
        if delta.dim() != 3:
            raise ValueError(f"delta must be [B, N, K], got {list(delta.shape)}")
        batch, rows, capacity = delta.shape
        blocks = block_count(rows, self.block_size)
        if weight.dim() != 2:
            raise ValueError(f"weight must be [C, F], got {list(weight.shape)}")
        output_shape = (batch, rows, weight.shape[0])
        check_dtype("weight", weight, delta.dtype)
        lists = batch, blocks, capacity
        check_shape("neuron_indices", self.neuron_indices, lists, torch.int32)
        check_shape("output_cache", self.output_cache, output_shape)
        if self.addend is not None:
            check_floating(addend=self.addend)
            check_shape("addend", self.addend, output_shape)


def _not_for_kernels(delta: torch.Tensor, weight: torch.Tensor, block_size: int) -> str | None:
    if weight.shape[0] % 8:
        return f"needs a multiple of 8 channels, got {weight.shape[0]}"
    if weight.stride(0) != 1 or weight.stride(1) % 8:
        return (
            "needs a weight whose channels are contiguous, at a multiple of 8 for each neuron "
            f"(the transpose of a contiguous [F, C]), got strides {weight.stride()} for [C, F]"
        )
    return None


def _not_for_gluon(delta: torch.Tensor, weight: torch.Tensor, block_size: int) -> str | None:
    if block_size != 128:
        return f"needs blocks of 128 rows, got {block_size}"
    return "weight does not start at a multiple of 16 bytes" if weight.data_ptr() % 16 else None


REASONS = not_half_reason, _not_for_kernels
sparse_mlp_down = Operation(
    OP,
    SparseMLPDown,
    # Of delta, dtype and device decide.
    lambda call: (call.delta, call.weight, call.block_size),
    gluon(f"{__name__}.gluon_sm90", OP, *REASONS, _not_for_gluon),
    *triton_or_reference(__name__, OP, *REASONS),
)
