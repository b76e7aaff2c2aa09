"""Faults that the regression tests must see, each put into the narrowest place that makes it.

A fault is a function that patches the system through pytest's ``monkeypatch``. All sit above the
kernels, where tensors are handed over, so that they are the same on every backend.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from chipsparse.kernels.column_sparse_attention import column_sparse_attention
from chipsparse.kernels.dense_attention_column_sums import dense_attention_column_sums
from chipsparse.kernels.neuron_selection import neuron_selection
from chipsparse.kernels.sparse_mlp_down import sparse_mlp_down
from chipsparse.kernels.sparse_mlp_up import sparse_mlp_up
from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.skip.held_outputs import HeldOutputs
from chipsparse.sparse.cache.store import CacheStore
from chipsparse.sparse.cache.tensors import Kept
from chipsparse.sparse.layers import attention
from tests.wrapped_backends import wrap_backends

FAULTS = []
GROSS = set()
ROW_TENSORS = ("residual", "residual_scale")  # along the query rows, dimension 2


def fault(function):
    FAULTS.append(function)
    return function


def gross(function):
    """A fault that the wider bounds of fp16 and bf16 find as well."""
    GROSS.add(function)
    return fault(function)


def change_sparse_attention(patch, change):
    """Changes what sparse steps, but not refreshes, hand to the operation."""
    wrap_backends(
        patch,
        column_sparse_attention,
        lambda launch, call: launch(call if call.residual is None else change(call)),
    )


def keep_at_later_refreshes(patch, *names):
    """Lets every refresh but a layer's first leave these fields of its cache as they were."""
    refresh = attention.refresh_step

    def keeping(cache, *args, **kwargs):
        before = {name: getattr(cache, name) for name in names}
        is_first = cache.residual is None
        output = refresh(cache, *args, **kwargs)
        if not is_first:
            for name, tensor in before.items():
                setattr(cache, name, tensor)
        return output

    patch.setattr(attention, "refresh_step", keeping)


def change_mlp_delta(patch, change):
    wrap_backends(patch, sparse_mlp_up, lambda launch, call: change(launch(call)))


def keep_cache(patch, operation, name):
    """Lets an operation change a copy of a cache."""

    def forgetting(launch, call):
        return launch(replace(call, **{name: getattr(call, name).clone()}))

    wrap_backends(patch, operation, forgetting)


# The delta rule of attention.


@gross
def attention_delta_subtracted(patch):
    """What changed since the refresh is subtracted: ``o - d`` in the place of ``o + d``."""
    refresh = attention.refresh_step
    sparse = attention.sparse_step
    refreshed = {}

    def remembering(cache, *args, **kwargs):
        refreshed[id(cache)] = refresh(cache, *args, **kwargs)
        return refreshed[id(cache)]

    def subtracting(cache, *args, **kwargs):
        return 2 * refreshed[id(cache)] - sparse(cache, *args, **kwargs)

    patch.setattr(attention, "refresh_step", remembering)
    patch.setattr(attention, "sparse_step", subtracting)


@gross
def residual_subtracted(patch):
    """The cached rest of the output is subtracted from the kept columns' part."""
    change_sparse_attention(patch, lambda call: replace(call, residual=torch.neg(call.residual)))


@gross
def residual_of_an_earlier_refresh(patch):
    """A later refresh chooses columns, but leaves what it should add to them."""
    keep_at_later_refreshes(patch, *ROW_TENSORS)


@fault
def lse_not_stored(patch):
    """A refresh keeps the LSE of the dense step before it."""

    def forgetting(launch, call):
        output, _, column_sums = launch(call)
        return output, call.lse_previous.clone(), column_sums

    wrap_backends(patch, dense_attention_column_sums, forgetting)


# Which columns.


@gross
def columns_of_an_earlier_refresh(patch):
    """A stale mask: the first refresh's columns go with a later one's residual."""
    keep_at_later_refreshes(patch, "columns", "lists", "capacity")


@fault
def columns_never_chosen_anew(patch):
    """A stale mask, milder: later refreshes make the right residual for the first one's columns."""
    refresh = attention.refresh_step

    def keeping(cache, inputs, *, config, **options):
        columns = cache.columns
        capacity = cache.capacity
        output = refresh(cache, inputs, config=config, **options)
        if columns is not None:
            cache.columns = columns
            attention.record_residual(
                cache,
                output,
                inputs,
                columns,
                config=config,
                capacity=capacity,
            )
        return output

    patch.setattr(attention, "refresh_step", keeping)


@gross
def groups_off_by_one(patch):
    """Sparse steps give every query block the columns of the block before it."""

    def shifted(call):
        tensors = {name: getattr(call, name).roll(1, dims=2) for name in ("indices", "counts")}
        return replace(call, **tensors)

    change_sparse_attention(patch, shifted)


@fault
def rows_off_by_one(patch):
    """Sparse steps let every query block begin one row late: its first row joins the one before."""

    def around(launch, call):
        if call.residual is None:
            return launch(call)
        tensors = {name: getattr(call, name) for name in ("query", *ROW_TENSORS)}
        rolled = {k: rows.roll(-1, dims=2) for k, rows in tensors.items() if rows is not None}
        return launch(replace(call, **rolled)).roll(1, dims=2)

    wrap_backends(patch, column_sparse_attention, around)


@fault
def columns_off_by_one(patch):
    """Sparse steps read the key and value behind the one that was chosen."""
    change_sparse_attention(
        patch,
        lambda call: replace(call, indices=(call.indices + 1) % call.key.shape[2]),
    )


# Whose tensors, and where they belong.


@gross
def branches_swapped(patch):
    """Sparse steps of each guidance branch get the other one's caches."""
    acquire = CacheStore.acquire

    def swapped(store, branch, layer, part, read, *rest):
        (other,) = {"cond", "uncond"} - {branch}
        reads_results = bool(read & {Kept.RESIDUAL, Kept.ACTIVATION})
        here = [kept for kept in read if store.has(branch, layer, kept)]
        if reads_results and here and all(store.has(other, layer, kept) for kept in here):
            branch = other
        return acquire(store, branch, layer, part, read, *rest)

    patch.setattr(CacheStore, "acquire", swapped)


@fault
def skipped_output_of_the_other_branch(patch):
    """A skipped call returns what the other guidance branch computed last."""

    output = HeldOutputs.output

    def swapped(outputs, branch, reach=0.0):
        (other,) = {"cond", "uncond"} - {branch}
        return output(outputs, other, reach)

    patch.setattr(HeldOutputs, "output", swapped)


@gross
def tile_order_not_restored(patch):
    """The tokens leave the blocks tile by tile."""
    patch.setattr(ModelAdapter, "restore_order", lambda *_: None)


# The delta of feed-forward layers.


@gross
def mlp_delta_subtracted(patch):
    """What changed in the neurons is subtracted from the cached output."""
    change_mlp_delta(patch, torch.neg)


@fault
def mlp_delta_taken_too_late(patch):
    """The cache has the new activations before the old ones are subtracted: nothing changed."""
    change_mlp_delta(patch, torch.zeros_like)


@fault
def mlp_activations_not_stored(patch):
    """The cache keeps the refresh's activations, so later steps add the same change again."""
    keep_cache(patch, sparse_mlp_up, "activation_cache")


@fault
def mlp_output_not_stored(patch):
    """The cache keeps the refresh's output, so each sparse step forgets the one before it."""
    keep_cache(patch, sparse_mlp_down, "output_cache")


@fault
def neurons_off_by_one_group(patch):
    """Every token block recomputes the neurons of the block before it."""
    wrap_backends(patch, neuron_selection, lambda launch, call: launch(call).roll(1, dims=1))
