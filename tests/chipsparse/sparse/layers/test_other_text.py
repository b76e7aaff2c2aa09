"""Columns of a branch whose prompt has another length, against masks that are not packed."""

from dataclasses import replace
from operator import attrgetter

import pytest
import torch

from chipsparse import SparsityConfig
from chipsparse.kernels.mask_packing import pack_mask
from chipsparse.layout import LayerKind, ModelLayout, Share
from chipsparse.sparse.layers.column_budget import static_columns
from chipsparse.sparse.layers.other_text import aligned, columns_of, fits, with_padding_rows
from chipsparse.sparse.plan import SparsityPlan

GRID = 61
SIZE = 8
LAYOUT = ModelLayout((LayerKind("block", 2, 16),), 3, 8, 2, ((1, 1, GRID),), text_first=True)
START = attrgetter("start")
CONFIG = SparsityConfig(block_size=SIZE)
SPLIT = Share(heads=2, tokens=40, grid_tokens=40)
LENGTHS = [(4, 4), (16, 0), (0, 16), (21, 2), (2, 21), (13, 12), (40, 17), (17, 40)]


def blocks_of(layout):
    """The video or image tokens of each block; below 0 and from `GRID` on it is text or nothing."""
    rows = layout.query_rows
    lead = layout.text_tokens if layout.text_first else 0
    return [range(row - lead, row - lead + SIZE) for row in range(rows.start, rows.stop, SIZE)]


def image(layout):
    first = layout.text_tokens if layout.text_first else 0
    return slice(first, first + GRID)


def chosen_by(layout):
    """Random columns of every list, and all of the text."""
    blocks = len(blocks_of(layout))
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(layout.batch, layout.heads, blocks, layout.tokens, dtype=torch.bool)
    mask[..., image(layout)] = torch.rand(*mask.shape[:3], GRID, generator=generator) < 0.3
    return mask


@pytest.mark.parametrize(("first", "exact_text"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("theirs", "ours"), LENGTHS)
def test_columns_and_lists_are_those_of_the_same_place(theirs, ours, first, exact_text):
    other, own = (
        replace(LAYOUT, text_tokens=text, text_first=first, exact_text=exact_text)
        for text in (theirs, ours)
    )
    own = aligned(own, other, CONFIG)
    mask = chosen_by(other)
    places = blocks_of(other)
    expected = torch.ones(2, 3, len(blocks_of(own)), own.tokens, dtype=torch.bool)
    for block, tokens in enumerate(blocks_of(own)):
        nearest = min(max(tokens, places[0], key=START), places[-1], key=START)
        source = places.index(nearest)
        if 0 <= tokens.start < GRID:
            assert nearest == tokens
        expected[:, :, block, image(own)] = mask[:, :, source, image(other)]
    text = static_columns(own, None, mask.device)
    found = columns_of(pack_mask(mask, backend="reference"), other, own, SIZE, text)
    assert torch.equal(found, pack_mask(expected, backend="reference"))  # also bits behind the last


def test_rows_of_zeros_stand_before_the_query_in_its_order_of_memory():
    query = torch.randn(2, 7, 3, 4).transpose(1, 2)
    found = with_padding_rows(query, replace(LAYOUT, padding_rows=5))
    assert torch.equal(found[:, :, 5:], query)
    assert not found[:, :, :5].any()
    assert found.transpose(1, 2).is_contiguous()


def plan(density=0.5, **changes):
    config = SparsityConfig().override({"attention.density": density, "block_size": 8})
    return SparsityPlan(config, replace(LAYOUT, **changes), steps=10)


@pytest.mark.parametrize(
    ("other", "own", "expected"),
    [
        (plan(text_tokens=9), plan(text_tokens=1), True),
        (plan(text_tokens=9), plan(text_tokens=4, padding_rows=5), True),
        (plan(text_tokens=9), plan(text_tokens=4), False),
        (plan(text_tokens=9, share=SPLIT), plan(text_tokens=4, share=SPLIT, padding_rows=5), True),
        (plan(text_tokens=9, batch=1), plan(text_tokens=1), False),
        (plan(text_tokens=9, grids=((1, 2, 31),)), plan(text_tokens=1), False),
        (plan(text_tokens=9, samples=(1,)), plan(text_tokens=1, samples=(1,)), True),
        (plan(text_tokens=9, samples=(0,)), plan(text_tokens=1, samples=(1,)), False),
        (plan(text_tokens=41), plan(text_tokens=1), False),  # which leaves 10 of 51, not 30
        (plan(text_tokens=1), plan(text_tokens=41), True),
    ],
)
def test_whose_columns_serve(other, own, expected):
    assert fits(other, own, 0) == expected


@pytest.mark.parametrize(
    ("changes", "config", "expected"),
    [
        ({}, {}, 5),
        ({"text_first": False}, {}, 0),
        ({"exact_text": True}, {}, 0),
        ({}, {"attention.density": "dense"}, 0),
        ({"share": SPLIT}, {}, 5),
    ],
)
def test_which_queries_get_rows_before_them(changes, config, expected):
    layout = replace(LAYOUT, **{"text_tokens": 4, **changes})
    found = aligned(layout, replace(layout, text_tokens=9), CONFIG.override(config))
    assert found == replace(layout, padding_rows=expected)
    assert len(found.query_rows) == len(layout.query_rows) + expected
