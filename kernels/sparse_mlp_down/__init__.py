"""The second linear layer of an MLP on the changes of the chosen neurons only."""

from __future__ import annotations

import torch

from chipsparse.kernels import ops
from chipsparse.kernels.checks import (
    check_dtype,
    check_floating,
    check_group_rows,
    check_shape,
    group_count,
)
from chipsparse.kernels.dispatch import Backend, Choice, choose, imported, runs_anywhere
from chipsparse.kernels.sparse_mlp_down import reference
from chipsparse.kernels.triton_support import (
    HALF_PRECISION,
    NOT_ON_CPU,
    why_not_hopper,
    why_not_triton,
    why_not_unasked,
)


def why_not_down(delta: torch.Tensor, weight: torch.Tensor, group_rows: int = 128) -> str | None:
    """Why the Triton kernel cannot run on these tensors, or None."""
    del group_rows  # any
    if (reason := why_not_triton(delta)) is not None:
        return reason
    if delta.dtype not in HALF_PRECISION:
        return f"needs fp16 or bf16, got {delta.dtype}"
    if weight.shape[0] % 8:
        return f"needs a multiple of 8 channels, got {weight.shape[0]}"
    if weight.stride(0) != 1 or weight.stride(1) % 8:
        return (
            "needs a weight whose channels are contiguous, at a multiple of 8 for each neuron "
            f"(the transpose of a contiguous [F, C]), got strides {weight.stride()} for [C, F]"
        )
    return None


def why_not_down_gluon(
    delta: torch.Tensor, weight: torch.Tensor, group_rows: int = 128
) -> str | None:
    """Why the Gluon kernel cannot run on these tensors, or None."""
    if delta.device.type == "cpu":
        return NOT_ON_CPU
    if (reason := why_not_down(delta, weight)) is not None:
        return reason
    if group_rows != 128:
        return f"needs groups of 128 rows, got {group_rows}"
    if weight.data_ptr() % 16:
        return "weight does not start at a multiple of 16 bytes"
    return why_not_hopper(delta)


BACKENDS = (
    Backend(
        "gluon",
        imported("chipsparse.kernels.sparse_mlp_down.gluon_sm90", "sparse_mlp_down"),
        why_not_down_gluon,
    ),
    Backend(
        "triton",
        imported("chipsparse.kernels.sparse_mlp_down.triton_kernel", "sparse_mlp_down"),
        why_not_down,
        why_not_unasked,
    ),
    Backend("reference", reference.sparse_mlp_down, runs_anywhere),
)


def select(
    delta: torch.Tensor, weight: torch.Tensor, *, group_rows: int = 128, force: str | None = None
) -> Choice:
    """The backend that `sparse_mlp_down` would use for these tensors.

    Of delta, dtype and device decide; hidden will do in its place.
    """
    return choose("sparse_mlp_down", BACKENDS, delta, weight, group_rows, force=force)


def sparse_mlp_down(
    delta: torch.Tensor,
    weight: torch.Tensor,
    neuron_indices: torch.Tensor,
    output_cache: torch.Tensor,
    *,
    addend: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    group_rows: int = 128,
    backend: str | Choice | None = None,
) -> torch.Tensor:
    """Adds ``delta @ weight[:, S].T`` to the cached output, where S is the group's neuron list.

    The bias of the layer is in the cached output already (Chipmunk's sparse MLP delta).
    ``output_cache`` is MUTATED. Sums are fp32 and rounded once, to the cache's dtype.

    Args:
        delta: ``[B, N, K]`` fp16, bf16, fp32 or fp64, from `sparse_mlp_up`, of any strides; the
            kernels copy it where its tokens are not contiguous.
        weight: ``[C, F]``, dtype of delta; read in place and never kept. The kernels gather whole
            neurons, so they want its channels contiguous: the transpose of a contiguous [F, C].
        neuron_indices: int32 ``[B, G, K]``, below F, as given to `sparse_mlp_up`.
        output_cache: ``[B, N, C]`` floating point.
        addend: ``[B, N, C]`` floating point to add to what is returned, or None: the other half of
            a fused projection, computed densely.
        counts: int32 ``[B, G]``, how many entries of each list count; None for all. Entries of
            delta past the count are ignored.
        group_rows: token rows per group; the last of the G = ceil(N / group_rows) may be ragged.
        backend: forces one (``gluon``, ``triton``, ``reference``); None takes the first that runs.
            A `Choice` of `select` for such tensors runs unchecked.

    Returns:
        A new contiguous ``[B, N, C]`` in delta's dtype: the updated ``output_cache`` as stored,
        plus ``addend`` where given, rounded once.

    Raises:
        ValueError: shapes or dtypes do not fit, or the forced backend cannot run.
    """
    if isinstance(backend, Choice):
        choice = backend
    elif torch.compiler.is_dynamo_compiling():
        return ops.sparse_mlp_down(
            delta, weight, neuron_indices, output_cache, addend, counts, group_rows, backend
        )
    else:
        _check(delta, weight, neuron_indices, output_cache, addend, counts, group_rows)
        choice = select(delta, weight, group_rows=group_rows, force=backend)
    return choice.backend.launch(
        delta,
        weight,
        neuron_indices,
        output_cache,
        addend=addend,
        counts=counts,
        group_rows=group_rows,
    )


def _check(
    delta: torch.Tensor,
    weight: torch.Tensor,
    neuron_indices: torch.Tensor,
    output_cache: torch.Tensor,
    addend: torch.Tensor | None,
    counts: torch.Tensor | None,
    group_rows: int,
) -> None:
    """Raises ``ValueError`` where shapes or dtypes do not fit."""
    op = "sparse_mlp_down"
    check_floating(op, delta=delta, output_cache=output_cache)
    check_group_rows(op, group_rows)
    if delta.dim() != 3:
        raise ValueError(f"{op}: delta must be [B, N, K], got {list(delta.shape)}")
    batch, rows, capacity = delta.shape
    groups = group_count(rows, group_rows)
    if weight.dim() != 2:
        raise ValueError(f"{op}: weight must be [C, F], got {list(weight.shape)}")
    check_dtype(op, "weight", weight, delta.dtype)
    check_dtype(op, "neuron_indices", neuron_indices, torch.int32)
    check_shape(op, "neuron_indices", neuron_indices, (batch, groups, capacity))
    check_shape(op, "output_cache", output_cache, (batch, rows, weight.shape[0]))
    if addend is not None:
        check_floating(op, addend=addend)
        check_shape(op, "addend", addend, (batch, rows, weight.shape[0]))
    if counts is not None:
        check_dtype(op, "counts", counts, torch.int32)
        check_shape(op, "counts", counts, (batch, groups))
