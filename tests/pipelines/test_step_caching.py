"""Skipped denoising steps, listed and by threshold, in real pipelines."""

import pytest
import torch

import chipsparse
from tests.pipelines import test_flux as flux
from tests.pipelines import test_wan as wan
from tests.pipelines.model_state import actions as action_names
from tests.tiny_models import tiny_flux_pipeline, tiny_wan_pipeline, tiny_wan_transformer
from tests.variants import slow_unless

STEPS = 12
MODELS = {"wan": (tiny_wan_pipeline, wan), "flux": (tiny_flux_pipeline, flux)}
OFF = {"attention.enabled": False, "mlp.enabled": False}


def actions(handle, branch="cond"):
    """Dense, Refresh, Sparse or sKip: a letter for each step."""
    letters = {"dense": "D", "refresh": "R", "sparse": "S", "skip": "K"}
    return "".join(letters[name] for name in action_names(handle, branch))


def records(handle, branch="cond"):
    return [record for record in handle.report.steps if record.branch == branch]


def predictions(handle, branch="cond"):
    return [record.predicted_change for record in records(handle, branch)]


def count_computed(transformer):
    """A list that grows with every call in which the model itself runs."""
    calls = []
    transformer.register_forward_hook(lambda *call: calls.append(call[2][0].clone()))
    return calls


def median_threshold(module, pipe, config=None, **call):
    """A threshold that about half of the steps fall below."""
    config = config or module.SPARSE
    with chipsparse.enable(pipe, config.override({"schedule.skip_threshold": 1e-9})) as handle:
        module.generate(pipe, num_inference_steps=STEPS, **call)
        assert "K" not in actions(handle)
        assert (
            "schedule.skip_threshold (1e-09) has no effect: no step was predicted to change the "
            "output by less"
        ) in handle.report.notes
        return sorted(each for each in predictions(handle) if each is not None)[4]


# Listed steps.


def test_listed_steps_that_must_be_computed_are_reported():
    pipe = tiny_wan_pipeline()
    config = wan.SPARSE.override({"schedule.skip_steps": [0, 1, 3]})
    with chipsparse.enable(pipe, config) as handle:
        for _ in range(2):
            wan.generate(pipe)
            assert actions(handle) == "DRSKSRS"
            (note,) = handle.report.notes
            assert note.startswith("skip_steps 0, 1 are computed: no step is skipped in the")


@pytest.mark.parametrize(
    ("skipped", "expected"),
    [(4, "DRSSKRS"), (6, "DRSSRSK")],
)
def test_a_listed_refresh_is_made_up_for(skipped, expected):
    pipe = tiny_wan_pipeline()
    schedule = {"schedule.skip_steps": [skipped], "schedule.refresh_every": 3}
    with chipsparse.enable(pipe, wan.SPARSE.override(schedule)) as handle:
        wan.generate(pipe)
        assert actions(handle) == actions(handle, "uncond") == expected


def test_listed_steps_in_a_batch_of_two_prompts():
    pipe = tiny_wan_pipeline()
    config = wan.EXACT.override({"schedule.skip_steps": [3, 4]})
    prompts = ["a red circle moves left", "a blue square grows"]
    with chipsparse.enable(pipe, config):
        both = wan.generate(pipe, prompts, guidance_scale=1.0)
        for index, prompt in enumerate(prompts):
            one = wan.generate(pipe, prompt, seed=index, guidance_scale=1.0)
            torch.testing.assert_close(both[index : index + 1], one, atol=2e-4, rtol=2e-4)


def test_an_expert_that_takes_over_computes_before_it_skips():
    pipe = tiny_wan_pipeline(transformer_2=tiny_wan_transformer(seed=9), boundary_ratio=0.9)
    config = wan.SPARSE.override({"schedule.skip_steps": [3, 4, 5, 6, 7, 8]})
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
    with chipsparse.enable(pipe, config.override({"schedule.skip_steps": [3, 5]})) as handle:
        calls = count_computed(pipe.transformer)
        found = module.generate(pipe)
        taken = "DDDKDKD"
        first = handle.report.steps[0].branch
        assert actions(handle, first) == taken
        assert handle.report.cache_bytes == 0
        assert not torch.equal(found, expected)
    branches = len({record.branch for record in handle.report.steps})
    assert len(calls) == 5 * branches


# By threshold.


@pytest.mark.parametrize("model", slow_unless(("flux",), MODELS))
def test_steps_of_little_change_are_skipped(model):
    make, module = MODELS[model]
    pipe = make()
    threshold = median_threshold(module, pipe)
    config = module.SPARSE.override({"schedule.skip_threshold": threshold})
    with chipsparse.enable(pipe, config) as handle:
        calls = count_computed(pipe.transformer)
        found = module.generate(pipe, num_inference_steps=STEPS)
        branches = {record.branch for record in handle.report.steps}
        taken = actions(handle)
        assert all(actions(handle, branch) == taken for branch in branches)
        assert taken[:2] == "DR"
        assert 2 <= taken.count("K") <= 9
        assert len(calls) == (STEPS - taken.count("K")) * len(branches)
        for record in records(handle):
            if record.action.value == "skip":
                assert record.predicted_change < threshold
            elif record.predicted_change is not None:
                assert record.predicted_change >= threshold
        assert torch.isfinite(found).all()
        assert torch.equal(module.generate(pipe, num_inference_steps=STEPS), found)
        assert handle.report.fallbacks == []
        assert "skip_threshold" not in str(handle.report.notes)


def test_the_prediction_is_the_rules():
    """Worked out anew from what went into the transformer and came out of it."""
    pipe = tiny_wan_pipeline()
    inputs, outputs = [], []

    def watch(_module, _args, kwargs, output):
        inputs.append(kwargs["hidden_states"].clone())
        outputs.append(output[0].clone())

    pipe.transformer.register_forward_hook(watch, with_kwargs=True)
    config = wan.SPARSE.override({"schedule.skip_threshold": 0.0})
    with chipsparse.enable(pipe, config) as handle:
        wan.generate(pipe, guidance_scale=1.0)
    found = predictions(handle)
    assert found[:2] == [None, None]
    assert actions(handle) == "DRSSSRS"
    for step in range(2, wan.STEPS):
        new = 4 if step == 6 else step - 1  # not from the sparse step 4 to the refresh
        rate = (outputs[new] - outputs[new - 1]).abs().mean()
        rate = rate / (inputs[new] - inputs[new - 1]).abs().mean()
        change = (inputs[step] - inputs[step - 1]).abs().mean()
        expected = rate * change / outputs[step - 1].abs().mean()
        assert found[step] == pytest.approx(expected.item(), rel=1e-5)


def test_a_threshold_of_everything_skips_all_but_every_fourth_step():
    pipe = tiny_wan_pipeline()
    config = wan.SPARSE.override({"schedule.skip_threshold": 1.0, "schedule.final_dense_steps": 1})
    with chipsparse.enable(pipe, config) as handle:
        wan.generate(pipe, num_inference_steps=STEPS)
        # Steps 5 and 9 were to be refreshes: the next computed steps are.
        expected = "DRKKKRKKKRKD"
        assert actions(handle) == actions(handle, "uncond") == expected
        assert predictions(handle)[5] is None
        assert predictions(handle) == predictions(handle, "uncond")


def test_a_refresh_that_the_threshold_skipped_is_made_up_for():
    pipe = tiny_wan_pipeline()
    changes = {
        "schedule.skip_threshold": 1.0,
        "schedule.max_skips": 1,
        "schedule.refresh_steps": [4, 8],
    }
    with chipsparse.enable(pipe, wan.SPARSE.override(changes)) as handle:
        wan.generate(pipe, num_inference_steps=STEPS)
        expected = "DRKSKRKSKRKS"
        assert actions(handle) == actions(handle, "uncond") == expected


def test_listed_and_other_steps_are_skipped_together():
    pipe = tiny_wan_pipeline()
    changes = {
        "schedule.skip_steps": [3],
        "schedule.skip_threshold": 1.0,
        "schedule.max_skips": 2,
        "schedule.dense_steps": [6],
    }
    with chipsparse.enable(pipe, wan.SPARSE.override(changes)) as handle:
        wan.generate(pipe)
        expected = "DRKKSKD"
        assert actions(handle) == expected
        assert predictions(handle)[3] is None


def test_each_expert_decides_for_itself():
    pipe = tiny_wan_pipeline(transformer_2=tiny_wan_transformer(seed=9), boundary_ratio=0.9)
    changes = {
        "schedule.skip_threshold": 1.0,
        "schedule.max_skips": 1,
        "schedule.refresh_steps": [],
    }
    with chipsparse.enable(pipe, wan.SPARSE.override(changes)) as handle:
        found = wan.generate(pipe, num_inference_steps=STEPS)
        taken = actions(handle)
        switch = taken.index("D", 1)
        assert taken[switch : switch + 4] == "DRKS"
        assert predictions(handle)[switch : switch + 2] == [None, None]
        assert taken == actions(handle, "uncond")
        assert torch.equal(wan.generate(pipe, num_inference_steps=STEPS), found)


def test_the_threshold_works_where_nothing_is_sparse():
    pipe = tiny_wan_pipeline()
    config = wan.SPARSE.override({**OFF, "schedule.skip_threshold": 1.0})
    with chipsparse.enable(pipe, config) as handle:
        wan.generate(pipe)
        assert actions(handle) == "DDKKKDK"
        assert handle.report.cache_bytes == 0


def test_a_threshold_of_nothing_changes_nothing():
    pipe = tiny_wan_pipeline()
    with chipsparse.enable(pipe, wan.SPARSE) as handle:
        expected = wan.generate(pipe)
        assert set(predictions(handle)) == {None}
    with chipsparse.enable(pipe, wan.SPARSE.override({"schedule.skip_threshold": 0.0})):
        assert torch.equal(wan.generate(pipe), expected)


def test_nothing_is_held_after_a_generation():
    pipe = tiny_wan_pipeline()
    for off in ({}, OFF):
        config = wan.SPARSE.override({**off, "schedule.skip_threshold": 1.0})
        with chipsparse.enable(pipe, config) as handle:
            session = handle._adapters[0].session
            held = []

            def look(_pipe, step, _t, tensors, session=session, held=held):
                held.append(len(session._generation.held))
                if step == wan.STEPS - 1:
                    step_cache = session._generation.step_cache
                    assert step_cache._output is step_cache._input is None
                return tensors

            wan.generate(pipe, callback_on_step_end=look)
            assert held == [2] * (wan.STEPS - 1) + [0]
