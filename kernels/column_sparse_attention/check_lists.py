"""For debugging: whether the lists of `column_sparse_attention` name sets of columns."""

from __future__ import annotations

from itertools import product

import torch

OP = "column_sparse_attention"


def check_lists(indices: torch.Tensor, counts: torch.Tensor, columns: int) -> None:
    """Looks at the values of lists, one head at a time; the host waits for them.

    Args:
        indices: int32 ``[B, H, G, K]``.
        counts: int32 ``[B, H, G]``.
        columns: M, of key and value.

    Raises:
        ValueError: a count is not within [0, K], an entry that counts not within [0, M), or a list
            repeats a column.
    """
    batch, heads, _, capacity = indices.shape
    place = torch.arange(capacity, device=indices.device)
    for b, h in product(range(batch), range(heads)):
        lists, list_counts = indices[b, h], counts[b, h]
        where = _first(((list_counts < 0) | (list_counts > capacity)).unsqueeze(-1))
        if where is not None:
            block, _ = where
            raise ValueError(
                f"{OP}: counts[{b}, {h}, {block}] is {int(list_counts[block])}, "
                f"not within [0, {capacity}]"
            )
        counting = place < list_counts.unsqueeze(-1)
        where = _first(counting & ((lists < 0) | (lists >= columns)))
        if where is not None:
            block, entry = where
            raise ValueError(
                f"{OP}: indices[{b}, {h}, {block}, {entry}] is {int(lists[block, entry])}, "
                f"not within [0, {columns})"
            )
        in_order = lists.masked_fill(~counting, -1).sort(-1).values
        repeats = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)
        where = _first(repeats)
        if where is not None:
            block, entry = where
            raise ValueError(
                f"{OP}: the list indices[{b}, {h}, {block}] repeats column "
                f"{int(in_order[block, entry])}"
            )


def _first(mask: torch.Tensor) -> tuple[int, int] | None:
    """The first place of a true entry of ``[rows, columns]``, or None; the host waits for it."""
    places = mask.nonzero()
    return tuple(places[0].tolist()) if len(places) else None
