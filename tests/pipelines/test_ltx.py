"""The LTX-Video adapter: where tokens are, timesteps per token, and tags on processors."""

import diffusers
import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor

import chipsparse
from chipsparse.pipelines.token_grids import grids_at
from tests.pipelines import small_sparse
from tests.pipelines.families.ltx import (
    CHANNELS,
    LTX_CONFIG,
    PICTURE,
    TEXT,
    TEXT_DIM,
    VIDEO,
    random,
    tiny_ltx_pipeline,
)
from tests.pipelines.model_state import actions, calls_begun, state_of
from tests.pipelines.small_sparse import EXACT, SPARSE, STEPS, assert_close

LAYERS = LTX_CONFIG["num_layers"]
GRID = (3, 4, 8)
TOKENS = 96


def generate(pipe, **changes):
    return small_sparse.generate(pipe, VIDEO, **changes)


@pytest.fixture
def pipe():
    return tiny_ltx_pipeline()


@pytest.fixture(scope="module")
def dense():
    return generate(tiny_ltx_pipeline())


@pytest.fixture(scope="module")
def sparse():
    pipe = tiny_ltx_pipeline()
    with chipsparse.enable(pipe, SPARSE):
        return generate(pipe)


def coordinates(*grids, begin=(), size=8):
    """As `LTXConditionPipeline` makes them: seconds, and rows and columns in pixels; [3, N]."""
    parts = []
    for index, grid in enumerate(grids):
        frame, row, column = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")
        seconds = ((frame * 2 - 1).clamp(min=0) + (begin[index] if begin else 0)) / 25
        parts.append(torch.stack([seconds, row * size, column * size]).flatten(1))
    return torch.cat(parts, dim=1)


def call_arguments(**changes):
    mask = torch.ones(2, TEXT)
    mask[:, -1] = 0
    return {
        "hidden_states": random(2, TOKENS, CHANNELS, seed=1),
        "encoder_hidden_states": random(2, TEXT, TEXT_DIM, seed=2),
        "timestep": torch.tensor([700.0, 700.0]),
        "encoder_attention_mask": mask,
        "num_frames": GRID[0],
        "height": GRID[1],
        "width": GRID[2],
        "rope_interpolation_scale": (0.1, 8.0, 8.0),
        "return_dict": False,
        **changes,
    }


def found_and_expected(pipe, arguments):
    """One call in our tile order, and one unpatched."""
    model = pipe.transformer
    pipe.scheduler = None  # which has no part in it
    with torch.no_grad():
        expected = model(**arguments)[0]
        with chipsparse.enable(pipe, SPARSE) as handle:
            found = model(**arguments)[0]
            assert handle._adapters[0].session.plan.layout.grid_tokens == TOKENS
    assert not torch.equal(found, expected)  # another order of summation: the order did change
    return found, expected, handle.report.fallbacks


# Tile order.


@pytest.mark.parametrize("shape", [(2, TOKENS), (2 * TOKENS,)])
def test_timesteps_follow_the_tile_order(pipe, shape):
    """They are per token: in another order the result would be another video."""
    timesteps = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(5)) * 1000
    arguments = call_arguments(timestep=timesteps.view(shape))
    found, expected, fallbacks = found_and_expected(pipe, arguments)
    assert_close(found, expected)
    assert fallbacks == []
    with torch.no_grad():
        shuffled = pipe.transformer(**call_arguments(timestep=timesteps.flip(1)))[0]
    assert (shuffled - expected).norm() > 0.1 * expected.norm()


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        (coordinates((3, 4, 8)), ((3, 4, 8),)),
        (coordinates((1, 4, 8)), ((1, 4, 8),)),
        (coordinates((5, 1, 8)), ((5, 1, 8),)),
        (coordinates((5, 4, 1)), ((5, 4, 1),)),
        (coordinates((4, 1, 1)), ((4, 1, 1),)),
        (coordinates((1, 1, 1)), ((1, 1, 1),)),
        (coordinates((1, 4, 8), (3, 4, 8), begin=(4, 0)), ((1, 4, 8), (3, 4, 8))),
        (coordinates((2, 4, 8), (3, 4, 8), begin=(2, 0)), ((2, 4, 8), (3, 4, 8))),
        (
            coordinates((1, 2, 3), (1, 2, 3), (2, 2, 3), begin=(4, 4, 0)),
            ((1, 2, 3), (1, 2, 3), (2, 2, 3)),
        ),
        # Frames of another size, or places that no rows and columns name.
        (coordinates((1, 2, 3), (3, 4, 8), begin=(4, 0)), None),
        (coordinates((3, 4, 8))[:, :-1], None),
        (coordinates((3, 4, 8))[:, torch.arange(96).flip(0) % 95], None),
    ],
)
def test_grids_are_read_from_the_coordinates(positions, expected):
    assert grids_at(positions) == expected


def test_further_pictures_have_grids_of_their_own():
    pipe = tiny_ltx_pipeline(diffusers.LTXConditionPipeline)
    arguments = {"image": PICTURE, "frame_index": 4, "strength": 0.9}
    expected = generate(pipe, **arguments)
    with chipsparse.enable(pipe, EXACT) as handle:
        calls = calls_begun(handle)
        found = generate(pipe, **arguments)
        assert handle.report.fallbacks == []
    assert {layout.grids for _, layout in calls} == {((1, 4, 8), GRID)}
    assert_close(found, expected)


def test_coordinates_that_form_no_grid_stay_in_order_and_are_reported(pipe):
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
    arguments = call_arguments(video_coords=coordinates(GRID)[:, order].expand(2, 3, TOKENS))
    model = pipe.transformer
    pipe.scheduler = None  # which has no part in it
    with torch.no_grad():
        expected = model(**arguments)[0]
        with chipsparse.enable(pipe, SPARSE) as handle:
            found = model(**arguments)[0]
    assert_close(found, expected)
    assert handle.report.notes == [
        "video tokens stay in the pipeline's order: their video_coords form no full grids"
    ]


def test_a_size_that_does_not_fit_is_the_models_own_error(pipe):
    with (
        chipsparse.enable(pipe, SPARSE),
        torch.no_grad(),
        pytest.raises((RuntimeError, IndexError)),
    ):
        pipe.transformer(**call_arguments(num_frames=2))


# Tags on processors.


def test_modules_may_share_one_processor(pipe, sparse, dense):
    """Cross-attention, too: it has no tag."""
    shared = LTXVideoAttnProcessor()
    pipe.transformer.set_attn_processor(shared)
    before = state_of(pipe.transformer)
    with chipsparse.enable(pipe, SPARSE) as handle:
        assert torch.equal(generate(pipe), sparse)
        assert handle.report.fallbacks == []
    assert state_of(pipe.transformer) == before
    block = pipe.transformer.transformer_blocks[1]
    assert block.attn1.processor is block.attn2.processor is shared
    assert torch.equal(generate(pipe), dense)


def test_a_processor_that_was_set_since_runs_dense_and_stays(pipe, dense):
    config = SPARSE.override({"mlp.density": "dense", "tile": None})
    own = LTXVideoAttnProcessor()
    with chipsparse.enable(pipe, config) as handle:
        pipe.transformer.set_attn_processor(own)
        assert torch.equal(generate(pipe), dense)
        assert handle.report.fallbacks == [
            f"attention runs dense in {LAYERS} of {LAYERS} layers (first: layer 0): "
            "its processor was replaced"
        ]
    assert pipe.transformer.transformer_blocks[0].attn1.processor is own
    assert vars(own) == {}


def test_processors_that_somebody_kept_are_the_models_own_again(pipe, dense):
    with chipsparse.enable(pipe, SPARSE):
        kept = dict(pipe.transformer.attn_processors)
    pipe.transformer.set_attn_processor(kept)
    assert torch.equal(generate(pipe), dense)


def test_the_attention_backend_may_change_while_enabled(pipe):
    with attention_backend("native"):  # diffusers sets it globally, too: restore it
        before = tiny_ltx_pipeline()
        before.transformer.set_attention_backend("_native_math")
        with chipsparse.enable(before, SPARSE):
            expected = generate(before)
    with attention_backend("native"), chipsparse.enable(pipe, SPARSE):
        pipe.transformer.set_attention_backend("_native_math")
        assert torch.equal(generate(pipe), expected)
    block = pipe.transformer.transformer_blocks[0]
    assert block.attn1.processor._attention_backend == "_native_math"
    assert block.attn1.processor._parallel_config is None


def test_both_halves_of_guidance_are_one_call(pipe):
    with chipsparse.enable(pipe, SPARSE) as handle:
        demands = []
        adapter = handle._adapters[0]
        ask = adapter._memory_demand

        def look(arguments):
            demands.append(ask(arguments))
            return demands[-1]

        adapter._memory_demand = look
        generate(pipe)
    assert [demand.branches for demand in demands] == [1]
    assert {record.branch for record in handle.report.steps} == {"cond_uncond"}
    assert len(actions(handle, "cond_uncond")) == STEPS
