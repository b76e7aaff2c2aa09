"""Columns that the user keeps: from any form of bits to the masks of attention."""

import re

import numpy as np
import pytest
import torch
from bitarray import bitarray

from chipsparse.kernels.mask_packing import pack_mask
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.sparse.layers.column_budget import ColumnBudgets, check_static_bits, static_bits
from chipsparse.sparse.layers.token_permutation import grids_permutation

BOOLS = [True, False, False, False, False, False, False, False, True, True, False]  # 11 columns
FORMS = {
    "list": BOOLS,
    "tuple": tuple(BOOLS),
    "numpy": np.array(BOOLS),
    "torch": torch.tensor(BOOLS),
    "little": bitarray(BOOLS, endian="little"),
    "big": bitarray(BOOLS, endian="big"),
    "numpy bools": [np.bool_(kept) for kept in BOOLS],
}
CPU = torch.device("cpu")


def layout(*grids, text_tokens=0, text_first=False):
    kinds = (LayerKind("block", layers=1, intermediate_size=8),)
    return ModelLayout(kinds, 1, 8, 1, grids, text_tokens, text_first)


@pytest.mark.parametrize("columns", FORMS.values(), ids=FORMS)
def test_every_form_means_the_same_columns(columns):
    bits = static_bits(columns)
    mask = torch.tensor(BOOLS)
    assert bits.tolist() == [int(kept) for kept in BOOLS] == mask.int().tolist()
    # Bit j of byte i is column 8 i + j, as the kernels have it: 1; and 1 + 2.
    assert bits.tobytes() == bytes([0b1, 0b11]) == pack_mask(mask).numpy().tobytes()
    if isinstance(columns, bitarray):
        columns.setall(0)  # later changes of the user's change nothing
    budgets = ColumnBudgets(bits)
    assert budgets.static_mask(layout((1, 1, 11)), CPU).tolist() == BOOLS


@pytest.mark.parametrize("text_first", [True, False])
def test_columns_are_in_raster_order_and_text_stands_before_or_behind(text_first):
    sizes = layout((2, 3, 4), (1, 2, 2), text_tokens=5, text_first=text_first)
    raster = torch.zeros(28, dtype=torch.bool)
    raster[[0, 7, 13, 25]] = True
    order = grids_permutation(sizes.grids, (2, 2, 2))
    mask = ColumnBudgets(static_bits(raster), order).static_mask(sizes, CPU)
    own = mask[5:] if text_first else mask[:28]
    assert mask.sum() == own.sum() == 4
    places = [int(order[place]) for place in own.nonzero().flatten()]
    assert sorted(places) == [0, 7, 13, 25] != places


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([], "there is no column; pass None"),
        (bitarray(), "there is no column; pass None"),
        ([1, 0, 1], "expected True or False for each column, got 1; numbers of columns become"),
        (np.array([0, 3]), "expected bools of shape [N], got int64 of shape [2]"),
        (np.ones((2, 3), bool), "expected bools of shape [N], got bool of shape [2, 3]"),
        (torch.ones(3), "expected bools of shape [N], got float32 of shape [3]"),
        (b"\x01", "expected a bitarray, a bool array or a list of bools, got bytes"),
        ("0110", "expected a bitarray, a bool array or a list of bools, got str"),
        (7, "expected a bitarray, a bool array or a list of bools, got int"),
    ],
)
def test_what_is_no_list_of_columns(columns, message):
    with pytest.raises(ValueError, match=re.escape(f"static_columns: {message}")):
        static_bits(columns)


def test_another_number_of_columns_than_the_call_has():
    sizes = layout((2, 3, 4), (1, 2, 2), text_tokens=5)
    check_static_bits(static_bits([True] * 28), sizes)
    with pytest.raises(ValueError, match=r"11 columns, but this call has 28 .* 2x3x4 and 1x2x2"):
        check_static_bits(static_bits(BOOLS), sizes)
