"""Definition of `sparse_mlp_up` and `dense_activation`: a few token blocks at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from chipsparse.kernels.calls import Activation
from chipsparse.kernels.checks import block_chunks, compute_dtype, tile_bytes
from chipsparse.kernels.fp8_quantization import FP8
from chipsparse.kernels.fp8_rows.reference import rounded
from chipsparse.kernels.sparse_mlp_up import DenseActivation, SparseMLPUp
from chipsparse.kernels.token_layout import empty_token_contiguous, is_token_contiguous


def sparse_mlp_up(call: SparseMLPUp) -> torch.Tensor:
    """Run a checked `SparseMLPUp`."""
    hidden = call.hidden
    activation_cache = call.activation_cache
    # PyTorch neither gathers nor scatters FP8, but bytes.
    cache = activation_cache if call.cache_scale is None else activation_cache.view(torch.uint8)
    neuron_indices = call.neuron_indices
    block_size = call.block_size
    batch, rows, channels = hidden.shape
    capacity = neuron_indices.shape[2]
    dtype = compute_dtype(hidden)
    if is_token_contiguous(activation_cache):
        delta = empty_token_contiguous(hidden, batch, rows, capacity)
    else:
        delta = hidden.new_empty(batch, rows, capacity)
    if capacity == 0:
        return delta
    block_bytes = (channels + 3 * block_size) * capacity * dtype.itemsize
    limit = tile_bytes(hidden.device)
    for b in range(batch):
        for chunk in block_chunks(rows, block_size, block_bytes, limit):
            neurons = neuron_indices[b, chunk.blocks].long()
            tokens = hidden[b, chunk.rows].to(dtype).unflatten(0, chunk.shape)
            new = _linear(tokens, call.weight, call.bias, neurons)
            if call.gate_weight is None:
                new = activate(new, call.activation)
            else:
                gate = _linear(tokens, call.gate_weight, call.gate_bias, neurons)
                new *= activate(gate, call.activation)
            scale = None
            if call.cache_scale is not None:
                scale = call.cache_scale[b, chunk.rows].unflatten(0, chunk.shape)
            computed = new
            new = new.to(cache.dtype) if scale is None else rounded(new, scale).view(cache.dtype)
            cached = cache[b, chunk.rows].unflatten(0, chunk.shape)
            places = neurons[:, None].expand(new.shape)
            old = cached.gather(2, places)
            cached.scatter_(2, places, new)
            if scale is None:
                change = new.to(dtype) - old.to(dtype)
            else:
                change = (new.view(FP8).float() - old.view(FP8).float()) * scale
                change = torch.where(computed.isfinite(), change, computed)
            delta[b, chunk.rows] = change.flatten(0, 1).to(delta.dtype)
    return delta


def _linear(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    neurons: torch.Tensor,
) -> torch.Tensor:
    """Tokens ``[G, R, C]`` on the neurons ``[G, K]`` of each block: ``[G, R, K]``."""
    result = tokens @ _pack_rows(weight, neurons).to(tokens.dtype).mT
    if bias is not None:
        result += _pack_rows(bias, neurons)[:, None]
    return result


def _pack_rows(rows: torch.Tensor, neurons: torch.Tensor) -> torch.Tensor:
    """Packs the rows ``[F, ...]`` that lists ``[G, K]`` name into tiles ``[G, K, ...]``."""
    return rows.index_select(0, neurons.flatten()).unflatten(0, neurons.shape)


def dense_activation(call: DenseActivation) -> torch.Tensor:
    """Run a checked `DenseActivation`: the arithmetic of the layer in a model."""
    up = F.linear(call.hidden, call.weight, call.bias)
    if call.gate_weight is None:
        return activate(up, call.activation)
    return activate(F.linear(call.hidden, call.gate_weight, call.gate_bias), call.activation) * up


def activate(hidden: torch.Tensor, activation: Activation | None) -> torch.Tensor:
    """Applies an activation function under the name that diffusers gives it."""
    if activation == "silu":
        return F.silu(hidden)
    return F.gelu(hidden, approximate="tanh" if activation == "gelu-tanh" else "none")
