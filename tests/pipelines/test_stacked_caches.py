"""diffusers' own caches on a patched transformer: each works as it does alone, or is refused."""

import diffusers
import pytest
import torch
from diffusers.hooks import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
    apply_taylorseer_cache,
)

import chipsparse
from chipsparse import SparsityConfig
from chipsparse.pipelines.stacked_caches import why_refused
from tests.pipelines import test_flux as flux
from tests.pipelines import test_wan as wan
from tests.pipelines.model_state import actions
from tests.schedules import listed
from tests.tiny_models import tiny_flux_pipeline, tiny_wan_pipeline
from tests.variants import slow

STEPS = 7
MODELS = {"wan": (tiny_wan_pipeline, wan), "flux": (tiny_flux_pipeline, flux)}
SPATIAL_STEPS = (-1, 950)  # timesteps at which attention may be passed over
NEARLY_EVEN = [1.0] + [1.01] * (STEPS - 1)


def first_block(pipe):
    return FirstBlockCacheConfig(threshold=0.3)


def taylor_seer(pipe):
    names = [r"blocks\.\d+\.attn1", r".*transformer_blocks\.\d+\.attn"]
    return TaylorSeerCacheConfig(
        cache_interval=3,
        disable_cache_before_step=3,
        cache_identifiers=names,
        taylor_factors_dtype=torch.float32,
    )


def taylor_seer_lite(pipe):
    """Predicts the last linear's output and passes over all blocks."""
    return TaylorSeerCacheConfig(
        cache_interval=3,
        disable_cache_before_step=3,
        use_lite_mode=True,
        taylor_factors_dtype=torch.float32,
    )


def mag(pipe, threshold=0.5, most=2):
    return MagCacheConfig(
        threshold=threshold,
        max_skip_steps=most,
        retention_ratio=0.3,
        num_inference_steps=STEPS,
        mag_ratios=NEARLY_EVEN,
    )


def pyramid(pipe, *, interval=2):
    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=interval,
        spatial_attention_timestep_skip_range=SPATIAL_STEPS,
        current_timestep_callback=lambda: timestep_of(pipe),
    )


def faster(pipe, *, distilled=True):
    return FasterCacheConfig(
        is_guidance_distilled=distilled,
        spatial_attention_timestep_skip_range=SPATIAL_STEPS,
        current_timestep_callback=lambda: timestep_of(pipe),
    )


def sea(pipe):
    if not hasattr(diffusers.hooks, "SeaCacheConfig"):
        pytest.skip("this diffusers has no SeaCache")
    return diffusers.hooks.SeaCacheConfig(threshold=0.6)


def timestep_of(pipe):
    return float(pipe._current_timestep)


EVERYWHERE = [first_block, taylor_seer, taylor_seer_lite, mag, pyramid, faster]
# One cache of blocks, and those of attention.
QUICK = (first_block, taylor_seer, pyramid, faster)
CASES = [
    ("wan", config) if config in QUICK else slow("wan", config) for config in (*EVERYWHERE, sea)
]
# The pipelines of FLUX do not tell SeaCache the step.
CASES += [slow("flux", config) for config in EVERYWHERE]


def generate(pipe, module):
    return module.generate(pipe, num_inference_steps=STEPS)


def count_calls(pipe):
    """A list that grows with every attention of a middle block that is really computed."""
    blocks = getattr(pipe.transformer, "blocks", None) or pipe.transformer.transformer_blocks
    attention = blocks[1].attn1 if hasattr(blocks[1], "attn1") else blocks[1].attn
    calls = []
    attention.to_q.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize(
    ("model", "config"), CASES, ids=lambda each: getattr(each, "__name__", each)
)
def test_a_cache_works_as_it_does_alone(model, config):
    make, module = MODELS[model]
    alone = make()
    calls = count_calls(alone)
    dense = generate(alone, module)
    dense_calls = len(calls)
    alone.transformer.enable_cache(config(alone))
    expected = generate(alone, module)
    passing_calls = len(calls) - dense_calls
    assert 0 < passing_calls < dense_calls

    pipe = make()
    pipe.transformer.enable_cache(config(pipe))
    calls = count_calls(pipe)
    with chipsparse.enable(pipe, module.EXACT) as handle:
        found = generate(pipe, module)
        assert len(calls) == passing_calls
        assert "sparse" in actions(handle, handle.report.steps[0].branch)
        # What the cache passed over at a refresh is caught up with later.
        caught_up = " runs in full at sparse steps where a layer had recorded nothing since"
        assert all(caught_up in line for line in handle.report.fallbacks)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    assert torch.equal(generate(pipe, module), expected)

    pipe.transformer.disable_cache()
    with chipsparse.enable(pipe, module.EXACT) as handle:
        pipe.transformer.enable_cache(config(pipe))
        assert torch.equal(generate(pipe, module), found)
    pipe.transformer.disable_cache()
    assert torch.equal(generate(pipe, module), dense)


@pytest.mark.parametrize(
    ("model", "config"), [("wan", mag), ("flux", taylor_seer), slow("wan", pyramid)]
)
def test_layers_that_were_passed_over_run_sparse_too(model, config):
    """Also with caches in host memory, of which the layers that were passed over fetch nothing."""
    make, module = MODELS[model]
    pipe = make()
    dense = generate(pipe, module)
    pipe.transformer.enable_cache(config(pipe))
    with chipsparse.enable(pipe, module.SPARSE) as handle:
        found = generate(pipe, module)
        sparse = [record for record in handle.report.steps if record.action.value == "sparse"]
        layers = len(handle._adapters[0].self_attentions())
        assert max(len(record.fractions("attention")) for record in sparse) == layers
        assert min(len(record.fractions("attention")) for record in sparse) < layers
    assert 0 < (found - dense).norm() < 0.3 * dense.norm()
    hosted = module.SPARSE.override({"memory.offload": "always"})
    with chipsparse.enable(pipe, hosted) as handle:
        assert torch.equal(generate(pipe, module), found)
        assert handle.report.host_bytes > 0


def one_of_three_calls(pipe):
    """Counts the calls of both branches, and so computes each branch at every third step."""
    return pyramid(pipe, interval=3)


def one_at_a_time(pipe):
    """Passes over every other call of all blocks."""
    return mag(pipe, threshold=9.0, most=1)


@pytest.mark.parametrize(
    ("config", "part"), [(one_of_three_calls, "attention"), (one_at_a_time, "mlp")]
)
def test_a_refresh_that_a_layer_missed_is_made_up_for(config, part):
    """Not the first one alone: what a layer recorded before is not what its step should have."""
    pipe = tiny_wan_pipeline()
    pipe.transformer.enable_cache(config(pipe))
    changes = listed("DRSRRSS")
    with chipsparse.enable(pipe, wan.SPARSE.override(changes)) as handle:
        generate(pipe, wan)
        taken = {}
        for record in handle.report.steps:
            if record.branch == "cond":
                layers = [entry.action.value for entry in record.layers if entry.part == part]
                taken[record.step] = (record.action.value, set(layers))
    missed = [
        step for step, (action, layers) in taken.items() if action == "refresh" and not layers
    ]
    assert missed[-1] == 4
    following = [(action, layers) for step, (action, layers) in taken.items() if step > missed[-1]]
    caught_up = next((action, layers) for action, layers in following if layers)
    assert caught_up == ("sparse", {"refresh"})
    assert all(layers <= {"sparse", "refresh"} for _, layers in following)


@pytest.mark.parametrize("config", [first_block, slow(pyramid), sea])
def test_steps_are_skipped_under_a_cache_that_does_not_count_them(config):
    pipe = tiny_wan_pipeline()
    pipe.transformer.enable_cache(config(pipe))
    with chipsparse.enable(pipe, wan.EXACT.override(listed("DRSKSRS"))) as handle:
        found = generate(pipe, wan)
        assert actions(handle).count("skip") == 1
        assert torch.equal(generate(pipe, wan), found)
    pipe.transformer.disable_cache()
    dense = generate(pipe, wan)
    assert (found - dense).norm() < 0.1 * dense.norm()


# What is refused.


@pytest.mark.parametrize(
    ("config", "name", "skips"),
    [
        (mag, "MagCache", "DRSKSRS"),
        (taylor_seer, "TaylorSeer", "DKD"),
    ],
)
def test_a_cache_that_counts_steps_is_refused_where_steps_are_skipped(config, name, skips):
    pipe = tiny_wan_pipeline()
    with chipsparse.enable(pipe, wan.SPARSE.override(listed(skips))) as handle:
        pipe.transformer.enable_cache(config(pipe))
        for _ in range(2):
            with pytest.raises(ValueError, match=f"WanTransformer3DModel: {name} counts the"):
                generate(pipe, wan)
        assert handle.report.cache_bytes == 0
        pipe.transformer.disable_cache()
        generate(pipe, wan)
        assert "skip" in actions(handle)


def test_hooks_that_were_put_there_without_enable_cache_are_seen():
    pipe = tiny_flux_pipeline()
    assert why_refused(pipe.transformer, skips=True) is None
    apply_taylorseer_cache(pipe.transformer, taylor_seer(pipe))
    assert why_refused(pipe.transformer, skips=False) is None
    assert why_refused(pipe.transformer, skips=True).startswith("TaylorSeer counts")


def test_faster_cache_that_splits_the_batch_is_refused():
    """Alone it fails on these pipelines, too, which call each branch of the guidance by itself."""
    pipe = tiny_wan_pipeline()
    with chipsparse.enable(pipe, wan.SPARSE):
        pipe.transformer.enable_cache(faster(pipe, distilled=False))
        with pytest.raises(ValueError, match="FasterCache computes a part of the batch"):
            generate(pipe, wan)
    assert why_refused(pipe.transformer, skips=False) is not None


def test_nothing_is_refused_where_nothing_is_cached():
    pipe = tiny_wan_pipeline()
    pipe.transformer.enable_cache(taylor_seer(pipe))
    expected = generate(pipe, wan)
    with chipsparse.enable(pipe, SparsityConfig.dense()):
        assert torch.equal(generate(pipe, wan), expected)
