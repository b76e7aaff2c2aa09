"""A feed-forward layer: what it does at a step, and what each action computes and records.

The weights are passed in at every call and never kept, so adapters, offloading and quantization
stay in charge of them. Source of the method: Chipmunk's sparse MLP delta, as for attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from chipsparse.config import Action
from chipsparse.kernels.dispatch import Choice
from chipsparse.kernels.fp8_rows import fp8_rows
from chipsparse.kernels.kinds import kind_of
from chipsparse.kernels.neuron_selection import mean_preactivations, neuron_selection
from chipsparse.kernels.sparse_mlp_down import sparse_mlp_down
from chipsparse.kernels.sparse_mlp_up import FP8_HEADROOM, dense_activation, sparse_mlp_up
from chipsparse.kernels.token_layout import aligned_rows, empty_token_contiguous
from chipsparse.sparse.cache.tensors import MLPCache, RefreshedMLP
from chipsparse.sparse.layers.mlp_weights import Fp8MLPWeights, MLPWeights
from chipsparse.sparse.layers.state import OpenCall, Shared, split_full_attention_rows

Addend = Callable[[], torch.Tensor]  # computes another summand of a layer's result


class MLPLayer:
    """The feed-forward layer of one transformer block: what it does at a step, from which cache."""

    def __init__(self, number: int, shared: Shared) -> None:
        self.number = number
        self._shared = shared
        size = shared.config.block_size
        backend = shared.backend
        self._dense = partial(dense_step, block_size=size, backend=backend)
        self._sparse = partial(sparse_step, block_size=size, backend=backend)
        self._backend_choices = partial(backend_choices, block_size=size, backend=backend)

    def __call__(
        self,
        state: OpenCall | None,
        hidden: torch.Tensor,
        weights: MLPWeights | Fp8MLPWeights,
        *,
        addend: Addend | None = None,
    ) -> torch.Tensor:
        """The layer as the open call wants it, plus what is to be added to it.

        Takes hidden states ``[B, N, C]`` and gives the like. The layout's full-attention rows are
        computed in full. ``addend`` computes another summand of the result where there are none; it
        is not cached and may be overwritten. Outside a transformer call there is no state.
        """
        if state is None or not state.caching:
            return self._dense(None, hidden, weights, addend=addend)
        shared = self._shared
        layout = state.plan.layout
        dense = state.dense.get((self.number, "mlp"))
        with shared.recorder.watch(self.number, "mlp", dense) as entry:
            if entry.reason is not None:
                return self._dense(None, hidden, weights, addend=addend)
            full_rows = None
            if layout.kind(self.number).mlp_sees_text:
                hidden, full_rows = split_full_attention_rows(hidden, layout, 1)
            assert full_rows is None or addend is None
            entry.action = shared.layer_action(state, self.number, "mlp")
            reads = shared.caches.reads["mlp", entry.action]
            with shared.caches.acquire(state.branch, self.number, "mlp", reads) as cache:
                if entry.action is not Action.SPARSE:
                    entry.backend = shared.backend or "library"
                    reads = shared.caches.reads["mlp", Action.SPARSE]
                    with shared.kept_in_place(state.branch, cache, reads):
                        output = self._dense(cache, hidden, weights, addend=addend)
                    if entry.action is Action.REFRESH:
                        cache.refreshed_at = state.place.step
                else:
                    refreshed = cache.refreshed()
                    read = weights.read(hidden.dtype, backend=shared.backend)
                    choices = self._choices(refreshed, hidden, weights, read)
                    operations = ("sparse_mlp_up", "sparse_mlp_down")
                    names = [choices[operation].backend.name for operation in operations]
                    entry.backend = "+".join(dict.fromkeys(names))
                    keep_count = state.plan.mlp_keep_count(self.number)
                    entry.computed = keep_count / read.up.shape[0]
                    output = self._sparse(
                        refreshed,
                        hidden,
                        read,
                        keep_count=keep_count,
                        addend=addend,
                    )
            if full_rows is None:
                return output
            return torch.cat([self._dense(None, full_rows, weights), output], dim=1)

    def _choices(
        self,
        cache: RefreshedMLP,
        hidden: torch.Tensor,
        weights: MLPWeights | Fp8MLPWeights,
        read: MLPWeights,
    ) -> Mapping[str, Choice]:
        kind = kind_of(hidden, read.up, read.gate, read.down, cache.activation, cache.mean)
        return self._shared.recorder.choices(
            ("mlp", type(weights), *kind),
            lambda: {
                **self._backend_choices(cache, hidden, read),
                **weights.reading_choices(hidden.dtype, backend=self._shared.backend),
            },
        )


def backend_choices(
    cache: RefreshedMLP,
    hidden: torch.Tensor,
    weights: MLPWeights,
    *,
    block_size: int,
    backend: str | None,
) -> dict[str, Choice]:
    """The backend that each operation of a sparse step runs on, and why not on others."""
    layer = hidden, weights.up, weights.gate
    return {
        "neuron_selection": neuron_selection.choose(*layer, cache.mean, backend=backend),
        "sparse_mlp_up": sparse_mlp_up.choose(
            *layer,
            block_size,
            cache.activation,
            backend=backend,
        ),
        # Dtype and device of the delta decide, which are those of hidden.
        "sparse_mlp_down": sparse_mlp_down.choose(
            hidden,
            weights.down,
            block_size,
            backend=backend,
        ),
    }


def dense_step(
    cache: MLPCache | None,
    hidden: torch.Tensor,
    weights: MLPWeights | Fp8MLPWeights,
    *,
    block_size: int,
    backend: str | None,
    addend: Addend | None = None,
) -> torch.Tensor:
    """The whole layer for hidden ``[B, N, C]``; records activations, output and block means.

    Without a cache it records nothing and computes in the model's own layout, as fast as PyTorch
    can. An ``addend`` ``[B, N, C]``, which may be overwritten, is added to the result, but not to
    what is recorded. With weights in FP8 it computes what the model does, with its own rounding.
    """
    summand = None if addend is None else addend()
    if isinstance(weights, Fp8MLPWeights):
        activation = weights.neurons(hidden)
    else:
        kernel = "library" if cache is None else backend
        activation = dense_activation(**weights.first_layer(hidden, block_size, kernel))
    if cache is None and summand is not None:
        return _add_second_linear(activation, weights, summand.contiguous())
    output = _second_linear(activation, weights)
    if cache is not None:
        read = weights.read(hidden.dtype, backend=backend)
        cache.mean = mean_preactivations(**read.first_layer(hidden, block_size, backend))
        if cache.in_fp8:
            activation, cache.token_scale = fp8_rows(
                activation,
                headroom=FP8_HEADROOM,
                turned=True,
                backend=backend,
            )
        elif read is not weights:  # computed by the model's linears, not for the kernels
            choice = sparse_mlp_up.choose(hidden, read.up, read.gate, block_size, backend=backend)
            if choice.backend.name != "reference":
                laid_out = empty_token_contiguous(hidden, *activation.shape)
                activation = laid_out.copy_(activation)
        cache.activation = activation
        # Compiled code may reuse the memory of what it is given.
        cache.output = output.clone() if summand is None else output
    return output if summand is None else output + summand


def _second_linear(activation: torch.Tensor, weights: MLPWeights | Fp8MLPWeights) -> torch.Tensor:
    """``activation @ down.T + down_bias`` for ``[B, N, F]``, of any strides, without copying it."""
    if activation.is_contiguous() or isinstance(weights, Fp8MLPWeights):
        return weights.linear(activation, weights.down, weights.down_bias)
    rows = activation.shape[1]
    down = weights.down
    bias = weights.down_bias
    output = activation.new_empty(*activation.shape[:2], down.shape[0])
    aligned = aligned_rows(rows)
    # One product per sample: to fold samples into rows would copy tokens that are contiguous.
    for sample, result in zip(activation[:, :aligned], output[:, :aligned], strict=True):
        if bias is None:
            torch.mm(sample, down.t(), out=result)
        else:
            torch.addmm(bias, sample, down.t(), out=result)
    if aligned < rows:
        output[:, aligned:] = weights.linear(activation[:, aligned:].contiguous(), down, bias)
    return output


def _add_second_linear(
    activation: torch.Tensor,
    weights: MLPWeights | Fp8MLPWeights,
    onto: torch.Tensor,
) -> torch.Tensor:
    """`_second_linear` added in place to ``onto``, contiguous ``[B, N, C]``.

    A model that has both in one linear joins their inputs before it: at a video's length that copy
    takes longer than to read and write the sum once more.
    """
    if isinstance(weights, Fp8MLPWeights):  # PyTorch's product of such weights adds no matrix
        return onto.add_(_second_linear(activation, weights))
    rows = onto.flatten(0, 1)
    rows.addmm_(activation.flatten(0, 1), weights.down.t())
    if weights.down_bias is not None:
        rows += weights.down_bias
    return onto


def sparse_step(
    cache: RefreshedMLP,
    hidden: torch.Tensor,
    weights: MLPWeights,
    *,
    block_size: int,
    keep_count: int,
    backend: str | None,
    addend: Addend | None = None,
) -> torch.Tensor:
    """Recomputes the neurons that changed most and adds their change to the cached output.

    An ``addend`` ``[B, N, C]`` is added to the result, but not to the cache.
    """
    summand = None if addend is None else addend()
    first_layer = weights.first_layer(hidden, block_size, backend)
    neurons = neuron_selection(**first_layer, mean_cache=cache.mean, keep_count=keep_count)
    delta = sparse_mlp_up(
        **first_layer,
        neuron_indices=neurons,
        activation_cache=cache.activation,
        cache_scale=cache.token_scale,
    )
    return sparse_mlp_down(
        delta,
        weights.down,
        neurons,
        cache.output,
        addend=summand,
        block_size=block_size,
        backend=backend,
    )
