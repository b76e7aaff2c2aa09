"""A guidance branch's columns for another one, whose prompt has another length in the sequence.

Both see the same video or image tokens, at other positions where the text comes before them. The
bitmask of columns moves with them, bit by bit, and a query block gets the bitmask of the block at
its position in the video or image. For that, query blocks must lie alike in both
(benchmarks/notes/schedules.md). So where text comes first, the later branch gets padding rows: rows
of zeros before its own. A block of text gets the bitmask of the block that is as far from the video
or image, or of the outermost one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from chipsparse.config import SparsityConfig
from chipsparse.kernels.checks import block_count
from chipsparse.kernels.mask_packing import pack_mask
from chipsparse.layout import ModelLayout
from chipsparse.sparse.plan import SparsityPlan


def aligned(layout: ModelLayout, first: ModelLayout, config: SparsityConfig) -> ModelLayout:
    """Return the layout with the padding rows that align its query blocks with the first one's.

    It has none where blocks lie alike without, and where no columns are chosen.
    """
    if not config.attention.is_sparse or not layout.text_first or layout.exact_text:
        return layout
    missing = (first.text_tokens - layout.text_tokens) % config.block_size
    return replace(layout, padding_rows=missing)


def with_padding_rows(query: torch.Tensor, layout: ModelLayout) -> torch.Tensor:
    """Return a query ``[B, H, N, D]`` after its padding rows, in the order of memory it has."""
    return F.pad(query.transpose(1, 2), (0, 0, 0, 0, layout.padding_rows, 0)).transpose(1, 2)


def fits(chosen: SparsityPlan, own: SparsityPlan, layer: int) -> bool:
    """Return True where a layer's columns of one plan serve one with another length of text.

    Query blocks must lie alike. The chosen columns must leave the video or image at least half of
    the columns that it would have in the other plan.
    """

    def left(plan: SparsityPlan) -> int:
        return plan.attention_keep_count(layer) - plan.layout.text_tokens

    first, second = (
        replace(plan.layout, text_tokens=0, share=None, padding_rows=0) for plan in (chosen, own)
    )
    if first != second:
        return False
    distance = _first_row(chosen.layout) - _first_row(own.layout)
    return distance % own.config.block_size == 0 and 2 * left(chosen) >= left(own)


def _first_row(layout: ModelLayout) -> int:
    """Return the first query row, counted from the video's or image's first one."""
    return layout.query_rows.start - layout.grid_columns.start


def columns_of(
    bitmask: torch.Tensor,
    chosen: ModelLayout,
    own: ModelLayout,
    block_size_q: int,
    static_columns: torch.Tensor | None,
) -> torch.Tensor:
    """Return the columns that another branch chose, at the positions that they have in this one.

    Static columns of this branch, its text among them, are added. The host waits for no device.

    The bitmask is uint8 ``[B, H, G', ceil(N' / 8)]`` in the chosen layout, and the result
    ``[B, H, G, ceil(N / 8)]`` in the own one. ``static_columns`` is as in `AttentionBudget`.
    """
    blocks = block_count(len(own.query_rows), block_size_q)
    number = torch.arange(blocks, device=bitmask.device)
    number += (_first_row(own) - _first_row(chosen)) // block_size_q
    rows = bitmask.index_select(2, number.clamp_(0, bitmask.shape[2] - 1))
    moved = _moved(rows, own.grid_columns.start - chosen.grid_columns.start, own.tokens)
    if static_columns is not None:
        moved |= pack_mask(static_columns, backend="reference")
    return moved


def _moved(bitmask: torch.Tensor, distance: int, columns: int) -> torch.Tensor:
    """Return the bits shifted to later columns by a distance; bits beyond either end are dropped.

    The bitmask is uint8 ``[..., n]``, and the result ``[..., ceil(columns / 8)]``.
    """
    size = -(-columns // 8)
    whole, rest = divmod(distance, 8)
    after = size - whole - bitmask.shape[-1]
    moved = F.pad(bitmask, (whole, after))
    if rest:
        before = F.pad(bitmask, (whole + 1, after - 1))
        moved <<= rest
        moved |= before.bitwise_right_shift_(8 - rest)
    moved[..., -1] &= 0xFF >> -columns % 8
    return moved
