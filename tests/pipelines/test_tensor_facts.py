"""Facts about tensors are read once, and again where they may have changed."""

import gc

import pytest
import torch
from tests.pipelines.test_flux import ids_of
from tests.pipelines.test_ltx import coordinates

import chipsparse
from chipsparse import SparsityConfig
from chipsparse.pipelines.qwen_image import TEXT_MASK, valid_length
from chipsparse.pipelines.tensor_facts import TensorFacts
from tests.pipelines.families.ltx import tiny_ltx_pipeline
from tests.pipelines.families.qwen_image import tiny_qwen_pipeline
from tests.tiny_models import tiny_flux_pipeline


def counting():
    read = []
    return read, TensorFacts(lambda tensor: read.append(1) or tensor.sum().item())


def test_a_tensor_is_read_once_and_each_by_itself():
    read, facts = counting()
    first, second = torch.ones(2), torch.ones(2)
    assert [facts(first), facts(second), facts(first), facts(second)] == [2, 2, 2, 2]
    assert len(read) == 2


def test_a_tensor_that_was_written_to_is_read_again():
    read, facts = counting()
    tensor = torch.ones(2)
    facts(tensor)
    tensor.zero_()
    assert facts(tensor) == 0
    assert len(read) == 2


def test_tensors_are_not_held():
    _, facts = counting()
    for _ in range(3):
        facts(torch.ones(2))
    gc.collect()
    assert len(facts._known) == 0


def test_inference_tensors():
    read, facts = counting()
    with torch.inference_mode():
        tensor = torch.ones(2)
        assert [facts(tensor), facts(tensor)] == [2, 2]
    assert len(read) == 1


# What adapters read of their arguments.


def flux_grids(adapter, ids):
    text = torch.zeros(1, 3, 8)
    arguments = {"hidden_states": torch.zeros(1, 24, 4), "encoder_hidden_states": text}
    return adapter.layout({**arguments, "img_ids": ids}).grids


def batch_of_coordinates(grid):
    return coordinates(grid)[None]


def ltx_grids(adapter, positions):
    return adapter.layout({"hidden_states": torch.zeros(1, 24, 4), "video_coords": positions}).grids


@pytest.mark.parametrize(
    ("make", "tensor_of", "read", "first", "second"),
    [
        (tiny_flux_pipeline, ids_of, flux_grids, (4, 6), (6, 4)),
        (tiny_ltx_pipeline, batch_of_coordinates, ltx_grids, (1, 4, 6), (1, 6, 4)),
    ],
    ids=["flux", "ltx"],
)
def test_positions_that_were_written_in_place_are_read_again(make, tensor_of, read, first, second):
    positions = tensor_of(first)
    with chipsparse.enable(make(), SparsityConfig()) as handle:
        (adapter,) = handle._adapters
        assert read(adapter, positions) == ((1, *first[-2:]),)
        positions.copy_(tensor_of(second))
        assert read(adapter, positions) == ((1, *second[-2:]),)


def test_three_masks_are_read_once_each_and_again_where_they_change(monkeypatch):
    read = []

    def look(mask):
        read.append(int(mask.sum()))
        return valid_length(mask)

    monkeypatch.setattr("chipsparse.pipelines.qwen_image.valid_length", look)
    masks = [torch.arange(5)[None] < length for length in (2, 3, 4)]
    with chipsparse.enable(tiny_qwen_pipeline(), SparsityConfig()) as handle:
        (adapter,) = handle._adapters
        for _ in range(3):
            lengths = [adapter._valid_length({TEXT_MASK: mask}) for mask in masks]
            assert lengths == [2, 3, 4]
        assert read == [2, 3, 4]
        masks[0][:, 2] = True
        assert adapter._valid_length({TEXT_MASK: masks[0]}) == 3
