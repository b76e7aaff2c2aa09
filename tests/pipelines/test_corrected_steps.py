"""Skipped steps that are put right once the next full step is known, in real pipelines."""

import contextlib
import copy
import pickle
from types import SimpleNamespace

import diffusers
import pytest
import torch

import chipsparse
from chipsparse.pipelines.corrected_steps import StepCorrection
from chipsparse.plan import Action
from chipsparse.report.generation import GenerationReport, StepRecord
from chipsparse.session import Session
from tests.pipelines import small_sparse
from tests.pipelines.model_state import actions
from tests.pipelines.small_sparse import assert_close
from tests.pipelines.test_families import FAMILIES, arguments_of, as_batch
from tests.tiny_models import random, tiny_flux_pipeline, tiny_wan_pipeline
from tests.variants import slow_unless

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
    with chipsparse.enable(pipe, LISTED.override({"schedule.between": [3, 8]})) as handle:
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
def test_where_nothing_is_skipped_nothing_is_corrected(scheduler):
    config = LISTED.override({"schedule.between": "all"})
    pipe = tiny_flux_pipeline(**({} if scheduler is None else {"scheduler": scheduler}))
    found = []
    for correct in (True, False):
        with chipsparse.enable(pipe, config.override({"schedule.correct": correct})) as handle:
            found.append(generate(pipe, "flux"))
            assert set(handle.report.actions()) == {"dense", "refresh", "sparse"}
            assert not any(corrected(handle).values())
            assert notes(handle) == []
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("taken", "kind"),
    [
        (("skip", "skip"), "reused"),
        (("skip", "dense"), None),
        (("dense", "skip"), None),
        (("sparse", "dense"), "sparse"),
        (("refresh", "dense"), "full"),
    ],
)
def test_how_a_step_of_two_branches_came_about(taken, kind):
    """Where one of them was skipped and the other one computed, it is no part of a gap."""
    report, plan = GenerationReport(), SimpleNamespace(corrects_any=True)
    for branch, action in zip(("cond", "uncond"), taken, strict=True):
        report.steps.append(StepRecord(3, 9, branch, Action(action), generation=1, plan=plan))
    made = StepCorrection(report, lambda: False)._made()
    assert (None if made is None else made.kind) == kind
    assert made is None or (made.step, made.branches) == (3, {"cond", "uncond"})


# What else users do to latents and schedulers, at each kind of step.

# Steps 1, 2, 3 and 4 are a refresh, skipped, sparse and dense.
MIXED = LISTED.override({"schedule.between": [3, 8]})
KINDS = {"dense": 0, "refresh": 1, "skip": 2, "sparse": 3}
ADDED = 2.0
# Families whose pipelines call back behind each step, by a scheduler that can be followed.
EDITED = ["flux", "wan 2.1", "qwen-image", "hunyuan video", "ltx", "mochi", "sd3", "z-image"]


def adding(at):
    """Options of a call in which a callback adds to the latents behind a step."""

    def end(_pipe, step, _time, tensors):
        return {"latents": tensors["latents"] + ADDED} if step == at else {}

    return {"callback_on_step_end": end}


@contextlib.contextmanager
def own_step(scheduler, at):
    """A step of the user's own on the scheduler, which adds to the latents at a step."""
    inner = scheduler.step

    def step(*args, **kwargs):
        here = scheduler.step_index or 0
        stepped = inner(*args, **kwargs)
        if here == at:
            stepped[0].add_(ADDED)
        return stepped

    scheduler.step = step
    yield
    del scheduler.step


def moved(pipe, name, config, at, who):
    """How far what a user adds behind a step moves the mean of the result, and the report."""
    with chipsparse.enable(pipe, config) as handle:
        plain = generate(pipe, name)
        if who == "step":
            with own_step(pipe.scheduler, at):
                found = generate(pipe, name)
        else:
            found = generate(pipe, name, **adding(at))
        assert actions(handle, handle.report.steps[0].branch)[:4] == list(KINDS)
        assert any(corrected(handle).values()) == config.schedule.correct
    return (found - plain).mean().item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("who", ["callback", "step"])
@pytest.mark.parametrize("name", slow_unless(["flux"], EDITED))
def test_what_users_add_to_the_latents_moves_the_result_as_much_corrected_or_not(name, who, kind):
    pipe = FAMILIES[name].make()
    without = MIXED.override({"schedule.correct": False})
    expected = moved(pipe, name, without, KINDS[kind], who)
    found = moved(pipe, name, MIXED, KINDS[kind], who)
    assert found == pytest.approx(expected, rel=0.1)
    assert abs(expected) > 0.2


class Passing(diffusers.FlowMatchEulerDiscreteScheduler):
    """Hands its arguments on, as a user may write it."""

    def step(self, *args, **kwargs):
        return super().step(*args, **kwargs)


@pytest.mark.parametrize("correct", [True, False])
def test_a_scheduler_of_a_subclass_gives_the_same_bits(correct):
    config = MIXED.override({"schedule.correct": correct})
    found = []
    for kind in (diffusers.FlowMatchEulerDiscreteScheduler, Passing):
        pipe = tiny_flux_pipeline(scheduler=kind(shift=3.0))
        with chipsparse.enable(pipe, config) as handle:
            found.append(generate(pipe, "flux"))
        assert any(corrected(handle).values()) == correct
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", slow_unless(["flux"], ["flux", "wan 2.1"]))
def test_copies_that_users_step_leave_the_pipelines_scheduler_alone(name, kind):
    pipe = FAMILIES[name].make()
    made = (copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each)))
    stock, seen = type(pipe.scheduler), []

    def look(pipe, step, time, tensors):
        if step == KINDS[kind]:
            for copied in [make(pipe.scheduler) for make in made]:
                assert type(copied) is stock
                before = pipe.scheduler.step_index
                latents = tensors["latents"]
                seen.append(copied.step(latents, pipe.scheduler.timesteps[before], latents)[0])
                assert (copied.step_index, pipe.scheduler.step_index) == (before + 1, before)
        return tensors

    with chipsparse.enable(pipe, MIXED):
        expected = generate(pipe, name)
        assert torch.equal(generate(pipe, name, callback_on_step_end=look), expected)
    assert len(seen) == 3
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("solver", [None, 2, 3], ids=["euler", "unipc", "unipc of order 3"])
def test_outputs_of_half_precision_are_corrected(dtype, solver):
    """Outputs are narrower than latents, and what solvers keep is as these."""
    scheduler = None
    if solver is not None:
        scheduler = diffusers.UniPCMultistepScheduler(
            solver_order=solver, disable_corrector=[0, 1, 2, 3], **FLOW
        )
    pipe = tiny_wan_pipeline(**({} if scheduler is None else {"scheduler": scheduler}))
    with chipsparse.enable(pipe, LISTED):
        expected = generate(pipe, "wan 2.1")
    pipe.transformer.to(dtype)
    with chipsparse.enable(pipe, LISTED) as handle:
        found = generate(pipe, "wan 2.1")
        assert corrected(handle) == {"cond": [2, 3, 5], "uncond": [2, 3, 5]}
    assert small_sparse.error(found.float(), expected) < 0.05


def test_a_gap_is_freed_before_the_latents_are_decoded(monkeypatch):
    pipe, held = FAMILIES["flux"].make(), []
    decode = pipe.vae.decode

    def watched(*args, **kwargs):
        held.append(pipe.scheduler.step._call._gap)
        return decode(*args, **kwargs)

    monkeypatch.setattr(pipe.vae, "decode", watched)
    with chipsparse.enable(pipe, LISTED.override({"schedule.full_steps": [0, 1, 4, 6, 8]})):
        generate(pipe, "flux", output_type="pt")
    assert held == [None]


@pytest.mark.parametrize("shift", [3.0, 7.0])
def test_correction_is_off_where_gaps_are_too_long_for_the_flow_shift(shift):
    pipe = tiny_flux_pipeline(scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=shift))
    config = LISTED.override({"schedule.full_steps": [0, 4]})
    with chipsparse.enable(pipe, config) as handle:
        generate(pipe, "flux")
    is_off = shift > 5.5
    reason = "only 2 of 9 steps are computed, too few of them for a flow shift that is so large"
    assert notes(handle) == ([NOT_CORRECTED + reason] if is_off else [])
    assert any(corrected(handle).values()) != is_off


def test_a_solver_that_is_reset_in_a_gap_goes_on():
    scheduler = diffusers.DPMSolverMultistepScheduler(**FLOW)
    pipe = tiny_wan_pipeline(scheduler=scheduler)

    def reset(pipe, step, _time, tensors):
        if step == 2:
            pipe.scheduler.model_outputs, pipe.scheduler.lower_order_nums = [None] * 2, 0
        return tensors

    with chipsparse.enable(pipe, LISTED) as handle:
        generate(pipe, "wan 2.1", callback_on_step_end=reset)
        assert corrected(handle)["cond"] == [5]


def test_an_interrupted_generation_has_no_note():
    pipe = FAMILIES["flux"].make()

    def interrupt(pipe, step, _time, tensors):
        pipe._interrupt = step == 2
        return tensors

    with chipsparse.enable(pipe, LISTED) as handle:
        generate(pipe, "flux", callback_on_step_end=interrupt)
        assert actions(handle, handle.report.steps[0].branch) == ["dense", "dense", "skip"]
        assert notes(handle) == []


class Lost(diffusers.FlowMatchEulerDiscreteScheduler):
    """Does not tell its step, and returns a list."""

    def step(self, model_output, timestep, sample, **_):
        place = int((self.timesteps == timestep).nonzero()[0])
        return [sample + (self.sigmas[place + 1] - self.sigmas[place]) * model_output]


def test_a_step_that_does_not_tell_its_number_is_noted():
    pipe = tiny_wan_pipeline(scheduler=Lost(shift=3.0))
    with chipsparse.enable(pipe, LISTED) as handle:
        generate(pipe, "wan 2.1")
    assert handle.report.actions()["skip"] == 5
    assert len(notes(handle)) == 1
    assert not any(corrected(handle).values())


def test_a_scheduler_with_a_wrapped_step_counts_as_the_stock_one():
    """Some pipelines compare its class."""
    pipe = FAMILIES["flux"].make()
    with chipsparse.enable(pipe, LISTED):
        assert type(pipe.scheduler) == diffusers.FlowMatchEulerDiscreteScheduler  # noqa: E721
