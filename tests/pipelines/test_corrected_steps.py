"""Skipped steps that are put right once the next full step is known, in real pipelines."""

import copy

import diffusers
import pytest
import torch

import chipsparse
from chipsparse.report.generation import GenerationReport
from chipsparse.session import Session
from tests.pipelines import small_sparse
from tests.pipelines.model_state import actions
from tests.pipelines.small_sparse import assert_close
from tests.pipelines.test_families import FAMILIES, arguments_of, as_batch
from tests.tiny_models import random, tiny_flux_pipeline, tiny_wan_pipeline

# Of diffusers' older schedulers, which mix tensors and NumPy arrays.
pytestmark = pytest.mark.filterwarnings("ignore:.*__array:DeprecationWarning")

STEPS = 9
LISTED = small_sparse.SPARSE.override(
    {
        "schedule.refresh_every": 10,
        "schedule.full_steps": [0, 1, 4, 6],
        "schedule.between": "none",
    }
)
HELD = LISTED.override({"schedule.correct": False})
NOT_CORRECTED = "skipped steps are not corrected: "
# Guidance is a branch or in the batch; Mochi's levels rise; a second expert takes over; sound has
# copies of the scheduler, which is a solver of several steps in Cosmos; tokens have own timesteps.
CALLS = [
    ("flux", None),
    ("wan 2.1", None),
    ("mochi", "guided"),
    ("ltx-2", None),
    ("ltx conditions", None),
    ("wan 2.2 two experts", None),
    ("cosmos 3", "sound"),
]
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
UNCORRECTED = {
    "noise": (
        tiny_flux_pipeline,
        diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, stochastic_sampling=True),
        "FlowMatchEulerDiscreteScheduler adds noise",
    ),
    "noise of several steps": (
        tiny_wan_pipeline,
        diffusers.DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++", **FLOW),
        "DPMSolverMultistepScheduler adds noise",
    ),
    "no flow": (
        tiny_wan_pipeline,
        diffusers.UniPCMultistepScheduler(),
        "UniPCMultistepScheduler does not follow a straight flow",
    ),
    "levels of no flow": (
        tiny_wan_pipeline,
        diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction"),
        "UniPCMultistepScheduler does not follow a straight flow",
    ),
    "a solver in a solver": (
        tiny_wan_pipeline,
        diffusers.UniPCMultistepScheduler(
            solver_p=diffusers.DPMSolverMultistepScheduler(**FLOW), **FLOW
        ),
        "UniPCMultistepScheduler has another solver in it",
    ),
    "not known": (
        tiny_wan_pipeline,
        diffusers.EulerDiscreteScheduler(),
        "EulerDiscreteScheduler is none of the solvers that can go over steps again",
    ),
}


def generate(pipe, name, variant=None, **changes):
    call = arguments_of(name, variant)
    return as_batch(small_sparse.generate(pipe, call, num_inference_steps=STEPS, **changes))


def notes(handle):
    return [note for note in handle.report.notes if note.startswith(NOT_CORRECTED[:10])]


def corrected(handle):
    return {
        branch: [
            each.step for each in handle.report.steps if each.branch == branch and each.corrected
        ]
        for branch in {each.branch for each in handle.report.steps}
    }


@pytest.mark.parametrize(("name", "variant"), CALLS)
def test_skipped_steps_before_the_last_full_one_are_corrected(name, variant):
    pipe = FAMILIES[name].make()
    with chipsparse.enable(pipe, LISTED) as handle:
        found = generate(pipe, name, variant)
        marked = corrected(handle)
        for branch, steps in marked.items():
            made = actions(handle, branch)
            assert made[6:] == ["dense", "skip", "skip"]
            assert steps == [step for step in range(6) if made[step] == "skip"] != []
        assert torch.equal(generate(pipe, name, variant), found)
        assert notes(handle) == []
    with chipsparse.enable(pipe, HELD) as handle:
        held = generate(pipe, name, variant)
        assert not any(corrected(handle).values())
        assert found.shape == held.shape
        assert not torch.equal(found, held)


def test_sparse_steps_are_not_marked_and_end_no_gap():
    pipe = FAMILIES["wan 2.1"].make()
    with chipsparse.enable(pipe, LISTED.override({"schedule.sparse_steps": [3, 8]})) as handle:
        generate(pipe, "wan 2.1")
        assert actions(handle).count("sparse") == 2
        assert corrected(handle) == {"cond": [2, 5], "uncond": [2, 5]}


@pytest.mark.parametrize(("name", "variant"), [("ltx-2", None), ("cosmos 3", "sound")])
def test_the_steps_of_a_copied_scheduler_are_corrected_too(name, variant, monkeypatch):
    told, correct = [], GenerationReport.correct
    monkeypatch.setattr(
        GenerationReport,
        "correct",
        lambda report, steps: (told.append(steps), correct(report, steps)),
    )
    with chipsparse.enable(pipe := FAMILIES[name].make(), LISTED):
        generate(pipe, name, variant)
    assert told == [range(2, 4)] * 2 + [range(5, 6)] * 2


def test_steps_that_the_threshold_skips():
    pipe = FAMILIES["flux"].make()
    config = small_sparse.SPARSE.override({"schedule.skip_threshold": 1.0})
    with chipsparse.enable(pipe, config) as handle:
        generate(pipe, "flux")
        ((branch, steps),) = corrected(handle).items()
        made = actions(handle, branch)
    last = max(step for step, action in enumerate(made) if action in ("dense", "refresh"))
    assert steps == [step for step in range(last) if made[step] == "skip"] != []


def test_the_latents_are_the_solvers_with_clean_latents_along_a_line(monkeypatch):
    """Euler's method in float64, with what the transformer returned at the steps in full."""
    outputs, end = {}, Session.end

    def watched(session, output, **more):
        outputs[session.state.context.step] = output.double()
        end(session, output, **more)

    monkeypatch.setattr(Session, "end", watched)
    pipe = FAMILIES["flux"].make()
    with chipsparse.enable(pipe, LISTED):
        start = random(*generate(pipe, "flux").shape, seed=1)
        found = generate(pipe, "flux", latents=start)
    levels, full = pipe.scheduler.sigmas.double().tolist(), [0, 1, 4, 6]
    predicted, latents = start.double(), start.double()
    last = clean = None
    for step in range(STEPS):
        if step in full:
            before, clean = clean, predicted - levels[step] * outputs[step]
            for skipped in range(last + 1 if step else step, step):
                share = (levels[skipped] - levels[last]) / (levels[step] - levels[last])
                line = before + share * (clean - before)
                latents = line + levels[skipped + 1] / levels[skipped] * (latents - line)
            clean = clean + (1 - levels[step]) * (latents - predicted)
            latents = clean + levels[step + 1] / levels[step] * (latents - clean)
            predicted, last = latents, step
        else:
            predicted = predicted + (levels[step + 1] - levels[step]) * outputs[last]
    assert_close(found.double(), predicted)


@pytest.mark.parametrize("name", ["flux", "wan 2.1"])
def test_a_call_that_breaks_off_in_a_gap_leaves_nothing(name):
    pipe = FAMILIES[name].make()
    expected, kind = generate(pipe, name), type(pipe.scheduler)
    stock = copy.deepcopy(pipe.scheduler)

    def look(pipe, step, _time, tensors):
        assert vars(pipe.scheduler).keys() == vars(stock).keys()
        if step == broken:
            raise InterruptedError
        return tensors

    with chipsparse.enable(pipe, LISTED):
        broken = None
        first = generate(pipe, name, callback_on_step_end=look)
        broken = 3  # in a gap
        with pytest.raises(InterruptedError):
            generate(pipe, name, callback_on_step_end=look)
        assert pipe.scheduler.step._call._gap is None
        assert torch.equal(generate(pipe, name), first)
    assert type(pipe.scheduler) is kind
    assert torch.equal(generate(pipe, name), expected)


@pytest.mark.parametrize("case", UNCORRECTED)
def test_a_scheduler_that_cannot_go_again_is_noted_once(case):
    make, scheduler, reason = UNCORRECTED[case]
    pipe, name = make(scheduler=scheduler), "flux" if make is tiny_flux_pipeline else "wan 2.1"
    with chipsparse.enable(pipe, HELD) as handle:
        expected = generate(pipe, name)
        assert notes(handle) == []
    with chipsparse.enable(pipe, LISTED) as handle:
        for _ in range(2):
            assert torch.equal(generate(pipe, name), expected)
            assert notes(handle) == [NOT_CORRECTED + reason]
            assert not any(corrected(handle).values())


@pytest.mark.parametrize("scheduler", [None, UNCORRECTED["noise"][1]], ids=["euler", "noise"])
@pytest.mark.parametrize(
    "config",
    [
        LISTED.override({"schedule.between": "all"}),
        small_sparse.SPARSE.override({"schedule.skip_threshold": 0.0}),
    ],
    ids=["listed", "by threshold"],
)
def test_where_nothing_is_skipped_nothing_is_corrected(config, scheduler):
    pipe = tiny_flux_pipeline(**({} if scheduler is None else {"scheduler": scheduler}))
    found = []
    for correct in (True, False):
        with chipsparse.enable(pipe, config.override({"schedule.correct": correct})) as handle:
            found.append(generate(pipe, "flux"))
            assert set(handle.report.actions()) == {"dense", "refresh", "sparse"}
            assert not any(corrected(handle).values())
            assert notes(handle) == []
    assert torch.equal(*found)
