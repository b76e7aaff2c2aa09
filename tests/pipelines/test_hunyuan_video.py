"""HunyuanVideo and 1.5: prompts without their padding, the order of tokens, pictures."""

import diffusers
import pytest
import torch
import torch.nn.functional as F

import chipsparse
from chipsparse.layers.attention import AttentionLayer
from chipsparse.pipelines import padded_text
from chipsparse.pipelines.hunyuan_video import HunyuanVideoAdapter
from tests.pipelines.families.hunyuan_video import (
    FAMILIES,
    IMAGE_TO_VIDEO15,
    IMAGE_TOKENS,
    PADDED,
    VALID,
    VIDEO,
    VIDEO15,
    image_to_video15,
    negative_prompts,
    padded,
    pipeline,
    pipeline15,
    prompts,
    prompts15,
    token_replace,
)
from tests.pipelines.model_state import actions, calls_begun
from tests.pipelines.small_sparse import EXACT, SPARSE, STEPS, assert_close, error, generate
from tests.variants import slow

VIDEO_TOKENS, VIDEO15_TOKENS = 3 * 4 * 3, 3 * 6 * 4
MAKE = {"1.0": pipeline, "1.5": pipeline15}
CALL = {"1.0": VIDEO, "1.5": VIDEO15}
# Both samples have nine valid tokens in 1.5, but of other texts.
MIXED = {
    "1.0": prompts(3, VALID),
    "1.5": {
        **prompts15(6, 5, glyphs=[3, 4]),
        **prompts15(6, 5, glyphs=[3, 4], prefix="negative_", seed=2),
    },
}
each_version = pytest.mark.parametrize("version", MAKE)


@pytest.fixture
def masks_seen(monkeypatch):
    """Number of keys and mask of every attention that PyTorch computes."""
    seen = []
    attention = F.scaled_dot_product_attention

    def look(query, key, value, attn_mask=None, *args, **kwargs):
        seen.append((key.shape[-2], attn_mask))
        return attention(query, key, value, attn_mask, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", look)
    return seen


# The prompt without its padding.


@each_version
@pytest.mark.parametrize("length", [1, slow(PADDED)])
def test_a_prompt_without_its_padding_gives_what_the_masked_one_gives(version, length):
    pipe = MAKE[version]()
    prompt = prompts(length) if version == "1.0" else prompts15(length, glyphs=[2])
    call = CALL[version] | prompt
    expected = generate(pipe, call)
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(generate(pipe, call), expected)
        assert handle.report.fallbacks == []


@each_version
def test_the_padding_would_show(version):
    """As large as it is, a model that attends to it gives something else."""
    pipe = MAKE[version]()
    mask = {"1.0": "prompt_attention_mask", "1.5": "prompt_embeds_mask"}[version]
    call = CALL[version] | (prompts(4) if version == "1.0" else prompts15(4))
    unmasked = call | {mask: torch.ones_like(call[mask])}
    assert error(generate(pipe, unmasked), generate(pipe, call)) > 1e-3


@each_version
@pytest.mark.parametrize("enabled", [True, slow(False)], ids=["sparse", "dense"])
def test_no_mask_reaches_attention_in_a_generation_that_caches(
    version, enabled, masks_seen, monkeypatch
):
    pipe = MAKE[version]()
    call = CALL[version] | (prompts(4) if version == "1.0" else prompts15(4, glyphs=[2]))
    text, video = (4, VIDEO_TOKENS) if version == "1.0" else (6, VIDEO15_TOKENS)
    generate(pipe, call)
    assert any(keys > video and mask is not None for keys, mask in masks_seen)
    masks_seen.clear()
    with chipsparse.enable(
        pipe, SPARSE if enabled else SPARSE.override({"attention.density": "dense"})
    ) as handle:
        keys_seen = set()
        attend = AttentionLayer.__call__

        def look(layer, state, query, key, value, **kwargs):
            if state.branch in ("cond", "pred_cond"):
                keys_seen.add(key.shape[2])
            return attend(layer, state, query, key, value, **kwargs)

        monkeypatch.setattr(AttentionLayer, "__call__", look)
        generate(pipe, call)
        assert handle.report.fallbacks == []
    assert keys_seen == {video + text}
    joint = [mask for keys, mask in masks_seen if keys > video]
    assert enabled or joint  # sparse attention is none of PyTorch's
    assert all(mask is None for mask in joint)


@each_version
def test_prompts_of_several_lengths_keep_their_mask(version):
    pipe = MAKE[version]()
    call = CALL[version] | MIXED[version]
    expected = generate(pipe, call)
    lengths = {"1.0": "3 to 7", "1.5": "5 to 6"}[version]
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(generate(pipe, call), expected)
        assert handle.report.fallbacks == [
            f"attention runs dense: the prompts of the batch have {lengths} tokens, so the shorter "
            "ones need a mask"
        ]
        sparse = [record for record in handle.report.steps if record.action == "sparse"]
        assert sparse
        assert all(record.attention_kept is None for record in sparse)
        assert all(record.mlp_kept == 1 for record in sparse)
    with chipsparse.enable(pipe, EXACT.override({"attention.density": "dense"})) as handle:
        assert_close(generate(pipe, call), expected)
        assert handle.report.fallbacks == []


def test_a_mask_with_gaps_is_left_to_the_model():
    pipe = pipeline()
    call = VIDEO | prompts(VALID)
    call["prompt_attention_mask"] = call["prompt_attention_mask"].roll(1, 1)
    expected = generate(pipe, call)
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(generate(pipe, call), expected)
        assert handle.report.fallbacks == [
            "attention runs dense: a prompt mask keeps others than the first tokens of a prompt"
        ]


@each_version
def test_guidance_branches_may_differ_in_the_length_of_their_prompts(version):
    pipe = MAKE[version]()
    negative = negative_prompts(9) if version == "1.0" else prompts15(9, prefix="negative_", seed=2)
    call = CALL[version] | negative
    expected = generate(pipe, call)
    with chipsparse.enable(pipe, EXACT.override({"memory.offload": "always"})) as handle:
        assert_close(generate(pipe, call), expected)
        wanted = ["dense", "refresh", "sparse", "sparse", "refresh", "sparse"]
        assert [actions(handle, name) for name in ("cond", "uncond")] == [wanted, wanted]
        assert handle.report.fallbacks == []


@each_version
def test_masks_are_read_once(version, monkeypatch):
    """Reading one waits for the device."""
    read = []

    def look(mask):
        read.append(mask)
        return leading_tokens(mask)

    leading_tokens = padded_text.leading_tokens
    monkeypatch.setattr(padded_text, "leading_tokens", look)
    pipe = MAKE[version]()
    call = CALL[version] | (negative_prompts(4) if version == "1.0" else {})
    with chipsparse.enable(pipe, SPARSE) as handle:
        generate(pipe, call)
        assert len(handle.report.steps) == 2 * STEPS
    masks = 2 if version == "1.0" else 4  # of both branches, one for each text
    assert len(read) == len({id(mask) for mask in read}) == masks


def test_the_valid_tokens_of_a_mask():
    _, mask = padded(3, 0, PADDED)
    assert padded_text.leading_tokens(mask) == (3, 0, PADDED)
    assert padded_text.leading_tokens(mask.to(torch.bfloat16)) == (3, 0, PADDED)
    assert padded_text.leading_tokens(mask.bool().flip(1)) is None
    assert padded_text.leading_tokens(mask[:, :0]) == (0, 0, 0)


def test_a_prompt_without_any_token_is_left_to_the_model():
    """The model divides by their number: it is not cut to nothing."""
    pipe = pipeline()
    embeds, mask = padded(0)
    with chipsparse.enable(pipe, SPARSE) as handle:
        adapter = handle._adapters[0]
        arguments = {"encoder_hidden_states": embeds, "encoder_attention_mask": mask}
        assert adapter.kept_text(arguments) == {"encoder_hidden_states": PADDED}
        assert adapter.why_attention_is_dense(arguments)


# Calls that are not the pipeline's.


def inputs(version):
    """Arguments of a transformer call with padding."""
    embeds, mask = padded(4)
    shared = {
        "timestep": torch.tensor([700.0]),
        "encoder_hidden_states": embeds,
        "encoder_attention_mask": mask,
        "return_dict": False,
    }
    random = torch.Generator().manual_seed(0)
    if version == "1.0":
        return shared | {
            "hidden_states": torch.randn(1, 4, 3, 8, 6, generator=random),
            "pooled_projections": torch.randn(1, 8, generator=random),
            "guidance": torch.tensor([6000.0]),
        }
    glyphs, glyph_mask = padded(2, tokens=6, width=10)
    return shared | {
        "hidden_states": torch.randn(1, 9, 3, 6, 4, generator=random),
        "encoder_hidden_states_2": glyphs,
        "encoder_attention_mask_2": glyph_mask,
        "image_embeds": torch.zeros(1, IMAGE_TOKENS, 16),
    }


@each_version
def test_layers_by_themselves_are_refused_rather_than_left_without_a_mask(version):
    pipe = MAKE[version]()
    refused = pytest.raises(ValueError, match="are called outside of its own call")
    with torch.no_grad(), chipsparse.enable(pipe, SPARSE) as handle:
        expected, *_ = pipe.transformer(**inputs(version))
        assert torch.equal(pipe.transformer.forward(**inputs(version))[0], expected)
        with refused:
            handle._adapters[0].attention(0)


# The order of tokens.


def test_tokens_that_a_picture_replaces_stay_in_front(monkeypatch):
    """Were they not, the blocks would take others for them."""
    pipe = token_replace()
    call = next(family.call for family in FAMILIES if family.make is token_replace)
    expected = generate(pipe, call)
    with chipsparse.enable(pipe, EXACT) as handle:
        session, orders = handle._adapters[0].session, []
        begin = session.begin

        def look(*args, **options):
            action = begin(*args, **options)
            orders.append(session.tile_order[0])
            return action

        session.begin = look
        assert_close(generate(pipe, call), expected)
    first_frame = orders[0][:12]
    assert first_frame.sort().values.tolist() == list(range(12))
    assert first_frame.tolist() != list(range(12))

    one_grid = classmethod(lambda *_: ((3, 4, 3),))
    monkeypatch.setattr(HunyuanVideoAdapter, "grids", one_grid)
    with chipsparse.enable(pipe, EXACT):
        assert error(generate(pipe, call), expected) > 1e-3


def test_a_picture_alone():
    """One frame, all of whose tokens are replaced."""
    pipe = token_replace()
    call = next(family.call for family in FAMILIES if family.make is token_replace)
    call = call | {"num_frames": 1}
    expected = generate(pipe, call)
    with chipsparse.enable(pipe, SPARSE) as handle:
        assert torch.equal(generate(pipe, call), expected)
        assert handle._adapters[0].session.plan is None
        assert handle.report.actions()["sparse"] > 0


# HunyuanVideo 1.5.


def test_a_picture_is_text_of_1_5_and_no_picture_is_none():
    for make, call, expected in (
        (pipeline15, VIDEO15, VALID),
        (image_to_video15, IMAGE_TO_VIDEO15.call, VALID + 3 + IMAGE_TOKENS),
    ):
        pipe = make()
        with chipsparse.enable(pipe, SPARSE) as handle:
            calls = calls_begun(handle)
            generate(pipe, call)
        assert {layout.text_tokens for _, layout in calls} == {expected}


def processors(pipe):
    return [block.attn.processor for block in pipe.transformer.transformer_blocks]


def test_1_5_keeps_its_processors_and_the_backend_that_was_chosen():
    pipe = pipeline15()
    pipe.transformer.set_attention_backend("_native_math")
    before, kinds = processors(pipe), [type(each) for each in processors(pipe)]
    with chipsparse.enable(pipe, SPARSE) as handle:
        assert handle._adapters[0]._unpatched_backends == ["_native_math"] * 2
        pipe.transformer.set_attention_backend("native")
        assert handle._adapters[0]._unpatched_backends == ["native"] * 2
    assert all(old is new for old, new in zip(before, processors(pipe), strict=True))
    assert [type(each) for each in processors(pipe)] == kinds
    assert {each._attention_backend for each in processors(pipe)} == {"native"}


def test_1_5_with_one_processor_for_all_blocks():
    pipe = pipeline15()
    first, *others = pipe.transformer.transformer_blocks
    for block in others:
        block.attn.processor = first.attn.processor
    expected = generate(pipe, VIDEO15)
    with chipsparse.enable(pipe, EXACT):
        assert_close(generate(pipe, VIDEO15), expected)
    assert torch.equal(generate(pipe, VIDEO15), expected)


def test_1_5_leaves_a_foreign_processor_alone_and_says_so():
    class Foreign(
        diffusers.models.transformers.transformer_hunyuan_video15.HunyuanVideo15AttnProcessor2_0
    ):
        pass

    pipe = pipeline15()
    expected = generate(pipe, VIDEO15)
    with chipsparse.enable(pipe, EXACT) as handle:
        pipe.transformer.transformer_blocks[1].attn.processor = Foreign()
        assert_close(generate(pipe, VIDEO15), expected)
        assert handle.report.fallbacks == [
            "attention runs dense in 1 of 2 layers (first: layer 1): its processor was replaced"
        ]


def test_1_5_timesteps_are_rounded_to_the_latents_dtype():
    schedule = torch.tensor([1000.0, 993.2, 950.0, 700.0])
    with chipsparse.enable(pipeline15(), SPARSE) as handle:
        read = handle._adapters[0].scheduled_timestep
        for value in schedule:
            rounded = value.to(torch.bfloat16).expand(2)
            assert read(rounded, schedule) == value.item()
        assert read(torch.tensor([3.0]), schedule) == 3.0
        assert read(torch.tensor([3.0]), None) == 3.0
