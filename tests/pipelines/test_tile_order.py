"""Where tokens are, and that what belongs to a token follows it into the tile order."""

from functools import partial

import pytest
import torch

import chipsparse
from chipsparse.pipelines.qwen_image import image_grids
from chipsparse.pipelines.token_grids import grids_at, grids_of, reorder_patches
from tests.pipelines.families import flux2, ltx, ltx2, qwen_image
from tests.pipelines.model_state import calls_begun
from tests.pipelines.small_sparse import EXACT, SPARSE, assert_close, error, first_step, generate
from tests.tiny_models import FLUX_CONFIG, random, tiny_flux_pipeline, tiny_wan_pipeline

TEXT, PER_TOKEN = 5, "a timestep per token"
VIDEO = (3, 4, 8)
TOKENS = 96  # of each call here


# Grids.


def ids_of(*grids, axes=3, times=None, dtype=torch.float32):
    """Position ids ``[N, axes]`` as of FLUX: of the picture, row and column."""
    parts = []
    for index, (rows, columns) in enumerate(grids):
        time = torch.tensor([index if times is None else times[index]])
        sizes = (time, torch.arange(rows), torch.arange(columns))
        parts.append(torch.cartesian_prod(*sizes, *[torch.arange(1)] * (axes - 3)))
    return torch.cat(parts).to(dtype)


def coordinates(*grids, begin=(), size=8):
    """As `LTXConditionPipeline` makes them: seconds, and rows and columns in pixels; [3, N]."""
    parts = []
    for index, grid in enumerate(grids):
        frame, row, column = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")
        seconds = ((frame * 2 - 1).clamp(min=0) + (begin[index] if begin else 0)) / 25
        parts.append(torch.stack([seconds, row * size, column * size]).flatten(1))
    return torch.cat(parts, dim=1)


def shuffled(count):
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (ids_of((4, 6))[None], ((1, 4, 6),)),
        (ids_of((1, 6)), ((1, 1, 6),)),
        (ids_of((6, 1)), ((1, 6, 1),)),
        (ids_of((4, 6), (3, 5), (7, 2)), ((1, 4, 6), (1, 3, 5), (1, 7, 2))),
        (ids_of((4, 6), (4, 6)), ((1, 4, 6), (1, 4, 6))),
        (ids_of((2, 300), dtype=torch.bfloat16), ((1, 2, 300),)),
        (ids_of((300, 2), dtype=torch.bfloat16), ((1, 300, 2),)),
        (ids_of((4, 6)) + torch.tensor([0, 7, 9]), ((1, 4, 6),)),
        (ids_of((4, 6), (3, 5), axes=4, times=(0, 10)), ((1, 4, 6), (1, 3, 5))),
        (ids_of((1, 1), axes=4), ((1, 1, 1),)),
        (torch.zeros(50, 3), None),
        (ids_of((30, 30))[shuffled(900)], None),
        (torch.cartesian_prod(*(torch.arange(n) for n in (1, 1, 1, 50))), None),  # as of a text
    ],
)
def test_grids_are_read_from_position_ids(ids, expected):
    assert grids_of(ids) == expected


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        (coordinates((1, 4, 8)), ((1, 4, 8),)),
        (coordinates((5, 1, 8)), ((5, 1, 8),)),
        (coordinates((5, 4, 1)), ((5, 4, 1),)),
        (coordinates((1, 1, 1)), ((1, 1, 1),)),
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
def test_grids_are_read_from_coordinates(positions, expected):
    assert grids_at(positions) == expected


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([[(1, 8, 6), (1, 4, 4)]] * 2, ((1, 8, 6), (1, 4, 4))),
        ([(1, 8, 6), (1, 8, 6)], ((1, 8, 6),)),  # one picture for each sample
        ((1, 8, 6), ((1, 8, 6),)),
        ([[[1, 8, 6]]], ((1, 8, 6),)),
    ],
)
def test_pictures_are_read_from_shapes(shapes, expected):
    assert image_grids(shapes) == expected


def test_further_pictures_of_a_call_have_grids_of_their_own():
    conditions = next(each for each in ltx.FAMILIES if each.name == "ltx conditions")
    for make, call, expected in (
        (
            flux2.tiny_flux2_pipeline,
            {**flux2.PICTURE, **flux2.VARIANTS["two references"]},
            ((1, 8, 6), (1, 9, 8), (1, 8, 10)),
        ),
        (conditions.make, {**conditions.call, "frame_index": 4}, ((1, 4, 8), VIDEO)),
    ):
        pipe = make()
        with chipsparse.enable(pipe, SPARSE) as handle:
            calls = calls_begun(handle)
            generate(pipe, call, num_inference_steps=3)
        assert {layout.grids for _, layout in calls} == {expected}


# Latents whose patches are put in order.


@pytest.mark.parametrize("patch", [(1, 2, 2), (2, 2, 1), (1, 1, 1)])
def test_the_tokens_of_an_embedding_follow_reordered_patches(patch):
    latents = random(2, 3, 4, 6, 8, seed=0)
    embed = torch.nn.Conv3d(3, 5, kernel_size=patch, stride=patch)
    tokens = embed(latents).flatten(2)
    order = shuffled(tokens.shape[2])
    moved = reorder_patches(latents, patch, order)
    torch.testing.assert_close(embed(moved).flatten(2), tokens[:, :, order])


def test_what_fills_no_patch_is_left_out():
    latents = torch.arange(2.0 * 3 * 5).view(1, 1, 2, 3, 5)
    moved = reorder_patches(latents, (1, 2, 2), torch.arange(2 * 1 * 2))
    assert torch.equal(moved, latents[:, :, :, :2, :4])


# Calls of a transformer.


def flux_call(**changes):
    return {
        "hidden_states": random(1, TOKENS, FLUX_CONFIG["in_channels"], seed=1),
        "encoder_hidden_states": random(1, TEXT, 32, seed=2),
        "pooled_projections": random(1, 32, seed=3),
        "timestep": torch.tensor([0.9]),
        "img_ids": ids_of((8, 12)),
        "txt_ids": torch.zeros(TEXT, 3),
        **changes,
    }


def wan_call(**changes):
    return {
        "hidden_states": random(1, 4, 6, 8, 8, seed=1),
        "timestep": torch.tensor([700]),
        "encoder_hidden_states": random(1, TEXT, 32, seed=2),
        **changes,
    }


def ltx_call(**changes):
    return {
        "hidden_states": random(2, TOKENS, ltx.CHANNELS, seed=1),
        "encoder_hidden_states": random(2, TEXT, ltx.TEXT_DIM, seed=2),
        "timestep": torch.tensor([700.0, 700.0]),
        "encoder_attention_mask": (torch.arange(TEXT) < TEXT - 1).float().expand(2, TEXT),
        "num_frames": VIDEO[0],
        "height": VIDEO[1],
        "width": VIDEO[2],
        "rope_interpolation_scale": (0.1, 8.0, 8.0),
        **changes,
    }


def ltx2_call(**changes):
    return {
        "hidden_states": random(2, TOKENS, ltx2.CHANNELS, seed=1),
        "audio_hidden_states": random(2, 5, ltx2.CONFIG["audio_in_channels"], seed=2),
        "encoder_hidden_states": random(2, TEXT, ltx2.TEXT_DIM, seed=3),
        "audio_encoder_hidden_states": random(2, TEXT, ltx2.TEXT_DIM, seed=4),
        "timestep": torch.tensor([700.0, 700.0]),
        "sigma": torch.tensor([700.0, 700.0]),
        "num_frames": VIDEO[0],
        "height": VIDEO[1],
        "width": VIDEO[2],
        "audio_num_frames": 5,
        **changes,
    }


def qwen_call(*grids, **changes):
    tokens = sum(rows * columns for _, rows, columns in grids)
    return {
        "hidden_states": random(2, tokens, qwen_image.QWEN_CONFIG["in_channels"], seed=1),
        "encoder_hidden_states": random(2, TEXT, qwen_image.TEXT_DIM, seed=2),
        "timestep": torch.tensor([0.7, 0.7]),
        "img_shapes": [list(grids)] * 2,
        **changes,
    }


def qwen(**config):
    return qwen_image.tiny_qwen_pipeline(transformer=qwen_image.tiny_qwen_transformer(**config))


def timesteps(*shape):
    return (random(*shape, seed=5).sigmoid() * 1000).round()


# A pipeline, a call of its transformer, and the argument that has an entry for each token.
CALLS = {
    "flux, control residuals": (
        tiny_flux_pipeline,
        flux_call(controlnet_block_samples=[random(1, TOKENS, 32, seed=4)] * 2),
        "controlnet_block_samples",
    ),
    f"wan, {PER_TOKEN}": (tiny_wan_pipeline, wan_call(timestep=timesteps(1, TOKENS)), "timestep"),
    f"ltx, {PER_TOKEN}": (
        ltx.tiny_ltx_pipeline,
        ltx_call(timestep=timesteps(2, TOKENS)),
        "timestep",
    ),
    f"ltx, {PER_TOKEN} in a row": (
        ltx.tiny_ltx_pipeline,
        ltx_call(timestep=timesteps(2 * TOKENS)),
        "timestep",
    ),
    "ltx-2": (ltx2.pipeline, ltx2_call(), None),
    f"ltx-2, {PER_TOKEN}": (
        ltx2.pipeline,
        ltx2_call(timestep=timesteps(2, TOKENS), audio_timestep=torch.full((2, 5), 700.0)),
        "timestep",
    ),
    "qwen-image, control residuals": (
        qwen,
        qwen_call((1, 8, 12), controlnet_block_samples=[random(2, TOKENS, 32, seed=3)] * 2),
        "controlnet_block_samples",
    ),
    "qwen-image, pictures of other timesteps": (
        partial(qwen, zero_cond_t=True),
        qwen_call((1, 8, 6), (1, 8, 4), (1, 4, 4)),
        None,
    ),
    "qwen-image, layers with their own rotary embeddings": (
        partial(qwen, use_layer3d_rope=True, use_additional_t_cond=True),
        qwen_call(
            (1, 4, 6), (1, 4, 6), (1, 8, 6), additional_t_cond=torch.zeros(2, dtype=torch.long)
        ),
        None,
    ),
}


def flipped(value):
    return [each.flip(1) for each in value] if isinstance(value, list) else value.flip(-1)


@pytest.mark.parametrize("name", CALLS)
def test_what_belongs_to_a_token_follows_it(name):
    make, call, per_token = CALLS[name]
    pipe = make()
    with torch.no_grad():
        expected = pipe.transformer(**call, return_dict=False)
        with chipsparse.enable(pipe, SPARSE) as handle, first_step(pipe):
            found = pipe.transformer(**call, return_dict=False)
            assert handle._adapters[0].session.plan.layout.grid_tokens == TOKENS
        assert handle.report.fallbacks == []
        for stream, other in zip(found, expected, strict=True):
            assert_close(stream, other)
        assert not torch.equal(found[0], expected[0])  # another order of summation: it did change
        if per_token:
            wrong = {**call, per_token: flipped(call[per_token])}
            assert error(pipe.transformer(**wrong, return_dict=False)[0], expected[0]) > 0.01


@pytest.mark.parametrize(
    ("make", "call", "said"),
    [
        (
            tiny_flux_pipeline,
            flux_call(img_ids=ids_of((8, 12))[shuffled(TOKENS)]),
            "image tokens stay in the pipeline's order: their img_ids form no full grids",
        ),
        (
            ltx.tiny_ltx_pipeline,
            ltx_call(video_coords=coordinates(VIDEO)[:, shuffled(TOKENS)].expand(2, -1, -1)),
            "video tokens stay in the pipeline's order: their video_coords form no full grids",
        ),
    ],
    ids=["flux", "ltx"],
)
def test_positions_that_form_no_grid_stay_in_order_and_are_reported(make, call, said):
    pipe = make()
    with torch.no_grad():
        expected = pipe.transformer(**call, return_dict=False)[0]
        with chipsparse.enable(pipe, SPARSE) as handle, first_step(pipe):
            assert_close(pipe.transformer(**call, return_dict=False)[0], expected)
    assert said in handle.report.notes


def test_a_mask_of_pairs_of_tokens_leaves_attention_dense_and_follows_their_order():
    pipe = ltx2.pipeline()
    mask = (random(2, TOKENS, TOKENS, seed=6) > 0).float()
    call = ltx2_call(video_self_attention_mask=mask)
    with torch.no_grad():
        expected = pipe.transformer(**call)
        plain = pipe.transformer(**ltx2_call())
        with chipsparse.enable(pipe, EXACT) as handle, first_step(pipe):
            found = pipe.transformer(**call)
    reason = "attention runs dense: the pipeline masks the video's self-attention"
    assert reason in handle.report.fallbacks
    assert_close(found.sample, expected.sample)
    assert not torch.allclose(found.sample, plain.sample, rtol=1e-2, atol=1e-3)
