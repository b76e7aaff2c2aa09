"""The Mochi adapter: prompts of several lengths, whose padding nothing may see."""

import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig

import chipsparse
from chipsparse import SparsityConfig
from chipsparse.pipelines.mochi import GAPS, prompt_lengths
from tests.pipelines.families.mochi import TEXT, VIDEO, prompts, tiny_pipeline
from tests.pipelines.model_state import actions, calls_begun
from tests.pipelines.small_sparse import EXACT, SPARSE, STEPS, assert_close, generate
from tests.schedules import listed
from tests.variants import slow

GUIDED = {**VIDEO, **prompts(7, negative=[3]), "guidance_scale": 4.5}
BATCH = {**VIDEO, **prompts(2, 9), **prompts(2, 9, negative=[9, 2]), "guidance_scale": 4.5}


def test_each_length_is_a_branch_of_its_own():
    pipe = tiny_pipeline()
    with chipsparse.enable(pipe, SPARSE) as handle:
        calls = calls_begun(handle)

        def sizes(call):
            """The samples and text tokens of each branch."""
            calls.clear()
            generate(pipe, call)
            assert all(layout.batch == len(layout.samples or (0, 1)) for _, layout in calls)
            return {each.branch: (layout.samples, layout.text_tokens) for each, layout in calls}

        branches = {"cond_uncond 0": ((0,), 3), "cond_uncond 1": ((0,), 7)}
        assert sizes(GUIDED) == branches
        for branch in branches:
            taken = actions(handle, branch)
            assert taken == ["dense", "refresh", "sparse", "sparse", "refresh", "sparse"]
        assert handle.report.fallbacks == []
        # 9 and 2 without the prompt, 2 and 9 with it.
        assert sizes(BATCH) == {"cond_uncond 0,3": ((0, 1), 9), "cond_uncond 1,2": ((1, 0), 2)}
        even = {**VIDEO, **prompts(5, negative=[5]), "guidance_scale": 4.5}
        assert sizes(even) == {"cond_uncond": (None, 5)}
        unguided = {**VIDEO, **prompts(2, 9)}
        assert sizes(unguided) == {"cond_uncond 0": ((0,), 2), "cond_uncond 1": ((1,), 9)}


@pytest.mark.parametrize("call", [GUIDED, slow(BATCH)], ids=["guided", "batch"])
def test_samples_are_those_of_calls_with_one_prompt(call):
    """Bit for bit but for the random columns, which each branch draws for itself.

    So it is where they are no guidance branches, which share columns.
    """
    config = SPARSE.override({"attention.random_fraction": 0.0})
    arguments = []
    pipe = tiny_pipeline()
    hook = pipe.transformer.register_forward_pre_hook(
        lambda _module, _args, kwargs: arguments.append(kwargs), with_kwargs=True
    )
    generate(pipe, call)
    hook.remove()
    pipe._guidance_scale = 1.0

    def outputs(rows):
        with chipsparse.enable(pipe, config), torch.no_grad():
            return [
                pipe.transformer(
                    **{
                        name: value[rows] if torch.is_tensor(value) else value
                        for name, value in each.items()
                    }
                )[0]
                for each in arguments
            ]

    together = outputs(slice(None))
    for row in range(len(together[0])):
        for alone, all_rows in zip(outputs([row]), together, strict=True):
            torch.testing.assert_close(alone[0], all_rows[row], atol=1e-5, rtol=1e-4)


def test_an_unpatched_generation_is_one_call_a_step():
    pipe, calls = tiny_pipeline(), []
    pipe.transformer.patch_embed.register_forward_hook(lambda *_: calls.append(None))
    with chipsparse.enable(pipe, SparsityConfig.dense()):
        generate(pipe, GUIDED)
        assert len(calls) == STEPS
    with chipsparse.enable(pipe, SPARSE.override(listed("DRSKRS"))):
        generate(pipe, GUIDED)
        assert len(calls) == STEPS + 2 * (STEPS - 1)


def test_what_padding_holds_does_not_matter():
    pipe = tiny_pipeline()
    other = {**GUIDED, "prompt_embeds": GUIDED["prompt_embeds"].clone()}
    other["prompt_embeds"][:, 7:] = 5.0
    with chipsparse.enable(pipe, SPARSE):
        assert_close(generate(pipe, other), generate(pipe, GUIDED), 1e-6)


def test_masks_of_any_dtype():
    pipe, found = tiny_pipeline(), []
    with chipsparse.enable(pipe, SPARSE):
        for dtype in (torch.bool, torch.int64, torch.float32):
            masks = {name: GUIDED[name].to(dtype) for name in GUIDED if name.endswith("mask")}
            found.append(generate(pipe, {**GUIDED, **masks}))
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])


@pytest.mark.parametrize("config", [EXACT, SparsityConfig.dense()], ids=["exact", "dense"])
def test_a_mask_with_gaps_is_left_to_the_stock_processor(config):
    call = {**GUIDED, "prompt_attention_mask": GUIDED["prompt_attention_mask"].clone()}
    call["prompt_attention_mask"][0, 2] = False
    pipe = tiny_pipeline()
    expected = generate(pipe, call)
    with chipsparse.enable(pipe, config) as handle:
        found = generate(pipe, call)
        if config is EXACT:
            assert handle.report.fallbacks == [f"attention runs dense: {GAPS}"]
            assert handle.report.steps[-1].mlp_kept == 1
            assert_close(found, expected)
        else:
            assert torch.equal(found, expected)
            assert handle.report.fallbacks == []


@pytest.mark.parametrize(
    ("rows", "lengths"),
    [
        (["1110"], [3]),
        (["1100", "0000", "1111"], [2, 0, 4]),
        (["1101", "1100"], None),
        (["0111"], None),
    ],
)
def test_lengths_of_prompts(rows, lengths):
    mask = torch.tensor([[int(value) for value in row] for row in rows])
    assert prompt_lengths(mask) == prompt_lengths(mask.bool()) == lengths


def test_a_block_cache_of_diffusers_keeps_branches_apart():
    """It reuses what the first step's blocks did: with states mixed up, that of another prompt."""
    expected = tiny_pipeline()
    expected.transformer.enable_cache(FirstBlockCacheConfig(threshold=1e9))
    pipe = tiny_pipeline()
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=1e9))
    with chipsparse.enable(pipe, EXACT):
        assert_close(generate(pipe, GUIDED), generate(expected, GUIDED))


def test_an_aborted_call_leaves_no_trace():
    pipe, calls = tiny_pipeline(), []
    with chipsparse.enable(pipe, SPARSE):
        expected = generate(pipe, GUIDED)

        def fail(*_):
            calls.append(None)
            if len(calls) == 6:  # the second branch of the third step
                raise RuntimeError("injected")

        hook = pipe.transformer.transformer_blocks[1].register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="injected"):
            generate(pipe, GUIDED)
        hook.remove()
        assert torch.equal(generate(pipe, GUIDED), expected)


def test_timesteps_that_rise_are_no_new_generations():
    """A caller of the transformer with a schedule of its own: nothing else tells the step."""
    pipe = tiny_pipeline()
    with chipsparse.enable(pipe, SPARSE) as handle, torch.no_grad():
        adapter = handle._adapters[0]
        schedule = torch.tensor([0.3, 129.7, 900.1])
        for value in schedule:
            rounded = value.bfloat16().expand(2)
            assert adapter.scheduled_timestep(rounded, schedule) == pytest.approx(float(value))
        pipe.scheduler = None
        for step in range(4):
            pipe.transformer(
                hidden_states=torch.ones(1, 12, 1, 4, 4),
                encoder_hidden_states=torch.ones(1, TEXT, 16),
                timestep=torch.tensor([100.0 * step]),
                encoder_attention_mask=torch.ones(1, TEXT),
            )
        assert actions(handle, "call0") == ["dense", "refresh", "sparse", "sparse"]
