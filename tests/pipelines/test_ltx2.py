"""The LTX-2 adapter: two streams come out, and what is per token follows the tile order."""

import pytest
import torch

import chipsparse
from tests.pipelines.families.ltx2 import CHANNELS, CONFIG, TEXT, TEXT_DIM, VIDEO, pipeline, random
from tests.pipelines.small_sparse import EXACT, SPARSE, assert_close, first_step, generate

GRID, TOKENS, SOUND = (3, 4, 8), 96, 5
DENSE_REASON = "attention runs dense: the pipeline masks the video's self-attention"


def call_arguments(**changes):
    sound = CONFIG["audio_in_channels"]
    return {
        "hidden_states": random(2, TOKENS, CHANNELS, seed=1),
        "audio_hidden_states": random(2, SOUND, sound, seed=2),
        "encoder_hidden_states": random(2, TEXT, TEXT_DIM, seed=3),
        "audio_encoder_hidden_states": random(2, TEXT, TEXT_DIM, seed=4),
        "timestep": torch.tensor([700.0, 700.0]),
        "sigma": torch.tensor([700.0, 700.0]),
        "num_frames": GRID[0],
        "height": GRID[1],
        "width": GRID[2],
        "audio_num_frames": SOUND,
        **changes,
    }


@pytest.fixture(scope="module")
def pipe():
    return pipeline()


@pytest.mark.parametrize("return_dict", [False, True])
def test_a_skipped_step_gives_video_and_sound_again(pipe, return_dict):
    outputs = []
    config = SPARSE.override({"schedule.actions": ["dense", "refresh", "skip", "sparse"]})
    with chipsparse.enable(pipe, config) as handle:
        adapter = handle._adapters[0]
        call = adapter.call

        def look(forward, args, kwargs):
            outputs.append(call(forward, args, {**kwargs, "return_dict": return_dict}))
            found = outputs[-1]
            return found if isinstance(found, tuple) else (found.sample, found.audio_sample)

        adapter.call = look
        generate(pipe, VIDEO, num_inference_steps=4)
    parts = [out if isinstance(out, tuple) else (out.sample, out.audio_sample) for out in outputs]
    for stream in range(2):
        dense, refresh, skip, sparse = (each[stream] for each in parts)
        assert torch.equal(skip, refresh)
        assert not torch.equal(skip, dense)
        assert not torch.equal(skip, sparse)
    assert isinstance(outputs[2], type(outputs[1]))


@pytest.mark.parametrize("per_token", [False, True])
def test_what_is_per_token_follows_the_tile_order(pipe, per_token):
    changes = {}
    if per_token:
        changes["timestep"] = random(2, TOKENS, seed=5).sigmoid() * 1000
        changes["audio_timestep"] = torch.full((2, SOUND), 700.0)
    arguments = call_arguments(**changes)
    with torch.no_grad():
        expected = pipe.transformer(**arguments)
        with chipsparse.enable(pipe, SPARSE) as handle, first_step(pipe):
            found = pipe.transformer(**arguments)
            assert handle._adapters[0].session.plan.layout.grids == (GRID,)
    assert not torch.equal(found.sample, expected.sample)  # another order of summation
    assert_close(found.sample, expected.sample)
    assert_close(found.audio_sample, expected.audio_sample)


def test_masked_attention_is_dense_and_says_so(pipe):
    """Its mask is of pairs of tokens, and follows their order."""
    mask = (random(2, TOKENS, TOKENS, seed=6) > 0).float()
    arguments = call_arguments(video_self_attention_mask=mask)
    with torch.no_grad():
        expected = pipe.transformer(**arguments)
        plain = pipe.transformer(**call_arguments())
        with chipsparse.enable(pipe, EXACT) as handle, first_step(pipe):
            found = pipe.transformer(**arguments)
    assert DENSE_REASON in handle.report.fallbacks
    assert_close(found.sample, expected.sample)
    assert not torch.allclose(found.sample, plain.sample, rtol=1e-2, atol=1e-3)
