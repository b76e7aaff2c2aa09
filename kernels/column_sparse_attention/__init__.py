"""Attention of each query group over its own list of key columns, joined with a residual cache."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Literal

import torch

from chipsparse.kernels import ops
from chipsparse.kernels.checks import (
    DEFAULT_TRANSIENT_BYTES,
    check_attention_inputs,
    check_dtype,
    check_floating,
    check_group_rows,
    check_shape,
    group_count,
)
from chipsparse.kernels.column_sparse_attention import reference
from chipsparse.kernels.dispatch import Backend, Choice, choose, imported, runs_anywhere
from chipsparse.kernels.triton_support import (
    why_not_attention,
    why_not_gluon_sm90,
    why_not_unasked,
)

OP = "column_sparse_attention"
BACKENDS = (
    Backend(
        "gluon",
        imported(
            "chipsparse.kernels.column_sparse_attention.gluon_sm90", "column_sparse_attention"
        ),
        why_not_gluon_sm90,
    ),
    Backend(
        "triton",
        imported(
            "chipsparse.kernels.column_sparse_attention.triton_kernel", "column_sparse_attention"
        ),
        why_not_attention,
        why_not_unasked,
    ),
    Backend("reference", reference.column_sparse_attention, runs_anywhere),
)


def select(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group_rows: int = 128,
    force: str | None = None,
) -> Choice:
    """The backend that `column_sparse_attention` would use for these tensors."""
    return choose(OP, BACKENDS, query, key, value, group_rows, force=force)


def column_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    *,
    group_rows: int = 128,
    scale: float | None = None,
    delta_rule: Literal["merge", "difference"] | None = None,
    residual: torch.Tensor | None = None,
    lse_dense: torch.Tensor | None = None,
    kept_mass: torch.Tensor | None = None,
    max_transient_bytes: int = DEFAULT_TRANSIENT_BYTES,
    check_indices: bool = False,
    backend: str | Choice | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention over the kept columns, with tile packing, and the delta rule after it.

    Every group of query rows packs the key and value rows that it keeps into dense tiles (Chipmunk,
    "Deep Dive on GPU Kernel Optimizations and Systems", part III). Any lists of columns work, so a
    static pattern is only another set of indices.

    With A the attention over the kept columns alone and lse its log-sum-exp, the output is

    - without a rule: A;
    - ``difference``: ``residual + A``, where the refresh recorded ``residual = o - A``;
    - ``merge``: ``(a A + residual) / (a + 1 - w)`` with ``a = exp(lse - lse_dense)``, where the
      refresh recorded ``lse_dense`` of all columns, ``w = exp(lse - lse_dense)`` and
      ``residual = o - w A``. It weighs kept and dropped columns by their softmax mass, is exact
      when nothing changed, and safe for any ``lse``. Where ``1 - w`` is within the rounding of the
      residual's dtype nothing was dropped, and the output is A.

    NaN in a query, or in a key or value that a list names, comes out as NaN in the rows that it
    enters, an infinite score as NaN too; no other row of key and value is read.

    Args:
        query: ``[B, H, N, D]`` fp16, bf16, fp32 or fp64, of any strides.
        key: ``[B, H, M, D]``, dtype and device of query.
        value: ``[B, H, M, D]``, likewise.
        indices: int32 ``[B, H, G, K]``, columns below M; a list must not repeat a column. Entries
            past a group's count must be valid columns too (0 will do); they are ignored.
        counts: int32 ``[B, H, G]``, how many entries of each list count, at most K. A group with
            none has A = 0 and lse = -inf.
        group_rows: R, query rows per group; the last of the G = ceil(N / R) groups may be ragged.
        scale: factor of the scores; None for ``D ** -0.5``.
        delta_rule: how A joins the residual, None for not at all.
        residual: ``[B, H, N, D]`` floating point, for either rule.
        lse_dense: ``[B, H, N]`` float32, for ``merge``.
        kept_mass: w, ``[B, H, N]`` float32, for ``merge``.
        max_transient_bytes: bound of the fp32 keys, values, scores and weights that ``reference``
            holds at a time; one group of one head is the least. The kernels hold none.
        check_indices: for debugging, checks the values of indices and counts on the device before
            the launch, which makes the host wait for it.
        backend: forces one (``gluon``, ``triton``, ``reference``); None takes the first that can
            run. A `Choice` of `select` for such tensors runs unchecked.

    Returns:
        The output ``[B, H, N, D]`` in query's dtype, and the natural log-sum-exp of the kept
        columns ``[B, H, N]`` in float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes, dtypes or devices do not fit, the rule is unknown or lacks a tensor, or
            the forced backend cannot run; with ``check_indices`` also where a count is not within
            [0, K], an entry that counts not within [0, M), or a list repeats a column. Without it
            no values are looked at: that would make the host wait for the device.
    """
    if isinstance(backend, Choice):
        choice = backend
    elif torch.compiler.is_dynamo_compiling():
        return ops.column_sparse_attention(
            query,
            key,
            value,
            indices,
            counts,
            group_rows,
            scale,
            delta_rule,
            residual,
            lse_dense,
            kept_mass,
            max_transient_bytes,
            check_indices,
            backend,
        )
    else:
        cache = {"residual": residual, "lse_dense": lse_dense, "kept_mass": kept_mass}
        _check(query, key, value, indices, counts, group_rows, delta_rule, cache)
        choice = select(query, key, value, group_rows=group_rows, force=backend)
    if check_indices:
        _check_lists(OP, indices, counts, key.shape[2])
    return choice.backend.launch(
        query,
        key,
        value,
        indices,
        counts,
        group_rows=group_rows,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        delta_rule=delta_rule,
        residual=residual,
        lse_dense=lse_dense,
        kept_mass=kept_mass,
        max_transient_bytes=max_transient_bytes,
    )


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    group_rows: int,
    delta_rule: str | None,
    cache: Mapping[str, torch.Tensor | None],
) -> None:
    """Raises ``ValueError`` where shapes, dtypes, devices or the rule do not fit."""
    op = OP
    check_attention_inputs(op, query, key, value)
    check_group_rows(op, group_rows)
    batch, heads, rows, _ = query.shape
    groups = group_count(rows, group_rows)
    check_dtype(op, "indices", indices, torch.int32)
    check_dtype(op, "counts", counts, torch.int32)
    if indices.dim() != 4:
        raise ValueError(f"{op}: indices must be [B, H, G, K], got {list(indices.shape)}")
    check_shape(op, "indices", indices, (batch, heads, groups, indices.shape[3]))
    check_shape(op, "counts", counts, (batch, heads, groups))
    if delta_rule not in (None, "merge", "difference"):
        raise ValueError(f"{op}: delta_rule must be merge, difference or None, got {delta_rule!r}")
    needed = {None: (), "difference": ("residual",), "merge": tuple(cache)}[delta_rule]
    for name in needed:
        tensor = cache[name]
        if tensor is None:
            raise ValueError(
                f"{op}: delta_rule {delta_rule!r} needs {', '.join(needed)}; {name} is None"
            )
        check_floating(op, **{name: tensor})
        check_shape(op, name, tensor, tuple(query.shape[: 4 if name == "residual" else 3]))


def _check_lists(op: str, indices: torch.Tensor, counts: torch.Tensor, columns: int) -> None:
    """Raises ``ValueError`` for the first list that names no set of columns, one head at a time."""
    batch, heads, _, capacity = indices.shape
    place = torch.arange(capacity, device=indices.device)
    for b, h in product(range(batch), range(heads)):
        lists, list_counts = indices[b, h], counts[b, h]
        where = _first(((list_counts < 0) | (list_counts > capacity)).unsqueeze(-1))
        if where is not None:
            group, _ = where
            raise ValueError(
                f"{op}: counts[{b}, {h}, {group}] is {int(list_counts[group])}, "
                f"not within [0, {capacity}]"
            )
        counting = place < list_counts.unsqueeze(-1)
        where = _first(counting & ((lists < 0) | (lists >= columns)))
        if where is not None:
            group, entry = where
            raise ValueError(
                f"{op}: indices[{b}, {h}, {group}, {entry}] is {int(lists[group, entry])}, "
                f"not within [0, {columns})"
            )
        in_order = lists.masked_fill(~counting, -1).sort(-1).values
        repeats = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)
        where = _first(repeats)
        if where is not None:
            group, entry = where
            raise ValueError(
                f"{op}: the list indices[{b}, {h}, {group}] repeats column "
                f"{int(in_order[group, entry])}"
            )


def _first(mask: torch.Tensor) -> tuple[int, int] | None:
    """The first place of a true entry of ``[rows, columns]``, or None; the host waits for it."""
    places = mask.nonzero()
    return tuple(places[0].tolist()) if len(places) else None
