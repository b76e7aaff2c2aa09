"""Definition of `column_sparse_attention` and of the two delta rules of attention."""

from __future__ import annotations

from itertools import product

import torch

from chipsparse.kernels.checks import compute_dtype, group_chunks, tile_bytes
from chipsparse.kernels.softmax import softmax_with_lse


def column_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    *,
    group_rows: int,
    scale: float,
    delta_rule: str | None,
    residual: torch.Tensor | None,
    lse_dense: torch.Tensor | None,
    kept_mass: torch.Tensor | None,
    max_transient_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the public function of the same name; all arguments are checked."""
    batch, heads, rows, head_dim = query.shape
    capacity = indices.shape[3]
    dtype, device = compute_dtype(query), query.device
    output = torch.empty_like(query)
    lse = torch.empty(batch, heads, rows, dtype=dtype, device=device)
    # Looking at the counts would make the host wait for a GPU; there the tail is always masked.
    ragged = device.type != "cpu" or not bool((counts == capacity).all())
    group_bytes = (group_rows + 2 * head_dim) * capacity * dtype.itemsize
    limit = tile_bytes(device, max_transient_bytes)
    for b, h in product(range(batch), range(heads)):
        for chunk in group_chunks(rows, group_rows, group_bytes, limit):
            columns = indices[b, h, chunk.groups]
            kept, kept_lse = _attend(
                (query[b, h, chunk.rows].to(dtype) * scale).unflatten(0, chunk.shape),
                _pack_rows(key[b, h], columns).to(dtype),
                _pack_rows(value[b, h], columns).to(dtype),
                counts[b, h, chunk.groups] if ragged else None,
            )
            kept, kept_lse = kept.flatten(0, 1), kept_lse.flatten()
            lse[b, h, chunk.rows] = kept_lse
            if delta_rule == "difference":
                assert residual is not None
                kept = apply_difference(kept, residual[b, h, chunk.rows])
            elif delta_rule == "merge":
                assert residual is not None
                assert lse_dense is not None
                assert kept_mass is not None
                kept = apply_merge(
                    kept,
                    kept_lse,
                    residual[b, h, chunk.rows],
                    lse_dense[b, h, chunk.rows],
                    kept_mass[b, h, chunk.rows],
                )
            output[b, h, chunk.rows] = kept
    return output, lse


def apply_difference(kept: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The ``difference`` rule: the cached rest of the output plus the attention over kept columns.

    Args:
        kept: A, ``[..., D]`` float32.
        residual: ``o - A`` of the refresh, ``[..., D]``.

    Returns:
        ``[..., D]`` float32.
    """
    return kept + residual


def apply_merge(
    kept: torch.Tensor,
    kept_lse: torch.Tensor,
    residual: torch.Tensor,
    lse_dense: torch.Tensor,
    kept_mass: torch.Tensor,
) -> torch.Tensor:
    """The ``merge`` rule: kept and dropped columns, weighed by their softmax mass.

    ``(a A + u) / (a + 1 - w)`` with ``a = exp(t)``, ``t = kept_lse - lse_dense``. Where ``t > 0``
    both parts are divided by ``a``, so no exponential exceeds 1, and the denominator is at least
    ``1 - w``. Where that is within the rounding of the residual nothing was dropped: the result is
    A, not the ratio of two rounding errors.

    Args:
        kept: A, ``[..., D]`` float32.
        kept_lse: log-sum-exp over the kept columns now, ``[...]`` float32; -inf for none.
        residual: u = ``o - w A`` of the refresh, ``[..., D]``.
        lse_dense: log-sum-exp over all columns at the refresh, ``[...]`` float32.
        kept_mass: w, share of the softmax mass on the kept columns at the refresh, ``[...]``.

    Returns:
        ``[..., D]`` float32.
    """
    shift = (kept_lse - lse_dense).unsqueeze(-1)
    dropped_mass = (1 - kept_mass.to(kept.dtype)).unsqueeze(-1)
    nothing_dropped = dropped_mass <= torch.finfo(residual.dtype).eps
    kept_weight = shift.clamp(max=0).exp_()
    dropped_weight = (-shift).clamp_(max=0).exp_()
    total = kept_weight + dropped_weight * dropped_mass
    merged = (kept_weight * kept).add_(dropped_weight * residual).div_(total)
    return torch.where(nothing_dropped, kept, merged)


def _pack_rows(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Packs the rows ``[M, D]`` that lists ``[G, K]`` name into tiles ``[G, K, D]``."""
    return rows.index_select(0, columns.flatten()).unflatten(0, columns.shape)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    counts: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention within each group; a group whose count is 0 gets 0 and a log-sum-exp of -inf.

    Args:
        query: ``[G, R, D]``, scaled.
        key: ``[G, K, D]``, as is value.
        value: as key.
        counts: ``[G]``, or None where all K entries count.

    Returns:
        The output ``[G, R, D]`` and the log-sum-exp ``[G, R]``.
    """
    if key.shape[1] == 0:
        return torch.zeros_like(query), query.new_full(query.shape[:2], -torch.inf)
    scores = torch.bmm(query, key.mT)
    if counts is None:
        weights, lse = softmax_with_lse(scores)
        return torch.bmm(weights, value), lse
    ignored = torch.arange(key.shape[1], device=key.device) >= counts[:, None]
    weights, lse = softmax_with_lse(scores.masked_fill_(ignored[:, None], -torch.inf))
    empty = (counts == 0)[:, None]
    weights.masked_fill_(empty[:, None], 0)
    return torch.bmm(weights, value), lse.masked_fill_(empty, -torch.inf)
