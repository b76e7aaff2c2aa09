"""Grids of tokens; what belongs to a token follows it into the tile order."""

import pytest
import torch

import chipsparse
from chipsparse.pipelines.families.qwen_image import image_grids
from chipsparse.pipelines.token_grids import grids_at, grids_of
from tests.pipelines.families import flux, ltx, qwen_image, wan
from tests.pipelines.model_state import calls_begun, calls_of
from tests.pipelines.small_sparse import EXACT, SPARSE, assert_close, error, first_step, generate
from tests.pipelines.test_families import FAMILIES, arguments_of
from tests.tiny_models import random, tiny_flux_pipeline, tiny_wan_pipeline

PER_TOKEN = "a timestep per token"
VIDEO = (3, 4, 8)
TOKENS = 96  # of each call here
FLUX_PICTURE = {**flux.PICTURE, "height": 32, "width": 48}


def ids_of(*grids, axes=3, times=None, dtype=torch.float32):
    """Position ids ``[N, axes]`` as of FLUX: of the picture, row and column."""
    parts = []
    for index, (rows, columns) in enumerate(grids):
        time = torch.tensor([index if times is None else times[index]])
        sizes = (time, torch.arange(rows), torch.arange(columns))
        parts.append(torch.cartesian_prod(*sizes, *[torch.arange(1)] * (axes - 3)))
    return torch.cat(parts).to(dtype)


def coordinates(*grids, begin=(), size=8):
    """Coordinates ``[3, N]`` of `LTXConditionPipeline`: seconds, rows and columns in pixels."""
    parts = []
    for index, grid in enumerate(grids):
        frame, row, column = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")
        seconds = ((frame * 2 - 1).clamp(min=0) + (begin[index] if begin else 0)) / 25
        parts.append(torch.stack([seconds, row * size, column * size]).flatten(1))
    return torch.cat(parts, dim=1)


def shuffled(count):
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


SHAPES = [[(1, 8, 6), (1, 4, 4)]] * 2
LATER = coordinates((1, 2, 3), (1, 2, 3), (2, 2, 3), begin=(4, 4, 0))
# Frames of another size, or places that no rows and columns name.
OTHER_SIZE = coordinates((1, 2, 3), (3, 4, 8), begin=(4, 0))


@pytest.mark.parametrize(
    ("read", "positions", "expected"),
    [
        (grids_of, ids_of((4, 6))[None], ((1, 4, 6),)),
        (grids_of, ids_of((6, 1)), ((1, 6, 1),)),
        (grids_of, ids_of((4, 6), (3, 5), (7, 2)), ((1, 4, 6), (1, 3, 5), (1, 7, 2))),
        (grids_of, ids_of((2, 300), dtype=torch.bfloat16), ((1, 2, 300),)),
        (grids_of, ids_of((300, 2), dtype=torch.bfloat16), ((1, 300, 2),)),
        (grids_of, ids_of((4, 6)) + torch.tensor([0, 7, 9]), ((1, 4, 6),)),
        (grids_of, ids_of((4, 6), (3, 5), axes=4, times=(0, 10)), ((1, 4, 6), (1, 3, 5))),
        (grids_of, torch.zeros(50, 3), None),
        (grids_of, ids_of((30, 30))[shuffled(900)], None),
        (grids_of, torch.cat([torch.zeros(50, 3), torch.arange(50.0)[:, None]], 1), None),  # text
        (grids_at, coordinates((5, 1, 8)), ((5, 1, 8),)),
        (grids_at, coordinates((5, 4, 1)), ((5, 4, 1),)),
        (grids_at, coordinates((1, 1, 1)), ((1, 1, 1),)),
        (grids_at, coordinates((2, 4, 8), (3, 4, 8), begin=(2, 0)), ((2, 4, 8), (3, 4, 8))),
        (grids_at, LATER, ((1, 2, 3), (1, 2, 3), (2, 2, 3))),
        (grids_at, OTHER_SIZE, None),
        (grids_at, coordinates((3, 4, 8))[:, :-1], None),
        (grids_at, coordinates((3, 4, 8))[:, torch.arange(96).flip(0) % 95], None),
        (image_grids, SHAPES, ((1, 8, 6), (1, 4, 4))),
        (image_grids, [(1, 8, 6), (1, 8, 6)], ((1, 8, 6),)),  # one picture for each sample
        (image_grids, [[[1, 8, 6]]], ((1, 8, 6),)),
    ],
)
def test_grids_are_read_from_what_pipelines_pass(read, positions, expected):
    with torch.device("meta"):  # the user's default
        assert read(positions) == expected


@pytest.mark.parametrize(
    ("name", "variant", "grids"),
    [
        ("flux2", "two references", ((1, 8, 6), (1, 9, 8), (1, 8, 10))),
        ("ltx conditions", "a picture at the end", ((1, 4, 8), VIDEO)),
    ],
)
def test_further_pictures_of_a_call_have_grids_of_their_own(name, variant, grids):
    pipe = FAMILIES[name].make()
    with chipsparse.enable(pipe, SPARSE) as handle:
        calls = calls_begun(handle)
        generate(pipe, arguments_of(name, variant), num_inference_steps=3)
    assert {layout.grids for _, layout in calls} == {grids}


def call_of(pipe, call):
    return calls_of(pipe.transformer, lambda: generate(pipe, call, num_inference_steps=1))[0]


def changed(pipe, call, **changes):
    """A pipeline, the arguments of a call of its transformer, and those that are to be changed."""
    return pipe, call_of(pipe, call), changes


def of_qwen(*grids, config=None, **changes):
    transformer = qwen_image.tiny_qwen_transformer(**(config or {}))
    pipe = qwen_image.tiny_qwen_pipeline(transformer=transformer)
    call = call_of(qwen_image.tiny_qwen_pipeline(), qwen_image.PICTURE)
    latents = random(1, TOKENS, qwen_image.QWEN_CONFIG["in_channels"], seed=1)
    pictures = {"hidden_states": latents, "img_shapes": [[*grids]]}
    return pipe, call, pictures | changes


def timesteps(*shape):
    return (random(*shape, seed=5).sigmoid() * 1000).round()


# A pipeline, a call of its transformer, and what is changed of that. Families have the others.
CALLS = {
    "flux, control residuals": lambda: changed(
        tiny_flux_pipeline(),
        FLUX_PICTURE,
        controlnet_block_samples=[random(1, TOKENS, 32, seed=4)] * 2,
    ),
    f"wan, {PER_TOKEN}": lambda: changed(
        tiny_wan_pipeline(),
        wan.VIDEO | {"height": 64, "width": 64, "num_frames": 21},
        timestep=timesteps(1, TOKENS),
    ),
    f"ltx, {PER_TOKEN} in a row": lambda: changed(
        ltx.tiny_ltx_pipeline(),
        ltx.VIDEO,
        timestep=timesteps(2 * TOKENS),
    ),
    f"ltx-2, {PER_TOKEN}": lambda: changed(
        ltx.ltx2_pipeline(),
        ltx.LTX2_VIDEO,
        timestep=timesteps(2, TOKENS),
        audio_timestep=torch.full((2, 5), 700.0),
    ),
    "qwen-image, pictures of other timesteps": lambda: of_qwen(
        (1, 8, 6),
        (1, 8, 4),
        (1, 4, 4),
        config={"zero_cond_t": True},
    ),
    "qwen-image, layers with their own rotary embeddings": lambda: of_qwen(
        (1, 4, 6),
        (1, 4, 6),
        (1, 8, 6),
        config={"use_layer3d_rope": True, "use_additional_t_cond": True},
        additional_t_cond=torch.zeros(1, dtype=torch.long),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_belongs_to_a_token_follows_it(name):
    pipe, call, changes = CALLS[name]()
    call = {**call, **changes, "return_dict": False}
    with torch.no_grad():
        expected = pipe.transformer(**call)
        with chipsparse.enable(pipe, SPARSE) as handle, first_step(pipe):
            outputs = pipe.transformer(**call)
            assert handle._runners[0].sparse.session.plan.layout.grid_tokens == TOKENS
        assert handle.report.fallbacks == []
        for stream, other in zip(outputs, expected, strict=True):
            assert_close(stream, other)
        assert not torch.equal(outputs[0], expected[0])  # another order of summation: it did change
        for per_token in {"controlnet_block_samples", "timestep"} & changes.keys():
            given = call[per_token]
            flipped = given.flip(-1) if torch.is_tensor(given) else [each.flip(1) for each in given]
            wrong = pipe.transformer(**{**call, per_token: flipped})
            assert error(wrong[0], expected[0]) > 0.01


@pytest.mark.parametrize(
    ("make", "call", "name", "positions"),
    [
        (tiny_flux_pipeline, FLUX_PICTURE, "img_ids", ids_of((8, 12))[shuffled(TOKENS)]),
        (
            ltx.tiny_ltx_pipeline,
            ltx.VIDEO,
            "video_coords",
            coordinates(VIDEO)[:, shuffled(TOKENS)].expand(2, -1, -1),
        ),
    ],
    ids=["flux", "ltx"],
)
def test_positions_that_form_no_grid_stay_in_order_and_are_reported(make, call, name, positions):
    pipe = make()
    call = call_of(pipe, call) | {name: positions}
    with torch.no_grad():
        expected = pipe.transformer(**call)[0]
        with chipsparse.enable(pipe, SPARSE) as handle, first_step(pipe):
            assert_close(pipe.transformer(**call)[0], expected)
    said = f" tokens stay in the pipeline's order: their {name} form no full grids"
    assert any(note.endswith(said) for note in handle.report.notes)


def test_a_mask_of_pairs_of_tokens_leaves_attention_dense_and_follows_their_order():
    pipe = ltx.ltx2_pipeline()
    call = call_of(pipe, ltx.LTX2_VIDEO)
    mask = (random(2, TOKENS, TOKENS, seed=6) > 0).float()
    with torch.no_grad():
        plain = pipe.transformer(**call)[0]
        call["video_self_attention_mask"] = mask
        expected = pipe.transformer(**call)[0]
        with chipsparse.enable(pipe, EXACT) as handle, first_step(pipe):
            output = pipe.transformer(**call)[0]
    reason = "attention runs dense: the pipeline masks the video's self-attention"
    assert reason in handle.report.fallbacks
    assert_close(output, expected)
    assert not torch.allclose(output, plain, rtol=1e-2, atol=1e-3)
