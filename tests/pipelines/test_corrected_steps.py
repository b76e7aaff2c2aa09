"""Skipped steps that are put right once the next full step is known, in real pipelines."""

import gc

import diffusers
import pytest
import torch

import chipsparse
from chipsparse.report.generation import GenerationReport
from chipsparse.skip.correction import SkippedInterval
from chipsparse.skip.scheduler_steps import why_not_corrected
from tests.pipelines import small_sparse
from tests.pipelines.model_state import actions
from tests.pipelines.test_families import FAMILIES, arguments_of, as_batch
from tests.tiny_models import FLOW, tiny_flux_pipeline, tiny_wan_pipeline

# Of diffusers' older schedulers, which mix tensors and NumPy arrays.
pytestmark = pytest.mark.filterwarnings("ignore:.*__array:DeprecationWarning")

STEPS = 9
LISTED = small_sparse.SPARSE.override(
    {"schedule": {"listed": {"full": [0, 1, 4, 6]}}},
)
HELD = LISTED.override({"schedule.correct": False})
NOT_CORRECTED = "skipped steps are not corrected: "
EULER = diffusers.FlowMatchEulerDiscreteScheduler
UNIPC = diffusers.UniPCMultistepScheduler
DPM = diffusers.DPMSolverMultistepScheduler


def generate(pipe, name, variant=None, **changes):
    call = arguments_of(name, variant)
    return as_batch(small_sparse.generate(pipe, call, num_inference_steps=STEPS, **changes))


def notes(handle):
    return [note for note in handle.report.notes if note.startswith(NOT_CORRECTED[:10])]


def corrected(handle):
    steps = handle.report.steps
    return {
        branch: [each.step for each in steps if each.branch == branch and each.corrected]
        for branch in {each.branch for each in steps}
    }


# Guidance is a branch or in the batch; Mochi's levels rise; a second expert takes over; sound has
# copies of the scheduler, which is a solver of several steps in Cosmos; tokens have own timesteps.
@pytest.mark.parametrize(
    ("name", "variant", "schedulers"),
    [
        ("flux", None, 1),
        ("wan 2.1", None, 1),
        ("mochi", "guided", 1),
        ("ltx-2", None, 2),
        ("ltx conditions", None, 1),
        ("wan 2.2 two experts", None, 1),
        ("cosmos 3", "sound, prompts of two lengths", 2),
    ],
)
def test_skipped_steps_before_the_last_full_are_corrected(name, variant, schedulers, monkeypatch):
    told = []
    correct = GenerationReport.correct
    monkeypatch.setattr(
        GenerationReport,
        "correct",
        lambda report, steps: (told.append(steps), correct(report, steps)),
    )
    pipe = FAMILIES[name].make()
    with chipsparse.enable(pipe, LISTED) as handle:
        found = generate(pipe, name, variant)
        if "experts" not in name:
            assert told == [range(2, 4)] * schedulers + [range(5, 6)] * schedulers
        for branch, steps in corrected(handle).items():
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


def intervals():
    return [each for each in gc.get_objects() if type(each) is SkippedInterval]


def test_a_call_that_breaks_off_in_an_interval_leaves_nothing():
    pipe = tiny_flux_pipeline()
    expected = generate(pipe, "flux")
    kind = type(pipe.scheduler)
    attributes = set(vars(pipe.scheduler))

    def look(pipe, step, _time, tensors):
        assert vars(pipe.scheduler).keys() == attributes
        if step == broken:
            assert len(intervals()) == 1
            raise InterruptedError
        return tensors

    with chipsparse.enable(pipe, LISTED):
        assert type(pipe.scheduler) == kind  # noqa: E721 - as some pipelines compare it
        broken = None
        first = generate(pipe, "flux", callback_on_step_end=look)
        broken = 3  # in an interval
        with pytest.raises(InterruptedError):
            generate(pipe, "flux", callback_on_step_end=look)
        assert intervals() == []
        assert torch.equal(generate(pipe, "flux"), first)
    assert type(pipe.scheduler) is kind
    assert torch.equal(generate(pipe, "flux"), expected)


@pytest.mark.parametrize(
    ("scheduler", "reason"),
    [
        (EULER(stochastic_sampling=True), "adds noise"),
        (DPM(algorithm_type="sde-dpmsolver++", **FLOW), "adds noise"),
        (UNIPC(), "does not follow a straight flow"),
        (UNIPC(prediction_type="flow_prediction"), "does not follow a straight flow"),
        (UNIPC(solver_p=DPM(**FLOW), **FLOW), "has another solver in it"),
        (diffusers.EulerDiscreteScheduler(), "is none of the solvers that can go over steps again"),
    ],
)
def test_schedulers_that_cannot_go_again(scheduler, reason):
    assert why_not_corrected(scheduler) == f"{type(scheduler).__name__} {reason}"


class Lost(EULER):
    """Does not tell its step, and returns a list."""

    def step(self, model_output, timestep, sample, **_):
        place = int((self.timesteps == timestep).nonzero()[0])
        return [sample + (self.sigmas[place + 1] - self.sigmas[place]) * model_output]


@pytest.mark.parametrize(
    ("name", "make", "scheduler", "said"),
    [
        ("wan 2.1", tiny_wan_pipeline, UNIPC(thresholding=True, **FLOW), f"{UNIPC.__name__} clips"),
        ("wan 2.1", tiny_wan_pipeline, Lost(shift=3.0), ""),
    ],
)
def test_skips_with_a_scheduler_that_cannot_go_again_are_noted_once(name, make, scheduler, said):
    pipe = make(scheduler=scheduler)
    with chipsparse.enable(pipe, HELD) as handle:
        expected = generate(pipe, name)
        assert notes(handle) == []
    with chipsparse.enable(pipe, LISTED) as handle:
        for _ in range(2):
            assert torch.equal(generate(pipe, name), expected)
            assert handle.report.actions()["skip"] == 5
            (note,) = notes(handle)
            assert note.startswith(f"{NOT_CORRECTED}{said}")
            assert not any(corrected(handle).values())
    with chipsparse.enable(pipe, LISTED.override({"schedule.listed.sparse": "others"})) as handle:
        generate(pipe, name)
        assert notes(handle) == []


@pytest.mark.parametrize("shift", [3.0, 7.0])
def test_correction_is_off_where_intervals_are_too_long_for_the_flow_shift(shift):
    pipe = tiny_flux_pipeline(scheduler=EULER(shift=shift))
    is_off = shift > 5.5
    with chipsparse.enable(pipe, LISTED.override({"schedule.listed.full": [0, 4]})) as handle:
        generate(pipe, "flux")
    reason = "only 2 of 9 steps are computed, too few of them for a flow shift that is so large"
    assert notes(handle) == ([NOT_CORRECTED + reason] if is_off else [])
    assert any(corrected(handle).values()) != is_off
