"""The Qwen-Image adapter: text masks, several pictures, and control residuals."""

import diffusers
import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus

import chipsparse
from chipsparse import SparsityConfig
from chipsparse.kernels.mask_packing import unpack_mask
from chipsparse.pipelines.qwen_image import image_grids, valid_length
from chipsparse.plan import Action
from tests.pipelines import small_sparse
from tests.pipelines.changes import with_an_effect
from tests.pipelines.families.qwen_image import (
    GUIDED,
    IMAGE,
    PICTURE,
    QWEN_CONFIG,
    TEXT,
    TEXT_DIM,
    prompts,
    random,
    tiny_qwen_pipeline,
    tiny_qwen_transformer,
)
from tests.pipelines.model_state import actions, calls_begun
from tests.pipelines.small_sparse import EXACT, SPARSE, assert_close, error
from tests.tiny_models import seeded
from tests.variants import slow

CHANNELS = QWEN_CONFIG["in_channels"]
PIXELS = 48  # tokens of the picture
WIDTH = QWEN_CONFIG["num_attention_heads"] * QWEN_CONFIG["attention_head_dim"]
MASKED = (
    "attention runs dense: the text is masked otherwise than by one length for all samples of a "
    "call"
)


def generate(pipe, **changes):
    return small_sparse.generate(pipe, PICTURE, **changes)


@pytest.fixture
def pipe():
    return tiny_qwen_pipeline()


# Text.


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([[1, 1, 1, 0]], 3),
        ([[1, 1, 1, 1]], 4),
        ([[1, 1, 0, 0], [1, 1, 0, 0]], 2),
        ([[1, 1, 0, 0], [1, 1, 1, 0]], None),
        ([[1, 1, 1, 0], [1, 1, 0, 0]], None),
        ([[1, 0, 1, 0]], None),
        ([[0, 1, 1, 1]], None),
        ([[0, 0, 0, 0]], None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_the_valid_length_of_a_mask(mask, expected, dtype):
    assert valid_length(torch.tensor(mask).to(dtype)) == expected


def test_padding_is_cut_where_anything_is_sparse(pipe):
    padded = prompts(4)
    expected = generate(pipe, **padded)
    with chipsparse.enable(pipe, EXACT) as handle:
        calls = calls_begun(handle)
        found = generate(pipe, **padded)
    assert {layout.text_tokens for _, layout in calls} == {4}
    assert handle.report.fallbacks == []
    assert handle.report.steps[-1].attention_kept == 1
    assert_close(found, expected)
    with torch.no_grad():  # the padding does count where nothing masks it
        embeds = {"prompt_embeds": padded["prompt_embeds"]}
        assert error(generate(pipe, **embeds), expected) > 1e-3


def test_a_mask_is_read_once(pipe, monkeypatch):
    """It lives on the device, and to read it is to wait for that."""
    read = []

    def look(mask):
        read.append(int(mask.sum()))
        return valid_length(mask)

    monkeypatch.setattr("chipsparse.pipelines.qwen_image.valid_length", look)
    arguments = {**prompts(4, negative=(2,)), "true_cfg_scale": 3.0}
    with chipsparse.enable(pipe, SPARSE):
        generate(pipe, **arguments)
        assert read == [4, 2]
        generate(pipe, **arguments)
        assert read == [4, 2] * 2


def test_branches_of_other_text_lengths_are_one_generation(pipe):
    arguments = {**GUIDED, "prompt_embeds": random(1, TEXT, TEXT_DIM, seed=7)}
    expected = generate(pipe, **arguments)
    with chipsparse.enable(pipe, EXACT) as handle:
        calls = calls_begun(handle)
        found = generate(pipe, **arguments)
    assert {layout.text_tokens for _, layout in calls} == {TEXT, TEXT - 2}
    assert actions(handle) == actions(handle, "uncond")
    assert actions(handle) == ["dense", "refresh", "sparse", "sparse", "refresh", "sparse"]
    assert_close(found, expected)


def test_branches_of_other_text_lengths_keep_the_same_columns_of_the_picture(pipe):
    kept = {}

    def look(_pipe, step, _timestep, tensors):
        if step != 2:
            return tensors
        caches, read = handle._adapters[0].session._caches, frozenset({"columns"})
        for branch, text in (("cond", TEXT), ("uncond", TEXT - 2)):
            for layer in range(QWEN_CONFIG["num_layers"]):
                with caches.acquire(branch, layer, "attention", read, frozenset()) as cache:
                    kept[branch, layer] = unpack_mask(cache.columns, text + PIXELS).clone()
        return tensors

    with chipsparse.enable(pipe, SPARSE) as handle:
        generate(pipe, **GUIDED, callback_on_step_end=look)
    assert handle.report.fallbacks == []
    for layer in range(QWEN_CONFIG["num_layers"]):
        first, other = kept["cond", layer], kept["uncond", layer]
        assert first[..., :TEXT].all()
        assert other[..., : TEXT - 2].all()
        assert torch.equal(first[..., TEXT:], other[..., TEXT - 2 :])
        assert 0 < first[..., TEXT:].float().mean() < 0.5
    ran = {
        record.branch: {layer.backend for layer in record.layers if layer.part == "attention"}
        for record in handle.report.steps
        if record.action is Action.REFRESH
    }
    assert ran == {"cond": {"reference"}, "uncond": {"library"}}  # the other needs no column sums


def holes():
    arguments = prompts(4)
    arguments["prompt_embeds_mask"][0, 1] = 0
    return arguments


@pytest.mark.parametrize("arguments", [prompts(4, 2), holes()], ids=["lengths", "holes"])
def test_other_masks_keep_the_attention_dense(pipe, arguments):
    expected = generate(pipe, **arguments)
    for config in (SparsityConfig.dense(), SPARSE.override({"schedule.actions": ["dense"]})):
        with chipsparse.enable(pipe, config) as handle:
            assert torch.equal(generate(pipe, **arguments), expected)
            assert handle.report.fallbacks == []
    with chipsparse.enable(pipe, EXACT) as handle:
        found = generate(pipe, **arguments)
    assert_close(found, expected)
    assert handle.report.fallbacks == [MASKED]
    last = handle.report.steps[-1]
    assert (last.attention_kept, last.mlp_kept) == (None, 1)


@pytest.mark.parametrize("arguments", [{}, prompts(4), prompts(4, 2)], ids=["no", "cut", "mask"])
def test_an_all_dense_plan_keeps_mask_and_backend(pipe, arguments):
    with attention_backend("native"):  # diffusers sets it globally, too: restore it
        pipe.transformer.set_attention_backend("_native_math")
    expected = generate(pipe, **arguments)
    used = []
    with chipsparse.enable(pipe, SparsityConfig.dense()):
        plain = torch.nn.functional.scaled_dot_product_attention

        def look(query, key, value, attn_mask=None, **options):
            used.append((attn_mask is not None, torch.backends.cuda.flash_sdp_enabled()))
            return plain(query, key, value, attn_mask, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", look)
            assert torch.equal(generate(pipe, **arguments), expected)
    assert set(used) == {(bool(arguments), False)}  # nothing but the math backend was allowed


def test_a_mask_stays_where_only_the_mlp_is_sparse(pipe):
    arguments = prompts(4)
    expected = generate(pipe, **arguments)
    config = EXACT.override({"attention.density": "dense"})
    with chipsparse.enable(pipe, config) as handle:
        found = generate(pipe, **arguments)
    assert_close(found, expected)
    assert handle.report.fallbacks == []
    last = handle.report.steps[-1]
    assert (last.attention_kept, last.mlp_kept) == (None, 1)


# Several pictures.


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([[(1, 8, 6)]], ((1, 8, 6),)),
        ([[(1, 8, 6), (1, 4, 4)]] * 2, ((1, 8, 6), (1, 4, 4))),
        ([(1, 8, 6), (1, 8, 6)], ((1, 8, 6),)),  # one picture for each sample
        ((1, 8, 6), ((1, 8, 6),)),
        ([[[1, 8, 6]]], ((1, 8, 6),)),
    ],
)
def test_pictures_are_read_from_the_shapes(shapes, expected):
    assert image_grids(shapes) == expected


@pytest.mark.parametrize("zero_cond_t", [slow(False), True])
def test_editing_sees_each_picture_as_a_grid(monkeypatch, zero_cond_t):
    for name in ("VAE_IMAGE_SIZE", "CONDITION_IMAGE_SIZE"):
        monkeypatch.setattr(pipeline_qwenimage_edit_plus, name, 64 * 64)
    pipe = tiny_qwen_pipeline(
        diffusers.QwenImageEditPlusPipeline,
        processor=None,
        transformer=tiny_qwen_transformer(zero_cond_t=zero_cond_t),
    )
    arguments = {**GUIDED, "image": [IMAGE["image"], IMAGE["image"].resize((64, 64))]}
    expected = generate(pipe, **arguments)
    with chipsparse.enable(pipe, EXACT) as handle:
        calls = calls_begun(handle)
        found = generate(pipe, **arguments)
        assert handle.report.fallbacks == []
    assert {layout.grids for _, layout in calls} == {((1, 8, 6), (1, 8, 8), (1, 8, 8))}
    assert_close(found, expected)
    with chipsparse.enable(pipe, SPARSE):
        sparse = generate(pipe, **arguments)
    assert not torch.equal(sparse, found)
    assert sparse.isfinite().all()


def call_arguments(grids, **changes):
    tokens = sum(rows * columns for _, rows, columns in grids)
    return {
        "hidden_states": random(2, tokens, CHANNELS, seed=1),
        "encoder_hidden_states": random(2, TEXT, TEXT_DIM, seed=2),
        "timestep": torch.tensor([0.7, 0.7]),
        "img_shapes": [grids] * 2,
        "return_dict": False,
        **changes,
    }


def found_and_expected(model, arguments):
    """One call in our tile order, and one unpatched."""
    with torch.no_grad():
        expected = model(**arguments)[0]
        pipe = tiny_qwen_pipeline(transformer=model)
        pipe.scheduler = None  # which has no part in it
        with chipsparse.enable(pipe, SPARSE) as handle:
            found = model(**arguments)[0]
    assert handle.report.fallbacks == []
    assert not torch.equal(found, expected)  # another order of summation: the order did change
    return found, expected


def test_layers_with_their_own_rotary_embeddings():
    model = tiny_qwen_transformer(use_layer3d_rope=True, use_additional_t_cond=True)
    grids = [(1, 4, 6), (1, 4, 6), (1, 8, 4)]
    arguments = call_arguments(grids, additional_t_cond=torch.zeros(2, dtype=torch.long))
    found, expected = found_and_expected(model, arguments)
    assert_close(found, expected)


def test_control_residuals_follow_the_tile_order():
    """They are per token: in another order the result would be another picture."""
    model = tiny_qwen_transformer()
    residuals = [random(2, 48, WIDTH, seed=seed) for seed in (3, 4)]
    arguments = call_arguments([(1, 8, 6)], controlnet_block_samples=residuals)
    found, expected = found_and_expected(model, arguments)
    assert_close(found, expected)
    with torch.no_grad():
        plain = model(**call_arguments([(1, 8, 6)]))[0]
    assert (plain - expected).norm() > 0.1 * expected.norm()


def test_a_controlnet_keeps_its_result():
    config = {**QWEN_CONFIG, "num_layers": 1, "extra_condition_channels": 0}
    controlnet = with_an_effect(seeded(diffusers.QwenImageControlNetModel, **config))
    pipe = tiny_qwen_pipeline(diffusers.QwenImageControlNetPipeline, controlnet=controlnet)
    arguments = {**GUIDED, "control_image": IMAGE["image"]}
    expected = generate(pipe, **arguments)
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(generate(pipe, **arguments), expected)
        assert handle.report.fallbacks == []
        assert actions(handle).count("sparse") == 3


def test_shapes_that_do_not_fit_are_the_models_own_error(pipe):
    arguments = call_arguments([(1, 8, 6)], img_shapes=[[(1, 9, 9)]] * 2)
    with chipsparse.enable(pipe, SPARSE), torch.no_grad(), pytest.raises(RuntimeError):
        pipe.transformer(**arguments)
