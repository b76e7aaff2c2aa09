"""diffusers' own caches on a patched transformer: each works as it does alone, or is refused."""

import functools
import itertools

import diffusers
import pytest
import torch
from diffusers import hooks

import chipsparse
from chipsparse.pipelines.diffusers_hooks import why_caches_refused
from tests.pipelines.model_state import actions
from tests.pipelines.small_sparse import assert_close
from tests.pipelines.tiny_runs import MODELS, STEPS, WAN
from tests.schedules import listed
from tests.tiny_models import tiny_flux_pipeline, tiny_wan_pipeline
from tests.variants import slow

# Timesteps at which attention may be passed over.
WHEN = {"spatial_attention_timestep_skip_range": (-1, 950)}
SEER = {"cache_interval": 3, "disable_cache_before_step": 3, "taylor_factors_dtype": torch.float32}


def taylor_seer(_):
    names = [r"blocks\.\d+\.attn1", r".*transformer_blocks\.\d+\.attn"]
    return hooks.TaylorSeerCacheConfig(cache_identifiers=names, **SEER)


def mag(_, threshold=0.5, most=2):
    return hooks.MagCacheConfig(
        threshold=threshold,
        max_skip_steps=most,
        retention_ratio=0.3,
        num_inference_steps=STEPS,
        mag_ratios=[1.0] + [1.01] * (STEPS - 1),
    )


def pyramid(pipe, interval=2):
    return hooks.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=interval,
        current_timestep_callback=lambda: float(pipe._current_timestep),
        **WHEN,
    )


def faster(pipe, *, distilled=True):
    return hooks.FasterCacheConfig(
        is_guidance_distilled=distilled,
        current_timestep_callback=lambda: float(pipe._current_timestep),
        **WHEN,
    )


CONFIGS = {
    "first block": lambda _: hooks.FirstBlockCacheConfig(threshold=0.3),
    "taylor seer": taylor_seer,
    # It predicts the last linear's output and passes over all blocks.
    "taylor seer lite": lambda _: hooks.TaylorSeerCacheConfig(use_lite_mode=True, **SEER),
    "mag": mag,
    "pyramid": pyramid,
    "faster": faster,
    "sea": lambda _: diffusers.hooks.SeaCacheConfig(threshold=0.6),
}
# One cache of blocks, and those of attention; FLUX's pipelines do not tell SeaCache the step.
QUICK = [("wan", config) for config in ("first block", "taylor seer", "pyramid")]
CASES = [case for case in itertools.product(MODELS, CONFIGS) if case != ("flux", "sea")]
if not hasattr(diffusers.hooks, "SeaCacheConfig"):  # an earlier diffusers
    CASES.remove(("wan", "sea"))


def count_calls(pipe):
    """A list that grows with every attention of a middle block that is really computed."""
    blocks = getattr(pipe.transformer, "blocks", None) or pipe.transformer.transformer_blocks
    attention = blocks[1].attn1 if hasattr(blocks[1], "attn1") else blocks[1].attn
    calls = []
    attention.to_q.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize(
    ("name", "config"),
    [case if case in QUICK else slow(*case) for case in CASES],
)
def test_a_cache_works_as_it_does_alone(name, config):
    model = MODELS[name]
    config = CONFIGS[config]
    alone = model.make()
    calls = count_calls(alone)
    dense = model.generate(alone)
    dense_calls = len(calls)
    alone.transformer.enable_cache(config(alone))
    expected = model.generate(alone)
    passing_calls = len(calls) - dense_calls
    assert 0 < passing_calls < dense_calls

    pipe = model.make()
    pipe.transformer.enable_cache(config(pipe))
    calls = count_calls(pipe)
    with chipsparse.enable(pipe, model.EXACT) as handle:
        found = model.generate(pipe)
        assert len(calls) == passing_calls
        assert "sparse" in actions(handle, handle.report.steps[0].branch)
    # What the cache passed over at a refresh is caught up with later.
    caught_up = " runs in full at sparse steps where a layer had recorded nothing since"
    assert all(caught_up in line for line in handle.report.fallbacks)
    assert_close(found, expected, 2e-4)
    assert torch.equal(model.generate(pipe), expected)
    pipe.transformer.disable_cache()
    with chipsparse.enable(pipe, model.EXACT):
        pipe.transformer.enable_cache(config(pipe))
        assert torch.equal(model.generate(pipe), found)
    pipe.transformer.disable_cache()
    assert torch.equal(model.generate(pipe), dense)


@pytest.mark.parametrize(("name", "config"), [("wan", mag), slow("flux", taylor_seer)])
def test_layers_that_were_passed_over_run_sparse_too(name, config):
    """Also with caches in host memory, of which the layers that were passed over fetch nothing."""
    model = MODELS[name]
    pipe = model.make()
    dense = model.generate(pipe)
    pipe.transformer.enable_cache(config(pipe))
    with chipsparse.enable(pipe, model.SPARSE) as handle:
        found = model.generate(pipe)
        layers = len(handle._runners[0].sparse.patch.self_attentions())
    sparse = [r.fractions("attention") for r in handle.report.steps if r.action.value == "sparse"]
    assert min(map(len, sparse)) < max(map(len, sparse)) == layers
    assert 0 < (found - dense).norm() < 0.3 * dense.norm()
    with chipsparse.enable(pipe, model.SPARSE.override({"memory.offload": "always"})) as handle:
        assert torch.equal(model.generate(pipe), found)
    assert handle.report.host_bytes > 0


# The first counts the calls of both branches, and so computes each branch at every third step. The
# second passes over every other call of all blocks.
@pytest.mark.parametrize(
    ("config", "part"),
    [
        (functools.partial(pyramid, interval=3), "attention"),
        (functools.partial(mag, threshold=9.0, most=1), "mlp"),
    ],
)
def test_a_refresh_that_a_layer_missed_is_made_up_for(config, part):
    """Not the first one alone: what a layer recorded before is not what its step should have."""
    pipe = tiny_wan_pipeline()
    taken = {}
    pipe.transformer.enable_cache(config(pipe))
    with chipsparse.enable(pipe, WAN.SPARSE.override(listed("DRSRRSS"))) as handle:
        WAN.generate(pipe)
    for record in [each for each in handle.report.steps if each.branch == "cond"]:
        layers = {entry.action.value for entry in record.layers if entry.part == part}
        taken[record.step] = (record.action.value, layers)
    missed = [step for step, each in taken.items() if each == ("refresh", set())]
    assert missed[-1] == 4
    following = [each for step, each in taken.items() if step > missed[-1]]
    assert next(each for each in following if each[1]) == ("sparse", {"refresh"})
    assert all(layers <= {"sparse", "refresh"} for _, layers in following)


# Skips steps, which the cache counts; FasterCache alone fails on these pipelines, too, which call
# each branch of the guidance by itself.
@pytest.mark.parametrize(
    ("config", "skips", "said"),
    [
        (mag, True, "MagCache counts the"),
        (taylor_seer, True, "TaylorSeer counts the"),
        (functools.partial(faster, distilled=False), False, "FasterCache computes a part of the b"),
    ],
)
def test_a_cache_that_ours_would_lead_astray_is_refused(config, skips, said):
    pipe = tiny_wan_pipeline()
    with chipsparse.enable(pipe, WAN.SPARSE.override(listed("DRSKSRS" if skips else "DRSSSRS"))):
        pipe.transformer.enable_cache(config(pipe))
        for _ in range(2):
            with pytest.raises(ValueError, match=f"WanTransformer3DModel: {said}"):
                WAN.generate(pipe)
        pipe.transformer.disable_cache()
        WAN.generate(pipe)


def test_hooks_that_were_put_there_without_enable_cache_are_seen():
    pipe = tiny_flux_pipeline()
    hooks.apply_taylorseer_cache(pipe.transformer, taylor_seer(pipe))
    assert why_caches_refused(pipe.transformer, skips=False) is None
    assert why_caches_refused(pipe.transformer, skips=True).startswith("TaylorSeer counts")
