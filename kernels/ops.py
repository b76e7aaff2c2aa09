"""The operations as ``torch.library`` custom ops, which compiled code runs in their place.

While torch traces, a public function hands its arguments to its op here and nothing else, so a
graph holds one node for it. The op calls the public function again when the graph runs: the checks
are made then, and raise ``ValueError`` from there. The fakes only tell dtypes, shapes and strides.
An op must keep to the strides that its fake promised; those of an attention output are the query's,
as most kernels write them, the activations of an MLP are laid out as their backend wants them, and
all other tensors are contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chipsparse.kernels.checks import compute_dtype, group_count
from chipsparse.kernels.token_layout import (
    empty_laid_out_as,
    empty_token_contiguous,
    is_token_contiguous,
)

# The operations import this module, so it imports them where it calls them.


@torch.library.custom_op("chipsparse::dense_attention", mutates_args=())
def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, backend: str | None
) -> tuple[Tensor, Tensor]:
    """See `chipsparse.kernels.dense_attention.dense_attention`."""
    from chipsparse.kernels.dense_attention import dense_attention

    output, lse = dense_attention(query, key, value, scale=scale, backend=backend)
    return _with_strides_of(query, output), lse.contiguous()


@dense_attention.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), _fake_lse(query)


@torch.library.custom_op("chipsparse::dense_attention_column_sums", mutates_args=())
def dense_attention_column_sums(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse_previous: Tensor,
    group_rows: int,
    scale: float | None,
    max_transient_bytes: int,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `chipsparse.kernels.dense_attention_column_sums.dense_attention_column_sums`."""
    from chipsparse.kernels.dense_attention_column_sums import dense_attention_column_sums

    output, lse, column_sums = dense_attention_column_sums(
        query,
        key,
        value,
        lse_previous,
        group_rows=group_rows,
        scale=scale,
        max_transient_bytes=max_transient_bytes,
        backend=backend,
    )
    return _with_strides_of(query, output), lse.contiguous(), column_sums.contiguous()


@dense_attention_column_sums.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, lse_previous: Tensor, group_rows: int, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    from chipsparse.kernels.dense_attention_column_sums.reference import column_sums_dtype

    groups = group_count(query.shape[2], group_rows)
    shape = (*query.shape[:2], groups, key.shape[2])
    column_sums = query.new_empty(shape, dtype=column_sums_dtype(query))
    return torch.empty_like(query), _fake_lse(query), column_sums


@torch.library.custom_op("chipsparse::column_sparse_attention", mutates_args=())
def column_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    counts: Tensor,
    group_rows: int,
    scale: float | None,
    delta_rule: str | None,
    residual: Tensor | None,
    lse_dense: Tensor | None,
    kept_mass: Tensor | None,
    max_transient_bytes: int,
    check_indices: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """See `chipsparse.kernels.column_sparse_attention.column_sparse_attention`."""
    from chipsparse.kernels.column_sparse_attention import column_sparse_attention

    output, lse = column_sparse_attention(
        query,
        key,
        value,
        indices,
        counts,
        group_rows=group_rows,
        scale=scale,
        delta_rule=delta_rule,  # type: ignore[arg-type]
        residual=residual,
        lse_dense=lse_dense,
        kept_mass=kept_mass,
        max_transient_bytes=max_transient_bytes,
        check_indices=check_indices,
        backend=backend,
    )
    return _with_strides_of(query, output), lse.contiguous()


@column_sparse_attention.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), _fake_lse(query)


@torch.library.custom_op("chipsparse::column_selection", mutates_args=())
def column_selection(
    column_sums: Tensor,
    static_columns: Tensor | None,
    keep_count: int,
    random_count: int,
    seed: int,
    backend: str | None,
) -> Tensor:
    """See `chipsparse.kernels.column_selection.column_selection`."""
    from chipsparse.kernels.column_selection import column_selection

    return column_selection(
        column_sums,
        keep_count=keep_count,
        static_columns=static_columns,
        random_count=random_count,
        seed=seed,
        backend=backend,
    ).contiguous()


@column_selection.register_fake
def _(column_sums: Tensor, *_: object) -> Tensor:
    return _fake_packed(column_sums)


@torch.library.custom_op("chipsparse::pack_mask", mutates_args=())
def pack_mask(mask: Tensor, backend: str | None) -> Tensor:
    """See `chipsparse.kernels.mask_packing.pack_mask`."""
    from chipsparse.kernels.mask_packing import pack_mask

    return pack_mask(mask, backend=backend).contiguous()


@pack_mask.register_fake
def _(mask: Tensor, backend: str | None) -> Tensor:
    return _fake_packed(mask)


@torch.library.custom_op("chipsparse::unpack_mask", mutates_args=())
def unpack_mask(packed: Tensor, columns: int, backend: str | None) -> Tensor:
    """See `chipsparse.kernels.mask_packing.unpack_mask`."""
    from chipsparse.kernels.mask_packing import unpack_mask

    return unpack_mask(packed, columns, backend=backend).contiguous()


@unpack_mask.register_fake
def _(packed: Tensor, columns: int, backend: str | None) -> Tensor:
    return packed.new_empty((*packed.shape[:-1], columns), dtype=torch.bool)


@torch.library.custom_op("chipsparse::packed_to_indices", mutates_args=())
def packed_to_indices(
    packed: Tensor, columns: int, capacity: int, backend: str | None
) -> tuple[Tensor, Tensor]:
    """See `chipsparse.kernels.mask_packing.packed_to_indices`."""
    from chipsparse.kernels.mask_packing import packed_to_indices

    indices, counts = packed_to_indices(packed, columns, capacity=capacity, backend=backend)
    return indices.contiguous(), counts.contiguous()


@packed_to_indices.register_fake
def _(packed: Tensor, columns: int, capacity: int, backend: str | None) -> tuple[Tensor, Tensor]:
    shape = packed.shape[:-1]
    indices = packed.new_empty((*shape, capacity), dtype=torch.int32)
    return indices, packed.new_empty(shape, dtype=torch.int32)


@torch.library.custom_op("chipsparse::neuron_selection", mutates_args=("mean_cache",))
def neuron_selection(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean_cache: Tensor,
    keep_count: int,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    activation: str | None,
    group_rows: int,
    backend: str | None,
) -> Tensor:
    """See `chipsparse.kernels.neuron_selection.neuron_selection`."""
    from chipsparse.kernels.neuron_selection import neuron_selection

    return neuron_selection(
        hidden,
        weight,
        bias,
        mean_cache,
        keep_count=keep_count,
        gate_weight=gate_weight,
        gate_bias=gate_bias,
        activation=activation,  # type: ignore[arg-type]
        group_rows=group_rows,
        backend=backend,
    ).contiguous()


@neuron_selection.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean_cache: Tensor,
    keep_count: int,
    *_: object,
) -> Tensor:
    kept = torch.sym_min(keep_count, weight.shape[0])
    return hidden.new_empty((*mean_cache.shape[:2], kept), dtype=torch.int32)


@torch.library.custom_op("chipsparse::mean_preactivations", mutates_args=())
def mean_preactivations(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    activation: str | None,
    group_rows: int,
    backend: str | None,
) -> Tensor:
    """See `chipsparse.kernels.neuron_selection.mean_preactivations`."""
    from chipsparse.kernels.neuron_selection import mean_preactivations

    return mean_preactivations(
        hidden,
        weight,
        bias,
        gate_weight=gate_weight,
        gate_bias=gate_bias,
        activation=activation,  # type: ignore[arg-type]
        group_rows=group_rows,
        backend=backend,
    ).contiguous()


@mean_preactivations.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    activation: str | None,
    group_rows: int,
    backend: str | None,
) -> Tensor:
    shape = (hidden.shape[0], group_count(hidden.shape[1], group_rows), weight.shape[0])
    return hidden.new_empty(shape, dtype=compute_dtype(hidden))


@torch.library.custom_op("chipsparse::sparse_mlp_up", mutates_args=("activation_cache",))
def sparse_mlp_up(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    neuron_indices: Tensor,
    activation_cache: Tensor,
    counts: Tensor | None,
    activation: str,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    group_rows: int,
    backend: str | None,
) -> Tensor:
    """See `chipsparse.kernels.sparse_mlp_up.sparse_mlp_up`."""
    from chipsparse.kernels.sparse_mlp_up import sparse_mlp_up

    return sparse_mlp_up(
        hidden,
        weight,
        bias,
        neuron_indices,
        activation_cache,
        counts=counts,
        activation=activation,  # type: ignore[arg-type]
        gate_weight=gate_weight,
        gate_bias=gate_bias,
        group_rows=group_rows,
        backend=backend,
    )


@sparse_mlp_up.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    neuron_indices: Tensor,
    activation_cache: Tensor,
    *_: object,
) -> Tensor:
    return empty_laid_out_as(activation_cache, neuron_indices.shape[2], dtype=hidden.dtype)


@torch.library.custom_op("chipsparse::dense_activation", mutates_args=())
def dense_activation(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    group_rows: int,
    backend: str | None,
) -> Tensor:
    """See `chipsparse.kernels.sparse_mlp_up.dense_activation`."""
    from chipsparse.kernels.sparse_mlp_up import dense_activation

    result = dense_activation(
        hidden,
        weight,
        bias,
        activation=activation,  # type: ignore[arg-type]
        gate_weight=gate_weight,
        gate_bias=gate_bias,
        group_rows=group_rows,
        backend=backend,
    )
    return result if is_token_contiguous(result) else result.contiguous()


@dense_activation.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    group_rows: int,
    backend: str | None,
) -> Tensor:
    from chipsparse.kernels.sparse_mlp_up import select

    batch, rows, neurons = *hidden.shape[:2], weight.shape[0]
    choice = select(hidden, weight, gate_weight=gate_weight, group_rows=group_rows, force=backend)
    if choice.backend.name == "reference":
        return hidden.new_empty(batch, rows, neurons)
    return empty_token_contiguous(hidden, batch, rows, neurons)


@torch.library.custom_op("chipsparse::sparse_mlp_down", mutates_args=("output_cache",))
def sparse_mlp_down(
    delta: Tensor,
    weight: Tensor,
    neuron_indices: Tensor,
    output_cache: Tensor,
    addend: Tensor | None,
    counts: Tensor | None,
    group_rows: int,
    backend: str | None,
) -> Tensor:
    """See `chipsparse.kernels.sparse_mlp_down.sparse_mlp_down`."""
    from chipsparse.kernels.sparse_mlp_down import sparse_mlp_down

    return sparse_mlp_down(
        delta,
        weight,
        neuron_indices,
        output_cache,
        addend=addend,
        counts=counts,
        group_rows=group_rows,
        backend=backend,
    )


@sparse_mlp_down.register_fake
def _(delta: Tensor, weight: Tensor, *_: object) -> Tensor:
    return delta.new_empty((*delta.shape[:2], weight.shape[0]))


def _with_strides_of(query: Tensor, output: Tensor) -> Tensor:
    """The output with the strides of ``empty_like(query)``, copied where it has others."""
    strides = torch.empty_like(query, device="meta").stride()
    if output.stride() == strides:
        return output
    return output.new_empty_strided(output.shape, strides).copy_(output)


def _fake_lse(query: Tensor) -> Tensor:
    return query.new_empty(query.shape[:3], dtype=compute_dtype(query))


def _fake_packed(columns: Tensor) -> Tensor:
    shape = (*columns.shape[:-1], -(-columns.shape[-1] // 8))
    return columns.new_empty(shape, dtype=torch.uint8)
