"""Prompts that are padded or differ in length: cut to their tokens, or branches of their own."""

import gc

import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig

import chipsparse
from chipsparse import SparsityConfig
from chipsparse.pipelines import padded_text
from chipsparse.pipelines.families import qwen_image as qwen_adapter
from chipsparse.pipelines.tensor_facts import TensorFacts
from chipsparse.skip import spread as schedule_spread
from tests.pipelines.families import hunyuan_video, mochi
from tests.pipelines.families.hunyuan_video import VALID
from tests.pipelines.model_state import actions, calls_begun
from tests.pipelines.small_sparse import EXACT, SPARSE, STEPS, assert_close, error, generate
from tests.pipelines.test_families import FAMILIES, arguments_of
from tests.schedules import listed

# Calls with padding: variant, name of the mask, valid tokens of all texts, masks, what reads them.
PADDED = {
    "hunyuan video": ("short prompt", "prompt_attention_mask", 2, 1, "_leading_tokens"),
    "hunyuan video 1.5": ("padding", "prompt_embeds_mask", VALID, 4, "_leading_tokens"),
    "qwen-image": ("padded and guided", "prompt_embeds_mask", 4, 2, "_length_of"),
}
GUIDED = arguments_of("mochi", "guided")


@pytest.mark.parametrize(
    ("rows", "one_length", "lengths"),
    [
        (["1110"], 3, (3,)),
        (["1111"], 4, (4,)),
        (["1100", "1100"], 2, (2, 2)),
        (["1100", "1110"], None, (2, 3)),
        (["1100", "0000", "1111"], None, (2, 0, 4)),
        (["1011"], None, None),
        (["0111"], None, None),
        (["1101", "1100"], None, None),
        (["0000"], None, (0,)),
        (["", "", ""], None, (0, 0, 0)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16])
def test_the_lengths_of_a_mask(rows, one_length, lengths, dtype):
    mask = torch.tensor([[int(value) for value in row] for row in rows]).to(dtype)
    with torch.device("meta"):  # the user's default
        assert padded_text.leading_tokens(mask) == lengths
    assert qwen_adapter.valid_length(mask) == one_length


def test_a_tensor_is_read_once_until_it_is_written_to_and_not_held():
    read = []
    facts = TensorFacts(lambda tensor: read.append(1) or tensor.sum().item())
    first = torch.ones(2)
    second = torch.ones(2)
    assert [facts(first), facts(second), facts(first), facts(second)] == [2, 2, 2, 2]
    assert len(read) == 2
    first.zero_()
    assert facts(first) == 0
    assert len(read) == 3
    with torch.inference_mode():
        tensor = torch.ones(2)
        assert [facts(tensor), facts(tensor)] == [2, 2]
        tensor.zero_()  # which PyTorch does not count
        assert [facts(tensor), facts(tensor)] == [0, 0]
    assert len(read) == 5
    first.data = torch.full((2,), 3.0)  # nor this
    assert facts(first) == 6
    del first, second, tensor
    gc.collect()
    assert len(facts._known) == 0


@pytest.mark.parametrize("name", PADDED)
def test_padding_is_cut_and_each_mask_is_read_once_in_a_generation(name):
    """It lives on the device, and to read it is to wait for that."""
    variant, mask, tokens, masks, reader = PADDED[name]
    pipe = FAMILIES[name].make()
    call = arguments_of(name, variant)
    read = []
    with chipsparse.enable(pipe, EXACT) as handle:
        facts = getattr(handle._runners[0].sparse.reader, reader)
        facts._read = lambda mask, stock=facts._read: read.append(mask) or stock(mask)
        calls = calls_begun(handle)
        found = generate(pipe, call)
        assert len(read) == len({id(mask) for mask in read}) == masks
        generate(pipe, call)
        assert len(read) in (masks, 2 * masks)
    branch = handle.report.steps[0].branch
    assert {layout.text_tokens for at, layout in calls if at.branch == branch} == {tokens}
    expected = generate(pipe, call)
    assert_close(found, expected)
    unmasked = {**call, mask: torch.ones_like(call[mask])}
    assert error(generate(pipe, unmasked), expected) > 1e-3  # or it would not show


@pytest.mark.parametrize(
    ("name", "variant"),
    [(name, "prompts of two lengths") for name in PADDED] + [("qwen-image", "padded")],
)
def test_a_mask_is_no_fallback_where_only_the_mlp_is_sparse(name, variant):
    pipe = FAMILIES[name].make()
    call = arguments_of(name, variant)
    expected = generate(pipe, call)
    with chipsparse.enable(pipe, EXACT.override({"attention.density": "dense"})) as handle:
        assert_close(generate(pipe, call), expected)
    assert handle.report.fallbacks == []
    last = handle.report.steps[-1]
    assert (last.attention_kept, last.mlp_kept) == (None, 1)


def test_a_prompt_without_any_token_is_left_to_the_model():
    """HunyuanVideo divides by their number: it is not cut to nothing."""
    embeds, mask = hunyuan_video.padded(0)
    with chipsparse.enable(hunyuan_video.pipeline(), SPARSE) as handle:
        reader = handle._runners[0].sparse.reader
        arguments = {"encoder_hidden_states": embeds, "encoder_attention_mask": mask}
        assert reader.kept_text(arguments) == {"encoder_hidden_states": hunyuan_video.PADDED}
        assert reader.dense_because(arguments)


def test_layers_by_themselves_are_refused_rather_than_left_without_a_mask():
    refused = pytest.raises(ValueError, match="are called outside of its own call")
    with chipsparse.enable(hunyuan_video.pipeline(), SPARSE) as handle, refused:
        handle._runners[0].sparse.attention(0)


def test_each_length_of_mochi_is_a_branch_of_its_own():
    pipe = mochi.tiny_pipeline()
    with chipsparse.enable(pipe, SPARSE) as handle:
        calls = calls_begun(handle)

        def sizes(*lengths, negative=(), scale=4.5, steps=3):
            """The samples and text tokens of each branch."""
            calls.clear()
            prompts = mochi.prompts(*lengths, negative=negative)
            call = {**mochi.VIDEO, **prompts, "guidance_scale": scale}
            generate(pipe, call, num_inference_steps=steps)
            assert all(layout.batch == len(layout.samples or (0, 1)) for _, layout in calls)
            return {each.branch: (layout.samples, layout.text_tokens) for each, layout in calls}

        branches = {"cond_uncond 0": ((0,), 3), "cond_uncond 1": ((0,), 7)}
        assert sizes(7, negative=[3], steps=STEPS) == branches
        for branch in branches:
            taken = ["dense", "refresh", "sparse", "sparse", "refresh", "sparse"]
            assert actions(handle, branch) == taken
        assert handle.report.fallbacks == []
        # 9 and 2 without the prompt, 2 and 9 with it.
        found = sizes(2, 9, negative=[9, 2])
        assert found == {"cond_uncond 0,3": ((0, 1), 9), "cond_uncond 1,2": ((1, 0), 2)}
        assert sizes(5, negative=[5]) == {"cond_uncond": (None, 5)}
        unguided = sizes(2, 9, scale=1.0)
        assert unguided == {"cond_uncond 0": ((0,), 2), "cond_uncond 1": ((1,), 9)}


def test_each_length_of_mochi_is_a_branch_of_its_own_where_a_share_of_the_steps_is_sparse():
    shares = {"schedule": {"spread": {"full": 0.34, "sparse": 0.5}}}
    pipe = mochi.tiny_pipeline()
    prompts = mochi.prompts(7, negative=[3])
    with chipsparse.enable(pipe, SPARSE.override(shares)) as handle:
        generate(pipe, {**mochi.VIDEO, **prompts, "guidance_scale": 4.5})
        assert {step.branch for step in handle.report.steps} == {"cond_uncond 0", "cond_uncond 1"}
        assert "sparse" in actions(handle, "cond_uncond 0")


def test_prompts_of_other_lengths_lay_out_no_more_steps_than_there_are(monkeypatch):
    """A list of 1,000 steps takes seconds, and it was asked for in each call."""
    laid_out = []
    spread = schedule_spread.spread

    def spied(steps, count, **options):
        laid_out.append(steps)
        return spread(steps, count, **options)

    monkeypatch.setattr(schedule_spread, "spread", spied)
    shares = {"schedule": {"spread": {"full": 0.34, "sparse": 0.5}}}
    pipe = mochi.tiny_pipeline()
    prompts = mochi.prompts(7, negative=[3])
    with chipsparse.enable(pipe, SPARSE.override(shares)):
        arguments = {**mochi.VIDEO, **prompts, "guidance_scale": 4.5}
        generate(pipe, arguments, num_inference_steps=9)
    assert set(laid_out) == {9}


def test_an_unpatched_generation_of_mochi_is_one_call_a_step():
    pipe = mochi.tiny_pipeline()
    calls = []
    pipe.transformer.patch_embed.register_forward_hook(lambda *_: calls.append(None))
    for config, expected in ((SparsityConfig.dense(), 4), (SPARSE.override(listed("DRKS")), 2 * 3)):
        calls.clear()
        with chipsparse.enable(pipe, config):
            generate(pipe, GUIDED, num_inference_steps=4)
        assert len(calls) == expected


def test_a_block_cache_of_diffusers_keeps_the_branches_of_mochi_separate():
    """It reuses what the first step's blocks did: with states mixed up, that of another prompt."""
    pipes = [mochi.tiny_pipeline() for _ in range(2)]
    for pipe in pipes:
        pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=1e9))
    with chipsparse.enable(pipes[1], EXACT):
        assert_close(generate(pipes[1], GUIDED), generate(pipes[0], GUIDED))
