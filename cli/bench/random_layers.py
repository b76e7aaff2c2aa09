"""One layer's attention and feed-forward layer on random tensors: what each action computes.

What runs is what a generation runs, `layers.attention` and `layers.mlp`, at the sizes and shares of
a plan; projections are left out.
"""

from __future__ import annotations

from copy import copy

import torch
import torch.nn.functional as F

from chipsparse.cache.tensors import AttentionCache, MLPCache
from chipsparse.kernels.dense_attention.measure import FastestKernel
from chipsparse.layers import attention, mlp
from chipsparse.layers.attention_inputs import AttentionInputs
from chipsparse.layers.column_budget import ColumnBudgets
from chipsparse.layers.exact_rows import apart, joined
from chipsparse.layers.mlp_weights import MLPWeights
from chipsparse.plan import SparsityPlan
from chipsparse.step import StepContext

SEED = 0
# From one step to the next hidden states change by about this share.
CHANGE = 0.1


class RandomAttention:
    """Self-attention of a layer that the plan has sparse, refreshed once.

    Args:
        plan: sizes and shares.
        layer: number of the transformer block.
        device: where it runs.
        dtype: of query, key and value.

    Attributes:
        query: ``[B, H, N, D]``, as are key, value and what each action gives.
        choices: what each operation of a sparse step runs on.
    """

    def __init__(
        self, plan: SparsityPlan, layer: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        layout, config = plan.layout, plan.config.attention
        shape = (3, layout.batch, layout.tokens, layout.heads, layout.head_dim)
        # As models have them: heads beside each other in a token's channels.
        self.query, self.key, self.value = (
            each.transpose(1, 2) for each in _random(*shape, device=device, dtype=dtype)
        )
        rows, self._exact = apart(self.query, layout, 2)
        self._inputs = AttentionInputs(rows, self.key, self.value, kernels=FastestKernel())
        self._config = config
        first = StepContext(1, 0, "", None)
        self._budget = ColumnBudgets(plan.config).of(layer, plan, first, self.key)
        self.choices = attention.backend_choices(self._inputs, block_size_q=config.block_size_q)
        # Each call gets a cache of its own, which leaves these as they are: what is recorded in a
        # call that is captured for a graph is computed later, or never.
        self._before = AttentionCache()
        self.dense(self._before)
        self._refreshed = copy(self._before)
        self.refresh(self._refreshed)

    def unpatched(self) -> torch.Tensor:
        """Full attention of which nothing is recorded: PyTorch's, ours in FP8, or a faster one."""
        inputs = AttentionInputs(self.query, self.key, self.value)
        precision = self._config.precision
        output = attention.replaced_attention(inputs, self.choices, precision=precision)
        return F.scaled_dot_product_attention(*inputs.tensors) if output is None else output

    def dense(self, cache: AttentionCache | None = None) -> torch.Tensor:
        """What a dense step computes and records."""
        cache = AttentionCache() if cache is None else cache
        return self._whole(
            attention.dense_step(cache, self._inputs, precision=self._config.precision)
        )

    def refresh(self, cache: AttentionCache | None = None) -> torch.Tensor:
        """What a refresh computes and records."""
        cache = copy(self._before) if cache is None else cache
        return self._whole(
            attention.refresh_step(cache, self._inputs, config=self._config, budget=self._budget)
        )

    def sparse(self) -> torch.Tensor:
        """What a sparse step computes."""
        return self._whole(
            attention.sparse_step(
                self._refreshed, self._inputs, config=self._config, choices=self.choices
            )
        )

    def _whole(self, output: torch.Tensor) -> torch.Tensor:
        """With the rows that are always computed in full."""
        if self._exact is None:
            return output
        seen = F.scaled_dot_product_attention(self._exact, self.key, self.value)
        return joined(output.transpose(1, 2), seen.transpose(1, 2)).transpose(1, 2)


class RandomMLP:
    """As `RandomAttention`, a feed-forward layer: a sparse step's input differs from a dense one's.

    The activation function is taken to be GELU, or SiLU where the layer is gated.

    Attributes:
        choices: what each operation of a sparse step runs on.
        neurons: of the layer.
        gated: whether it is.
    """

    def __init__(
        self, plan: SparsityPlan, layer: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        layout, self._config = plan.layout, plan.config.mlp
        kind = layout.kind(layer)
        self.neurons, self.gated = kind.intermediate_size, kind.mlp_linears > 2
        self._keep_count = plan.mlp_keep_count(layer)
        rows, channels = (2 if self.gated else 1) * self.neurons, layout.width

        def random(*shape: int, seed: int = SEED) -> torch.Tensor:
            return _random(*shape, device=device, dtype=dtype, seed=seed)

        self._up = random(rows, channels).div_(channels**0.5)
        # Channels side by side, as adapters lay it out for the kernels.
        self._down = random(self.neurons, channels).div_(self.neurons**0.5).t()
        self._up_bias, self._down_bias = (
            random(1, len(each)).div_(len(each) ** 0.5)[0] for each in (self._up, self._down)
        )
        self._weights = MLPWeights.from_linears(
            self._up,
            self._up_bias,
            self._down,
            self._down_bias,
            "silu" if self.gated else "gelu-tanh",
            "second" if self.gated else "none",
        )
        shape = layout.batch, layout.mlp_tokens(layer), channels
        self._before = random(*shape)
        self._after = self._before + CHANGE * random(*shape, seed=SEED + 1)
        self._cache = MLPCache()
        self.record()
        self.choices = mlp.backend_choices(
            self._cache, self._after, self._weights, config=self._config, backend=None
        )

    def stock(self) -> torch.Tensor:
        """The layer in PyTorch, at a sparse step's input."""
        hidden = F.linear(self._after, self._up, self._up_bias)
        if self.gated:
            hidden, gate = hidden.chunk(2, dim=-1)
            hidden = hidden * F.silu(gate)
        else:
            hidden = F.gelu(hidden, approximate="tanh")
        return F.linear(hidden, self._down, self._down_bias)

    def unpatched(self) -> torch.Tensor:
        """The whole layer, of which nothing is recorded, at a sparse step's input."""
        return mlp.dense_step(None, self._after, self._weights, config=self._config, backend=None)

    def record(self) -> None:
        """Records anew what sparse steps change."""
        self.dense(self._cache)

    def dense(self, cache: MLPCache | None = None) -> torch.Tensor:
        """What a dense step, or a refresh, computes and records, at its own input."""
        return mlp.dense_step(
            MLPCache() if cache is None else cache,
            self._before,
            self._weights,
            config=self._config,
            backend=None,
        )

    def sparse(self, keep_count: int | None = None) -> torch.Tensor:
        """What a sparse step computes, of the plan's share of the neurons or of so many."""
        return mlp.sparse_step(
            copy(self._cache),
            self._after,
            self._weights,
            config=self._config,
            keep_count=self._keep_count if keep_count is None else keep_count,
            backend=None,
            choices=self.choices,
        )


def _random(
    *shape: int, device: torch.device, dtype: torch.dtype, seed: int = SEED
) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)
