"""Errors of one layer at several budgets, on a few groups of its rows, beside its exact output.

Query groups are independent of each other in column-sparse attention, and token groups in the
sparse MLP: a sample of them, with all keys, goes through the same operations as a whole layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from chipsparse import attention, mlp
from chipsparse.attention import AttentionBudget
from chipsparse.cache import AttentionCache, MLPCache
from chipsparse.config import AttentionConfig, MLPConfig
from chipsparse.kernels.column_selection import column_selection
from chipsparse.kernels.dense_attention import dense_attention
from chipsparse.kernels.dense_attention_column_sums import dense_attention_column_sums
from chipsparse.mlp import MLPWeights

# A norm below this counts as zero.
TINY = torch.finfo(torch.float32).tiny


class SampledRows:
    """Some groups of consecutive rows.

    Args:
        starts: first row of each group.
        rows: rows of a group.
    """

    def __init__(self, starts: Sequence[int], rows: int) -> None:
        self.starts = list(starts)
        self.rows = rows

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These rows, ``[..., N, D]`` to ``[..., S * R, D]``."""
        pieces = [tensor[..., first : first + self.rows, :] for first in self.starts]
        return torch.cat(pieces, dim=-2)

    def of_vector(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same for ``[..., N]``."""
        return self.of(tensor.unsqueeze(-1)).squeeze(-1)

    def spread(self, sample: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Rows of the sample ``[..., S * R, D]`` repeated over all rows of ``[..., N, D]``."""
        copies = -(-like.shape[-2] // sample.shape[-2])
        shape = [1] * (sample.ndim - 2) + [copies, 1]
        return sample.repeat(shape)[..., : like.shape[-2], :]


def relative_error(output: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """L2 norm of what is wrong over that of the exact output, float32 ``[]``."""
    wrong = torch.linalg.vector_norm(output.float() - exact.float())
    return wrong / torch.linalg.vector_norm(exact.float()).clamp(min=TINY)


def head_group_errors(output: torch.Tensor, exact: torch.Tensor, groups: int) -> torch.Tensor:
    """The same of each of several runs of neighbouring heads of ``[B, H, N, D]``."""
    pairs = zip(output.chunk(groups, 1), exact.chunk(groups, 1), strict=True)
    return torch.stack([relative_error(a, b) for a, b in pairs])


class SampledAttention:
    """The caches of one layer and guidance branch, for every anchor and budget.

    Args:
        config: the delta rule and what else is in force.
        budgets: what a refresh keeps, one after the other.
        sample: which rows.
        scale: factor of the scores, None for ``D ** -0.5``.
        backend: forces one.
        head_groups: into how many runs of heads errors and masses are divided.
    """

    def __init__(
        self,
        config: AttentionConfig,
        budgets: Sequence[AttentionBudget],
        sample: SampledRows,
        *,
        scale: float | None,
        backend: str | None,
        head_groups: int,
    ) -> None:
        self.sample = sample
        self._config = config
        self._budgets = budgets
        self._scale = scale
        self._backend = backend
        self._head_groups = head_groups
        self._lse: torch.Tensor | None = None
        self._caches: dict[int, list[AttentionCache]] = {}

    def record_constants(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Remembers the softmax constants that the next anchor weighs its column sums with."""
        _, self._lse = dense_attention(
            self.sample.of(query), key, value, scale=self._scale, backend=self._backend
        )

    def refresh(
        self, anchor: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Chooses the columns of every budget and fills its caches.

        Returns:
            The softmax mass that the columns hold of the rows, mean of each group of heads, float32
            ``[budgets, head groups]``.
        """
        assert self._lse is not None
        rows = self.sample.of(query)
        exact, lse, sums = dense_attention_column_sums(
            rows,
            key,
            value,
            self._lse,
            group_rows=self._config.group_rows,
            scale=self._scale,
            backend=self._backend,
        )
        masses = []
        caches = self._caches[anchor] = []
        for budget in self._budgets:
            keep_count, random_count = budget.counts(self._config)
            columns = column_selection(
                sums,
                keep_count=keep_count,
                random_count=random_count,
                static_columns=budget.static_columns,
                seed=budget.seed,
                backend=self._backend,
            )
            cache = AttentionCache(lse=lse, columns=columns)
            # What merge records of the kept mass is what is to be known of any rule.
            attention.record_residual(
                cache,
                exact,
                rows,
                key,
                value,
                config=dataclasses.replace(self._config, delta_rule="merge"),
                scale=self._scale,
                backend=self._backend,
            )
            assert cache.kept_mass is not None
            masses.append(
                torch.stack(
                    [heads.float().mean() for heads in cache.kept_mass.chunk(self._head_groups, 1)]
                )
            )
            if self._config.delta_rule != "merge":
                cache = self._recorded(cache, exact, rows, key, value)
            caches.append(cache)
        return torch.stack(masses)

    def _recorded(
        self,
        cache: AttentionCache,
        exact: torch.Tensor,
        rows: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> AttentionCache:
        """The caches of another rule with the same columns."""
        if self._config.delta_rule == "reuse":
            return AttentionCache(residual=exact)
        own = AttentionCache(lse=cache.lse, columns=cache.columns, capacity=cache.capacity)
        attention.record_residual(
            own,
            exact,
            rows,
            key,
            value,
            config=self._config,
            scale=self._scale,
            backend=self._backend,
        )
        return own

    def outputs(
        self, anchor: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> list[torch.Tensor]:
        """What a sparse step would give for the rows at every budget, ``[B, H, S * R, D]`` each."""
        rows = self.sample.of(query)
        return [
            attention.sparse_step(
                cache,
                rows,
                key,
                value,
                config=self._config,
                scale=self._scale,
                backend=self._backend,
            )
            for cache in self._caches[anchor]
        ]

    def anchors(self, of: Sequence[int]) -> list[int]:
        """Those of some anchors that have caches: an expert that starts late has not seen all."""
        return [anchor for anchor in of if anchor in self._caches]

    def keep_only(self, anchors: Sequence[int]) -> None:
        """Frees the caches of all other anchors."""
        self._caches = {a: self._caches[a] for a in anchors if a in self._caches}


class SampledMLP:
    """The same for the feed-forward layer, whose caches follow every sparse step.

    Args:
        config: what is in force.
        keep_counts: neurons that each budget recomputes.
        sample: which rows.
        backend: forces one.
    """

    def __init__(
        self,
        config: MLPConfig,
        keep_counts: Sequence[int],
        sample: SampledRows,
        *,
        backend: str | None,
    ) -> None:
        self.sample = sample
        self._config = config
        self._keep_counts = keep_counts
        self._backend = backend
        self._caches: dict[int, list[MLPCache]] = {}

    def exact(self, hidden: torch.Tensor, weights: MLPWeights) -> torch.Tensor:
        """The layer's own output for the rows, ``[B, S * R, C]``."""
        return mlp.dense_step(
            None, self.sample.of(hidden), weights, config=self._config, backend=self._backend
        )

    def refresh(self, anchor: int, hidden: torch.Tensor, weights: MLPWeights) -> None:
        """Fills the caches of every budget."""
        cache = MLPCache()
        rows = self.sample.of(hidden)
        mlp.dense_step(cache, rows, weights, config=self._config, backend=self._backend)
        self._caches[anchor] = [_copy(cache) for _ in self._keep_counts]

    def outputs(self, anchor: int, hidden: torch.Tensor, weights: MLPWeights) -> list[torch.Tensor]:
        """What a sparse step gives for the rows at every budget; the caches go on from there."""
        rows = self.sample.of(hidden)
        return [
            mlp.sparse_step(
                cache,
                rows,
                weights,
                config=self._config,
                keep_count=keep_count,
                backend=self._backend,
            )
            for cache, keep_count in zip(self._caches[anchor], self._keep_counts, strict=True)
        ]

    def anchors(self, of: Sequence[int]) -> list[int]:
        """Those of some anchors that have caches: an expert that starts late has not seen all."""
        return [anchor for anchor in of if anchor in self._caches]

    def keep_only(self, anchors: Sequence[int]) -> None:
        """Frees the caches of all other anchors."""
        self._caches = {a: self._caches[a] for a in anchors if a in self._caches}


def _copy(cache: MLPCache) -> MLPCache:
    copy = dataclasses.replace(cache)
    for item in dataclasses.fields(cache):
        value = getattr(cache, item.name)
        if isinstance(value, torch.Tensor):
            setattr(copy, item.name, value.clone())
    return copy
