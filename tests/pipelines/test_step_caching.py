"""Skipped denoising steps in real pipelines."""

import pytest
import torch

import chipsparse
from tests.pipelines import test_flux as flux
from tests.pipelines import test_wan as wan
from tests.pipelines.model_state import actions as action_names
from tests.schedules import listed
from tests.tiny_models import tiny_flux_pipeline, tiny_wan_pipeline, tiny_wan_transformer
from tests.variants import slow_unless

STEPS = 12
MODELS = {"wan": (tiny_wan_pipeline, wan), "flux": (tiny_flux_pipeline, flux)}
OFF = {"attention.density": "dense", "mlp.density": "dense"}


def actions(handle, branch="cond"):
    """Dense, Refresh, Sparse or sKip: a letter for each step."""
    letters = {"dense": "D", "refresh": "R", "sparse": "S", "skip": "K"}
    return "".join(letters[name] for name in action_names(handle, branch))


def count_computed(transformer):
    """A list that grows with every call in which the model itself runs."""
    calls = []
    transformer.register_forward_hook(lambda *call: calls.append(call[2][0].clone()))
    return calls


def test_listed_steps_in_a_batch_of_two_prompts():
    pipe = tiny_wan_pipeline()
    config = wan.EXACT.override(listed("DRSKKRS"))
    prompts = ["a red circle moves left", "a blue square grows"]
    with chipsparse.enable(pipe, config):
        both = wan.generate(pipe, prompts, guidance_scale=1.0)
        for index, prompt in enumerate(prompts):
            one = wan.generate(pipe, prompt, seed=index, guidance_scale=1.0)
            torch.testing.assert_close(both[index : index + 1], one, atol=2e-4, rtol=2e-4)


def test_an_expert_that_takes_over_computes_before_it_skips():
    pipe = tiny_wan_pipeline(transformer_2=tiny_wan_transformer(seed=9), boundary_ratio=0.9)
    config = wan.SPARSE.override(listed("DRSKKKKKKRSS"))
    with chipsparse.enable(pipe, config) as handle:
        calls = [count_computed(pipe.transformer), count_computed(pipe.transformer_2)]
        wan.generate(pipe, num_inference_steps=STEPS, guidance_scale=1.0)
        taken = actions(handle)
    switch = taken.index("D", 1)
    assert switch in (3, 4)
    assert taken[switch:] == "D" + "K" * (8 - switch) + "RSS"
    assert [len(each) for each in calls] == [3, 4]


@pytest.mark.parametrize("model", slow_unless(("wan",), MODELS))
def test_steps_are_skipped_where_nothing_is_sparse(model):
    """Every output that the scheduler gets is one that the unpatched model computed."""
    make, module = MODELS[model]
    pipe = make()
    expected = module.generate(pipe)
    config = module.SPARSE.override(OFF)
    with chipsparse.enable(pipe, config):
        assert torch.equal(module.generate(pipe), expected)
    with chipsparse.enable(pipe, config.override(listed("DDDKDKD"))) as handle:
        calls = count_computed(pipe.transformer)
        found = module.generate(pipe)
        taken = "DDDKDKD"
        first = handle.report.steps[0].branch
        assert actions(handle, first) == taken
        assert handle.report.cache_bytes == 0
        assert not torch.equal(found, expected)
    branches = len({record.branch for record in handle.report.steps})
    assert len(calls) == 5 * branches


def test_nothing_is_held_after_a_generation():
    pipe = tiny_wan_pipeline()
    for off in ({}, OFF):
        config = wan.SPARSE.override({**off, **listed("DRSKSKR")})
        with chipsparse.enable(pipe, config) as handle:
            session = handle._adapters[0].session
            held = []

            def look(_pipe, step, _t, tensors, session=session, held=held):
                held.append(len(session._generation.held))
                return tensors

            wan.generate(pipe, callback_on_step_end=look)
            assert held == [2] * (wan.STEPS - 1) + [0]
