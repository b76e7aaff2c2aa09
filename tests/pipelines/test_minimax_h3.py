"""MiniMax-H3: one packed sequence, of which the video's rows run sparse; what else is refused."""

import pytest
import torch

import chipsparse
from chipsparse.pipelines.packed_rows import read_video
from tests.pipelines.families.minimax_h3 import VARIANTS, VIDEO, tiny_h3_pipeline
from tests.pipelines.model_state import calls_of
from tests.pipelines.small_sparse import SPARSE, assert_close, generate

GRID = (2, 2, 3)
PIPELINES_OWN = ("text", "condition", "audio", "video")


def grid_positions(grid, begin):
    """Time goes on by 5/3, rows and columns by fractions, as in the released model."""
    frame, row, column = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")
    return torch.stack([begin + frame * 5 / 3, row / 7 - 0.1, column / 3 - 0.2], -1).flatten(0, 2)


def packed(order=PIPELINES_OWN):
    """A sequence of text (3), a condition (6), audio (2) and the video (12) in this order."""
    parts = {
        "text": torch.arange(3)[:, None] * torch.tensor([1.0, 0, 0]),
        "condition": grid_positions((1, 2, 3), 3.0),
        "audio": torch.arange(2)[:, None] * torch.tensor([1.0, 0, 0]),
        "video": grid_positions(GRID, 3.0),
    }
    positions = torch.cat([parts[name].double() for name in order])
    first = 0
    places = dict.fromkeys(parts, torch.empty(0, dtype=torch.long))
    for name in order:
        places[name] = torch.arange(first, first + len(parts[name]))
        first += len(parts[name])
    video = torch.cat([places["condition"], places["video"]])
    return {"position_ids": positions, "video_indices": video}, places


@pytest.mark.parametrize(
    "order",
    [
        PIPELINES_OWN,
        ("video",),
        ("video", "text"),
        ("audio", "condition", "text", "video"),
        ("condition", "text", "video", "audio"),
    ],
)
def test_the_last_grid_is_the_video_and_all_else_is_not(order):
    arguments, places = packed(order)
    grid, rows = read_video(**arguments)
    assert grid == GRID
    assert torch.equal(rows, places["video"])


def test_rows_of_no_grid_and_a_sequence_without_video_are_refused():
    arguments, _ = packed()
    arguments["position_ids"][22] = 0.5
    with pytest.raises(ValueError, match="the video's last 12, from row 11 on, form no grid"):
        read_video(**arguments)
    arguments, _ = packed(("text",))
    with pytest.raises(ValueError, match="has no video rows"):
        read_video(**arguments)


@pytest.mark.parametrize("name", ["", *VARIANTS])
def test_one_call_gives_the_same_in_our_order(name):
    """Rows carry their positions, tags and timesteps along; both outputs keep the caller's."""
    pipe = tiny_h3_pipeline()
    changes = VARIANTS[name] if name else {}
    call = calls_of(
        pipe.transformer,
        lambda: generate(pipe, {**VIDEO, **changes}, num_inference_steps=1),
    )[0]
    call["timestep"] = torch.linspace(0.0, 0.9, call["timestep"].numel())
    pipe.scheduler.set_timesteps(9)
    with torch.no_grad():
        expected = pipe.transformer(**call)
        config = SPARSE.override({"attention.density": 0.6})  # more than the conditions
        warned = pytest.warns(chipsparse.DenseWarning, match="1 step is too few")
        with warned, chipsparse.enable(pipe, config) as handle, handle.generation():
            outputs = pipe.transformer(**call)
            assert handle.report.fallbacks == handle.report.notes == []
            assert handle.report.cache_bytes > 0
    for output, stock in zip(outputs, expected, strict=True):
        assert_close(output, stock)
    assert not torch.equal(outputs[0], expected[0])  # another order of summation: it did change


def test_conditions_that_take_up_the_density_are_noted():
    pipe = tiny_h3_pipeline()
    with chipsparse.enable(pipe, SPARSE.override({"attention.density": 0.4})) as handle:
        generate(pipe, {**VIDEO, **VARIANTS["first frame"]})
        assert handle.report.notes == []
        generate(pipe, {**VIDEO, **VARIANTS["references"]})
        (note,) = handle.report.notes
    assert note.startswith("136 of the 304 tokens are text, sound and conditions")
    assert "attention.density keeps" in note
