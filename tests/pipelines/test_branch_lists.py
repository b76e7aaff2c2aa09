"""Guidance branches with schedules of their own."""

import diffusers
import pytest
import torch

import chipsparse
from chipsparse import Branches, Listed, ScheduleConfig, Spread
from chipsparse.skip.outputs import HeldOutputs, flatten
from chipsparse.skip.session import SkipSession
from chipsparse.sparse.session import SparseSession
from tests.pipelines import small_sparse
from tests.pipelines.model_state import actions
from tests.pipelines.small_sparse import assert_close, generate
from tests.schedules import letters_of
from tests.tiny_models import FLOW, PROMPT, tiny_wan_pipeline

STEPS = 9
SMALL = {"prompt": PROMPT, "height": 32, "width": 32, "num_frames": 5, "max_sequence_length": 16}
CALL = {**SMALL, "num_inference_steps": STEPS}
EULER = diffusers.FlowMatchEulerDiscreteScheduler
SOLVERS = {
    "euler": lambda: EULER(shift=3.0),
    "unipc": lambda: diffusers.UniPCMultistepScheduler(**FLOW),
}


def with_form(form, *, config=small_sparse.SPARSE, **fields):
    return config.override({"schedule": ScheduleConfig(form, **fields)})


def run(pipe, config):
    with chipsparse.enable(pipe, config) as handle:
        return generate(pipe, CALL), handle


def corrected(handle):
    return {(each.branch, each.step) for each in handle.report.steps if each.corrected}


@pytest.mark.parametrize("solver", SOLVERS)
def test_equal_lists_of_all_branches_are_one_list(solver):
    """With sparse steps, skipped ones, forecasts and corrections, bit for bit."""
    pipe = tiny_wan_pipeline(scheduler=SOLVERS[solver]())
    for form in (Listed((1, 4, 6)), Listed((1, 4, 6), (2, 5, 8)), Spread(0.4)):
        expected, one = run(pipe, with_form(form, forecast=0.5))
        branches = Branches({"*": form, "uncond": form})
        found, handle = run(pipe, with_form(branches, forecast=0.5))
        assert torch.equal(found, expected)
        assert corrected(handle) == corrected(one) != set()


def test_branches_that_compute_every_step_are_the_stock_model():
    pipe = tiny_wan_pipeline()
    expected = generate(pipe, CALL)
    everything = Branches({"*": Spread(1.0), "uncond": Listed(tuple(range(STEPS)))})
    found, handle = run(pipe, with_form(everything))
    assert torch.equal(found, expected)
    assert handle.report.actions() == {"dense": STEPS}


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_skipped_branch_goes_on_with_its_own_outputs(share, monkeypatch):
    held = {}
    skipped = []
    hold = HeldOutputs.hold
    begin = SkipSession.begin

    def holding(self, branch, time, result, *, both=False):
        (tensor,), _ = flatten(result)
        held.setdefault(branch, []).append((time, tensor.clone()))
        hold(self, branch, time, result, both=both)

    def beginning(self, place, *arguments):
        decision = begin(self, place, *arguments)
        if decision.is_skipped:
            (made,), _ = flatten(decision.output)
            skipped.append((place.branch, place.time, made.clone()))
            *before, (last, new) = held[place.branch][-2:]
            expected = new
            for time, old in before:  # none where it has computed one step
                expected = new + share * (place.time - last) / (last - time) * (new - old)
            torch.testing.assert_close(made, expected)
        return decision

    monkeypatch.setattr(HeldOutputs, "hold", holding)
    monkeypatch.setattr(SkipSession, "begin", beginning)
    form = Branches({"*": Listed((1, 4, 6)), "uncond": Listed((2, 5))})
    _, handle = run(tiny_wan_pipeline(), with_form(form, forecast=share))
    assert letters_of(actions(handle, "cond")) == "DDKKDKDKK"
    assert letters_of(actions(handle, "uncond")) == "DKDKKDKKK"
    assert [branch for branch, *_ in skipped].count("cond") == 5
    assert [branch for branch, *_ in skipped].count("uncond") == 6


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    ("own", "steps"),
    [
        ((1, 4, 6), {2, 3, 5}),  # as the other branch
        ((1, 4), {2, 3}),  # at step 6 only one branch is computed
        ((1, 3, 4, 6), {5}),  # at step 3 likewise, and the interval from step 1 on is left as it is
        ((2, 5), set()),
    ],
)
def test_skipped_steps_are_corrected_where_all_branches_skip_between_full_steps(
    own,
    steps,
    solver,
):
    pipe = tiny_wan_pipeline(scheduler=SOLVERS[solver]())
    form = Branches({"*": Listed((1, 4, 6)), "uncond": Listed(own)})
    found, handle = run(pipe, with_form(form))
    assert corrected(handle) == {(branch, step) for branch in ("cond", "uncond") for step in steps}
    assert found.isfinite().all()
    plain, _ = run(pipe, with_form(form, correct=False))
    assert torch.equal(found, plain) is (not steps)


def test_a_branch_without_sparse_steps_has_no_caches(monkeypatch):
    """With all columns and neurons, sparse steps of the other are full ones but for rounding."""
    admitted = []
    admit = SparseSession._admit

    def admitting(self, name, *args, **kwargs):
        admitted.append(name)
        admit(self, name, *args, **kwargs)

    monkeypatch.setattr(SparseSession, "_admit", admitting)
    pipe = tiny_wan_pipeline()
    skips = {"uncond": Listed((3,))}
    sparse = Branches({"*": Listed((1, 4), "others"), **skips})
    found, handle = run(pipe, with_form(sparse, config=small_sparse.EXACT))
    assert letters_of(actions(handle, "cond")) == "DRSSRSSSS"
    assert letters_of(actions(handle, "uncond")) == "DKKDKKKKK"
    assert admitted == ["cond"]
    assert handle.report.fallbacks == []
    full = Branches({"*": Spread(1.0), **skips})
    expected, _ = run(pipe, with_form(full, config=small_sparse.EXACT))
    assert_close(found, expected)


def test_two_branches_with_sparse_lists_of_their_own():
    pipe = tiny_wan_pipeline()
    form = Branches({"*": Listed((1, 4), (2, 3, 5)), "uncond": Listed((2, 4), (3, 6, 7))})
    found, handle = run(pipe, with_form(form, config=small_sparse.EXACT))
    assert letters_of(actions(handle, "cond")) == "DRSSRSKKK"
    assert letters_of(actions(handle, "uncond")) == "DKRSRKSSK"
    computed = Branches({"*": Listed((1, 2, 3, 4, 5)), "uncond": Listed((2, 3, 4, 6, 7))})
    expected, _ = run(pipe, with_form(computed, config=small_sparse.EXACT))
    assert_close(found, expected)
    text = handle.report.plans["transformer"].describe()
    assert "*: 3 of 9 steps in full, as listed, 3 between them sparse" in text
    assert "uncond: 3 of 9 steps in full, as listed, 3 between them sparse" in text
