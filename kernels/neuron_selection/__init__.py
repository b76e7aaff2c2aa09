"""The neurons of each token group whose mean pre-activation changed most."""

from __future__ import annotations

import torch

from chipsparse.kernels.checks import (
    check_dtype,
    check_floating,
    check_group_rows,
    check_shape,
    group_count,
)
from chipsparse.kernels.dispatch import Backend, Choice, choose, runs_anywhere
from chipsparse.kernels.neuron_selection import reference

BACKENDS = (Backend("reference", reference.neuron_selection, runs_anywhere),)


def select(hidden: torch.Tensor, weight: torch.Tensor, *, force: str | None = None) -> Choice:
    """The backend that `neuron_selection` would use for these tensors."""
    return choose("neuron_selection", BACKENDS, hidden, weight, force=force)


def neuron_selection(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean_cache: torch.Tensor,
    *,
    keep_count: int,
    group_rows: int = 128,
    backend: str | None = None,
) -> torch.Tensor:
    """Chooses the neurons to recompute, by how far the group's mean pre-activation has moved.

    The score of a neuron is ``|m' - m|``: m' is its mean pre-activation over the group now, m the
    one when it was last computed (Chipmunk's sparse MLP delta). ``mean_cache`` is MUTATED: m' is
    written for the chosen neurons, and all other entries stay bit for bit.

    Args:
        hidden: ``[B, N, C]`` fp16, bf16, fp32 or fp64.
        weight: ``[F, C]`` of the first layer, dtype of hidden; read in place and never kept.
        bias: ``[F]`` or None.
        mean_cache: m, ``[B, G, F]`` float32 (or float64), first from `mean_preactivations`.
        keep_count: K, neurons per group; more than F means F. Equal scores go to the lower neuron,
            NaN is the highest score.
        group_rows: token rows per group; the last of the G = ceil(N / group_rows) may be ragged.
        backend: forces one (``reference``); None takes the first that can run.

    Returns:
        int32 ``[B, G, K]``, ascending.

    Raises:
        ValueError: shapes or dtypes do not fit, ``keep_count`` is negative, or the forced backend
            cannot run.
    """
    op = "neuron_selection"
    _check(op, hidden, weight, bias, group_rows)
    if keep_count < 0:
        raise ValueError(f"{op}: keep_count must not be negative, got {keep_count}")
    if mean_cache.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{op}: mean_cache must be float32 or float64, got {mean_cache.dtype}")
    groups = group_count(hidden.shape[1], group_rows)
    check_shape(op, "mean_cache", mean_cache, (hidden.shape[0], groups, weight.shape[0]))
    return select(hidden, weight, force=backend).backend.launch(
        hidden, weight, bias, mean_cache, keep_count=keep_count, group_rows=group_rows
    )


def group_means(hidden: torch.Tensor, *, group_rows: int = 128) -> torch.Tensor:
    """Means over groups of consecutive token rows.

    Args:
        hidden: ``[B, N, C]`` floating point.
        group_rows: token rows per group; the last may be ragged.

    Returns:
        ``[B, G, C]`` float32 (float64 for float64 inputs).

    Raises:
        ValueError: hidden is not ``[B, N, C]`` floating point.
    """
    check_floating("group_means", hidden=hidden)
    check_group_rows("group_means", group_rows)
    if hidden.dim() != 3 or hidden.shape[1] == 0:
        raise ValueError(f"group_means: hidden must be [B, N, C], got {list(hidden.shape)}")
    return reference.group_means(hidden, group_rows=group_rows)


def mean_preactivations(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    group_rows: int = 128,
) -> torch.Tensor:
    """The mean pre-activation of every neuron over each token group, as a dense step records it.

    The layer is linear, so this is the layer on the mean token of the group.

    Args:
        hidden: ``[B, N, C]`` floating point.
        weight: ``[F, C]``, dtype of hidden.
        bias: ``[F]`` or None.
        group_rows: token rows per group; the last may be ragged.

    Returns:
        ``[B, G, F]`` float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check("mean_preactivations", hidden, weight, bias, group_rows)
    return reference.mean_preactivations(hidden, weight, bias, group_rows=group_rows)


def _check(
    op: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group_rows: int,
) -> None:
    check_floating(op, hidden=hidden)
    check_group_rows(op, group_rows)
    if hidden.dim() != 3 or hidden.shape[1] == 0:
        raise ValueError(f"{op}: hidden must be [B, N, C], got {list(hidden.shape)}")
    check_dtype(op, "weight", weight, hidden.dtype)
    check_shape(op, "weight", weight, (*weight.shape[:1], hidden.shape[2]))
    if bias is not None:
        check_shape(op, "bias", bias, (weight.shape[0],))
