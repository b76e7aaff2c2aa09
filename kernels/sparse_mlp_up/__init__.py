"""The first linear layer of an MLP on the chosen neurons only, as a change against a cache."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from chipsparse.kernels.calls import FirstLayerCall
from chipsparse.kernels.checks import block_count, check_dtype, check_floating, check_shape
from chipsparse.kernels.dispatch import Backend, Operation, gluon, imported, triton_or_reference
from chipsparse.kernels.fp8_quantization import FP8
from chipsparse.kernels.token_layout import is_token_contiguous
from chipsparse.kernels.triton_support import mlp_unsupported_reason

# How many times the largest activation of its token a later one may be before a cache in FP8
# saturates: those of gated layers are products, which grow fast. Numbers above 1/1800 of the
# largest still have all their digits.
FP8_HEADROOM = 16.0


@dataclass(slots=True, eq=False)
class SparseMLPUp(FirstLayerCall[torch.Tensor]):
    """Computes the activations of the listed neurons and returns their change.

    With S the neuron list of a token block (Chipmunk's sparse MLP delta), the activation is
    ``activation(hidden @ weight[S].T + bias[S])``. In a gated MLP (SwiGLU and the like, with
    ``gate_weight``) it is ``activation(hidden @ gate_weight[S].T + gate_bias[S])`` times
    ``hidden @ weight[S].T + bias[S]``, and this product is what the cache holds.

    ``activation_cache`` is MUTATED: the entries of the listed neurons are overwritten with the new
    activations, after the old ones were read; all others stay bit for bit. The change is the one
    between the stored values, so rounding does not add up over the steps.

    Args (and those of `FirstLayerCall`):
        neuron_indices: int32 ``[B, G, K]``, below F; a list must not repeat a neuron.
        activation_cache: ``[B, N, F]`` floating point, last written activations, of any strides.
            The kernels want the tokens of a neuron contiguous, as `dense_activation` makes it, and
            overwrite what pads them (see `token_layout`); without padding they work on a copy. Or
            in e4m3, turned, from `fp8_rows`: new activations saturate at 448 times their scale.
        cache_scale: float32 ``[B, N, 1]``, that of each token of a cache in e4m3; else None.

    Returns:
        New minus old activation of the listed neurons, ``[B, N, K]`` in hidden's dtype. Its tokens
        are contiguous where those of the cache are, as `token_layout` says.
    """

    neuron_indices: torch.Tensor
    activation_cache: torch.Tensor
    _: KW_ONLY
    cache_scale: torch.Tensor | None = None

    def check(self) -> None:
        """Raises ``ValueError`` where shapes, dtypes or the activation do not fit."""
        indices = self.neuron_indices
        cache = self.activation_cache
        self.check_first_layer(activated=True)
        batch, rows, _ = self.hidden.shape
        if self.cache_scale is None:
            check_floating(activation_cache=cache)
        else:
            check_dtype("activation_cache", cache, FP8)
            check_shape("cache_scale", self.cache_scale, (batch, rows, 1), torch.float32)
        lists = (batch, block_count(rows, self.block_size))
        check_shape("neuron_indices", indices, (*lists, *indices.shape[-1:]), torch.int32)
        check_shape("activation_cache", cache, (batch, rows, self.weight.shape[0]))


@dataclass(slots=True, eq=False)
class DenseActivation(FirstLayerCall[torch.Tensor]):
    """The activations of all neurons, as a dense step computes and caches them.

    Args (and those of `FirstLayerCall`):
        block_size: token rows per block of the sparse steps that follow.
        backend: the backend of those steps (``gluon``, ``triton``, ``reference``); None for the one
            that `sparse_mlp_up` would take; ``library`` where none follow, for what PyTorch does
            fastest.

    Returns:
        ``[B, N, F]`` in hidden's dtype, in the strides which that backend wants: contiguous for the
        reference and the library, else with contiguous tokens, as `token_layout` says.
    """

    def check(self) -> None:
        """Raises ``ValueError`` where shapes, dtypes or the activation do not fit."""
        self.check_first_layer(activated=True)


def _cache_reason(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    gate_weight: torch.Tensor | None,
    block_size: int,
    cache: torch.Tensor | None = None,
) -> str | None:
    if cache is None:
        return None
    if cache.dtype == torch.float64:
        return "needs an activation_cache of fp16, bf16, fp32 or e4m3, got torch.float64"
    if not is_token_contiguous(cache):
        return (
            "needs an activation_cache whose tokens are contiguous, at a multiple of 8 for each "
            f"neuron, got strides {cache.stride()} for [B, N, F]"
        )
    return None


def _not_for_gluon(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    gate_weight: torch.Tensor | None,
    block_size: int,
    cache: torch.Tensor | None = None,
) -> str | None:
    if gate_weight is not None:
        return "written for MLPs without a gate"
    if cache is not None and cache.dtype == FP8:
        return "written for caches in 16 or 32 bits, got e4m3"
    if block_size != 128:
        return f"needs blocks of 128 rows, got {block_size}"
    one_distance = hidden.stride(0) == hidden.shape[1] * hidden.stride(1)
    if hidden.data_ptr() % 16 or (hidden.shape[0] > 1 and not one_distance):
        return "needs hidden at a multiple of 16 bytes and its rows at one distance over the batch"
    return None


def _facts(call: FirstLayerCall[torch.Tensor]) -> tuple[Any, ...]:
    return call.hidden, call.weight, call.gate_weight, call.block_size


def _backends(function: str, gluon_file: str) -> tuple[Backend, ...]:
    reasons = mlp_unsupported_reason, _cache_reason
    return (
        gluon(f"{__name__}.{gluon_file}", function, *reasons, _not_for_gluon),
        *triton_or_reference(__name__, function, *reasons),
    )


sparse_mlp_up = Operation(
    "sparse_mlp_up",
    SparseMLPUp,
    lambda call: (*_facts(call), call.activation_cache),
    *_backends("sparse_mlp_up", gluon_file="gluon_sm90"),
)
# Both kernels want the same layout, so one makes it for either; the library stands last, because
# what it makes is for no sparse step.
dense_activation = Operation(
    "dense_activation",
    DenseActivation,
    _facts,
    *_backends("dense_activation", gluon_file="triton_kernel"),
    Backend("library", imported(f"{__name__}.library", "dense_activation")),
)
