"""Faults that the regression tests must see, each put into the narrowest place that makes it.

A fault is a function that patches the system through pytest's ``monkeypatch``. All sit above the
kernels, where tensors are handed over, so that they are the same on every backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from chipsparse.cache.store import CacheStore
from chipsparse.cache.tensors import AttentionCache
from chipsparse.config import SparsityConfig
from chipsparse.kernels.column_selection import column_selection
from chipsparse.kernels.column_sparse_attention import (
    ColumnSparseAttention,
    column_sparse_attention,
)
from chipsparse.kernels.dense_attention_column_sums import (
    DenseAttentionColumnSums,
    dense_attention_column_sums,
)
from chipsparse.kernels.neuron_selection import neuron_selection
from chipsparse.kernels.sparse_mlp_down import SparseMLPDown, sparse_mlp_down
from chipsparse.kernels.sparse_mlp_up import SparseMLPUp, sparse_mlp_up
from chipsparse.layers import attention
from chipsparse.layers.full_attention import AttentionInputs
from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.session import Session
from tests.wrapped_backends import Launch, wrap_backends

Fault = Callable[[pytest.MonkeyPatch], None]

ROW_TENSORS = ("residual", "lse_dense", "kept_mass")  # along the query rows, dimension 2


# The delta rule of attention.


def attention_delta_subtracted(patch: pytest.MonkeyPatch) -> None:
    """What changed since the refresh is subtracted: ``o - d`` in the place of ``o + d``."""
    refresh, sparse = attention.refresh_step, attention.sparse_step
    refreshed: dict[int, torch.Tensor] = {}

    def remembering(cache: AttentionCache, *args: Any, **kwargs: Any) -> torch.Tensor:
        refreshed[id(cache)] = refresh(cache, *args, **kwargs)
        return refreshed[id(cache)]

    def subtracting(cache: AttentionCache, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * refreshed[id(cache)] - sparse(cache, *args, **kwargs)

    patch.setattr(attention, "refresh_step", remembering)
    patch.setattr(attention, "sparse_step", subtracting)


def residual_subtracted(patch: pytest.MonkeyPatch) -> None:
    """The cached rest of the output is subtracted from the kept columns' part."""
    _change_sparse_attention(patch, lambda call: replace(call, residual=torch.neg(call.residual)))


def residual_of_an_earlier_refresh(patch: pytest.MonkeyPatch) -> None:
    """A later refresh chooses columns, but leaves what it should add to them."""
    _keep_at_later_refreshes(patch, *ROW_TENSORS)


def lse_not_stored(patch: pytest.MonkeyPatch) -> None:
    """A refresh keeps the LSE of the dense step before it."""

    def forgetting(launch: Launch, call: DenseAttentionColumnSums) -> tuple[torch.Tensor, ...]:
        output, _, column_sums = launch(call)
        return output, call.lse_previous.clone(), column_sums

    wrap_backends(patch, dense_attention_column_sums, forgetting)


# Which columns.


def columns_of_an_earlier_refresh(patch: pytest.MonkeyPatch) -> None:
    """A stale mask: the first refresh's columns go with a later one's residual."""
    _keep_at_later_refreshes(patch, "columns", "lists", "capacity")


def columns_never_chosen_anew(patch: pytest.MonkeyPatch) -> None:
    """A stale mask, milder: later refreshes make the right residual for the first one's columns."""
    refresh = attention.refresh_step

    def keeping(
        cache: AttentionCache, inputs: AttentionInputs, *, config: SparsityConfig, **options: Any
    ) -> torch.Tensor:
        columns, capacity = cache.columns, cache.capacity
        output = refresh(cache, inputs, config=config, **options)
        if columns is not None:
            cache.columns, cache.capacity = columns, capacity
            attention.record_residual(cache, output, inputs, config=config)
        return output

    patch.setattr(attention, "refresh_step", keeping)


def groups_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Sparse steps give every query block the columns of the block before it."""

    def shifted(call: ColumnSparseAttention) -> ColumnSparseAttention:
        return replace(
            call, indices=call.indices.roll(1, dims=2), counts=call.counts.roll(1, dims=2)
        )

    _change_sparse_attention(patch, shifted)


def rows_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Sparse steps let every query block begin one row late: its first row joins the one before."""

    def around(launch: Launch, call: ColumnSparseAttention) -> tuple[torch.Tensor, torch.Tensor]:
        if call.delta_rule is None:
            return launch(call)
        tensors = {name: getattr(call, name) for name in ("query", *ROW_TENSORS)}
        rolled = {
            name: tensor.roll(-1, dims=2) for name, tensor in tensors.items() if tensor is not None
        }
        output, lse = launch(replace(call, **rolled))
        return output.roll(1, dims=2), lse.roll(1, dims=2)

    wrap_backends(patch, column_sparse_attention, around)


def columns_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Sparse steps read the key and value behind the one that was chosen."""

    def shifted(call: ColumnSparseAttention) -> ColumnSparseAttention:
        return replace(call, indices=(call.indices + 1) % call.key.shape[2])

    _change_sparse_attention(patch, shifted)


def other_random_columns(patch: pytest.MonkeyPatch) -> None:
    """The random columns are not those of the seed."""
    wrap_backends(
        patch, column_selection, lambda launch, call: launch(replace(call, seed=call.seed + 1))
    )


# Whose tensors, and where they belong.


def branches_swapped(patch: pytest.MonkeyPatch) -> None:
    """Sparse steps of each guidance branch get the other one's caches."""
    acquire = CacheStore.acquire

    def swapped(
        store: CacheStore, branch: str, layer: int, part: str, kinds: frozenset[str], *rest: Any
    ) -> Any:
        (other,) = {"cond", "uncond"} - {branch}
        reads_results = bool(kinds & {"residual", "activation"})
        kept = [kind for kind in kinds if store.has(branch, layer, kind)]
        if reads_results and kept and all(store.has(other, layer, kind) for kind in kept):
            branch = other
        return acquire(store, branch, layer, part, kinds, *rest)

    patch.setattr(CacheStore, "acquire", swapped)


def skipped_output_of_the_other_branch(patch: pytest.MonkeyPatch) -> None:
    """A skipped call returns what the other guidance branch computed last."""

    def swapped(session: Session) -> torch.Tensor:
        assert session.state is not None
        (other,) = {"cond", "uncond"} - {session.state.branch}
        return session._generation.held.output(other)

    patch.setattr(Session, "skipped_output", swapped)


def tile_order_not_restored(patch: pytest.MonkeyPatch) -> None:
    """The tokens leave the blocks tile by tile."""
    patch.setattr(ModelAdapter, "restore_order", lambda *_: None)


# The delta of feed-forward layers.


def mlp_delta_subtracted(patch: pytest.MonkeyPatch) -> None:
    """What changed in the neurons is subtracted from the cached output."""
    _change_mlp_delta(patch, torch.neg)


def mlp_delta_taken_too_late(patch: pytest.MonkeyPatch) -> None:
    """The cache has the new activations before the old ones are subtracted: nothing changed."""
    _change_mlp_delta(patch, torch.zeros_like)


def mlp_activations_not_stored(patch: pytest.MonkeyPatch) -> None:
    """The cache keeps the refresh's activations, so later steps add the same change again."""

    def forgetting(launch: Launch, call: SparseMLPUp) -> torch.Tensor:
        return launch(replace(call, activation_cache=call.activation_cache.clone()))

    wrap_backends(patch, sparse_mlp_up, forgetting)


def mlp_output_not_stored(patch: pytest.MonkeyPatch) -> None:
    """The cache keeps the refresh's output, so each sparse step forgets the one before it."""

    def forgetting(launch: Launch, call: SparseMLPDown) -> torch.Tensor:
        return launch(replace(call, output_cache=call.output_cache.clone()))

    wrap_backends(patch, sparse_mlp_down, forgetting)


def neurons_off_by_one_group(patch: pytest.MonkeyPatch) -> None:
    """Every token block recomputes the neurons of the block before it."""
    wrap_backends(patch, neuron_selection, lambda launch, call: launch(call).roll(1, dims=1))


FAULTS: tuple[Fault, ...] = (
    attention_delta_subtracted,
    residual_subtracted,
    residual_of_an_earlier_refresh,
    lse_not_stored,
    columns_of_an_earlier_refresh,
    columns_never_chosen_anew,
    groups_off_by_one,
    rows_off_by_one,
    columns_off_by_one,
    other_random_columns,
    branches_swapped,
    skipped_output_of_the_other_branch,
    tile_order_not_restored,
    mlp_delta_subtracted,
    mlp_delta_taken_too_late,
    mlp_activations_not_stored,
    mlp_output_not_stored,
    neurons_off_by_one_group,
)


def _change_sparse_attention(
    patch: pytest.MonkeyPatch, change: Callable[[ColumnSparseAttention], ColumnSparseAttention]
) -> None:
    """Changes what sparse steps, but not refreshes, hand to the operation."""

    def around(launch: Launch, call: ColumnSparseAttention) -> tuple[torch.Tensor, torch.Tensor]:
        return launch(call if call.delta_rule is None else change(call))

    wrap_backends(patch, column_sparse_attention, around)


def _keep_at_later_refreshes(patch: pytest.MonkeyPatch, *names: str) -> None:
    """Lets every refresh but a layer's first leave these fields of its cache as they were."""
    refresh = attention.refresh_step

    def keeping(cache: AttentionCache, *args: Any, **kwargs: Any) -> torch.Tensor:
        before = {name: getattr(cache, name) for name in names}
        is_first = cache.residual is None
        output = refresh(cache, *args, **kwargs)
        if not is_first:
            for name, tensor in before.items():
                setattr(cache, name, tensor)
        return output

    patch.setattr(attention, "refresh_step", keeping)


def _change_mlp_delta(
    patch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    wrap_backends(patch, sparse_mlp_up, lambda launch, call: change(launch(call)))
