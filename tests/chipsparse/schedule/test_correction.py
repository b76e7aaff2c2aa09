"""Skipped steps that are put right, by real schedulers in a loop without a transformer."""

import copy
import inspect
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch

from chipsparse.schedule.correction import CorrectedSteps, Made, Prediction, between, latents_of
from chipsparse.schedule.wrapped_step import wrapped_step
from tests.tiny_models import random

# Of diffusers' older schedulers, which mix tensors and NumPy arrays.
pytestmark = pytest.mark.filterwarnings("ignore:.*__array:DeprecationWarning")

FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
EULERS = {
    "euler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    "euler, rising": lambda: diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
    "euler, terminal": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift_terminal=0.1),
}
SCHEDULERS = {
    **EULERS,
    "unipc": lambda: diffusers.UniPCMultistepScheduler(**FLOW),
    "unipc of order 3": lambda: diffusers.UniPCMultistepScheduler(solver_order=3, **FLOW),
    "dpm": lambda: diffusers.DPMSolverMultistepScheduler(**FLOW),
    "dpm of order 3": lambda: diffusers.DPMSolverMultistepScheduler(solver_order=3, **FLOW),
}
SHORT = {  # their last level is not that of clean latents
    "deis": lambda: diffusers.DEISMultistepScheduler(**FLOW),
    "unipc": lambda: diffusers.UniPCMultistepScheduler(final_sigmas_type="sigma_min", **FLOW),
    "dpm": lambda: diffusers.DPMSolverMultistepScheduler(final_sigmas_type="sigma_min", **FLOW),
}
each_scheduler = pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
each_euler = pytest.mark.parametrize("make", EULERS.values(), ids=EULERS)
# Full steps, sparse ones and skipped ones.
KINDS = {"F": "full", "S": "sparse", "K": "reused"}
LISTS = ("FKKFFKKKFK", "FFKFKKKKFF", "FKKKKKKKKFF", "FFFFFKKKKK", "FKSKFKKSSFKS")
BOTH, ONE = frozenset({"cond", "uncond"}), frozenset({"cond"})
START, BASE, SLOPE, BEND = (random(2, 6, 4, seed=seed) for seed in range(4))


def curved(latents, level, _distance=None):
    """Its predictions are on no line."""
    return torch.sin(2 * latents + 5 * level) + latents


def straight(latents, level, distance):
    """Its predictions of the clean latents are on a line, wherever the latents are."""
    return (latents - BASE - SLOPE * level) / distance


def following(make, count):
    """Likewise along the dense path; off it they follow the latents by the share that is clean."""
    path = {}

    def watched(latents, level, distance):
        path[float(level)] = latents
        return straight(latents, level, distance)

    Loop(make()).run("F" * count, watched)

    def followed(latents, level, distance):
        off = (1 - abs(distance)) * (latents - path[float(level)])
        return straight(latents, level, distance) - off / distance

    return followed


def unknown(*_made):
    """With which nothing is corrected."""


class Loop:
    """A pipeline's, with the steps of a scheduler that puts skipped ones right."""

    def __init__(self, scheduler):
        self.scheduler, self.now, self.told = scheduler, None, []
        self.step = CorrectedSteps(scheduler, scheduler.step, lambda: self.now, self.told.extend)

    def run(self, letters, model, *, made=Made, before=None, call=None, start=START):
        """The latents behind each step."""
        self.scheduler.set_timesteps(len(letters))
        clean_level = float(self.scheduler.config.get("invert_sigmas", False))
        latents, output, found = start, None, []
        for step, letter in enumerate(letters):
            if before is not None:
                latents = before(self.scheduler, step, latents)
            self.now, level = made(step, KINDS[letter], BOTH), self.scheduler.sigmas[step]
            if letter != "K":
                output = model(latents.float(), level, level - clean_level).to(latents.dtype)
            given = output[: len(latents)], self.scheduler.timesteps[step], latents
            options = {"return_dict": False} if call is None else call(step)
            latents = latents_of(self.step(*given, **options))
            assert self.scheduler.step_index == step + 1
            found.append(latents.clone())
        return found


def by_hand(latents, levels, letters, added=None):
    """The latents behind each step of Euler's method with the curved model, in float64.

    Args:
        latents: at the start.
        levels: of the steps, and that of clean latents.
        letters: of the steps.
        added: what a pipeline adds to the latents before a full step.
    """
    distances = [level - levels[-1] for level in levels]
    found, latents, added, predictions = [], latents.double(), added or {}, {}
    full = behind_full = velocity = clean = None
    for step, letter in enumerate(letters):
        latents = latents + added.get(step, 0)
        if letter != "K":
            velocity = curved(latents, levels[step])
            clean = predictions[levels[step]] = latents - distances[step] * velocity
        if letter == "F":
            if full is not None:
                led, latents = latents, behind_full
                for skipped in range(full + 1, step):
                    line = interpolated(predictions, levels[skipped])
                    share = distances[skipped + 1] / distances[skipped]
                    latents = line + share * (latents - line)
                latents = latents + added.get(step, 0)
                clean = clean + (1 - abs(distances[step])) * (latents - led)
                predictions = {levels[step]: clean}
            latents = clean + distances[step + 1] / distances[step] * (latents - clean)
            behind_full, full, predictions = latents, step, {levels[step]: clean}
        else:
            latents = latents + (levels[step + 1] - levels[step]) * velocity
        found.append(latents)
    return found


def interpolated(values, place):
    places = sorted(values)
    hats = zip(places, np.eye(len(places)), strict=True)
    return sum(np.interp(place, places, hat) * values[each] for each, hat in hats)


def levels_of(make, letters):
    scheduler = make()
    scheduler.set_timesteps(len(letters))
    return scheduler.sigmas.double().tolist()


def before_last_full(letters):
    return [step for step in range(letters.rindex("F")) if letters[step] != "F"]


def furthest(found, expected):
    pairs = zip(found, expected, strict=True)
    return max((one.double() - other).abs().max().item() for one, other in pairs)


# What is computed.


@pytest.mark.parametrize("letters", LISTS)
@each_euler
def test_eulers_steps_are_the_formulas(make, letters):
    expected, loop = by_hand(START, levels_of(make, letters), letters), Loop(make())
    assert furthest(loop.run(letters, curved), expected) < 1e-5
    assert loop.told == before_last_full(letters)
    plain = loop.run(letters, curved, made=unknown)
    assert (furthest(plain, expected) > 1e-3) == bool(loop.told)


def test_in_half_precision_it_is_the_formula_but_for_rounding():
    make, letters, start = EULERS["euler"], LISTS[0], START.bfloat16()
    expected, loop = by_hand(start, levels_of(make, letters), letters), Loop(make())
    found = loop.run(letters, curved, start=start)
    assert {each.dtype for each in found} == {torch.bfloat16}
    plain = loop.run(letters, curved, start=start, made=unknown)
    assert furthest(found, expected) < 0.05 < furthest(plain, expected)


@pytest.mark.parametrize("letters", ["FKKFFKKF", "FKKKKFKF", "FKSKFKKF"])
@pytest.mark.parametrize("make", [*SCHEDULERS.values(), *SHORT.values()])
def test_a_solver_that_is_given_those_predictions_ends_there(make, letters):
    """It goes from step to step once and knows of no gap."""
    loop, scheduler = Loop(make()), make()
    found = loop.run(letters, curved)
    assert loop.told == before_last_full(letters)
    scheduler.set_timesteps(len(letters))
    levels = scheduler.sigmas.double().tolist()
    clean_level = float(scheduler.config.get("invert_sigmas", False))
    distances = [level - clean_level for level in levels]
    led = [START, *found[:-1]]
    seen = {
        step: led[step] - distances[step] * curved(led[step], levels[step])
        for step, letter in enumerate(letters)
        if letter != "K"
    }
    latents, full = START, 0
    for step, letter in enumerate(letters):
        if letter == "F":
            # The share of the latents that is clean is the share of their change that it follows.
            seen[step] = seen[step] + (1 - abs(distances[step])) * (latents - led[step])
            full, clean = step, seen[step]
        else:
            nodes = [each for each in seen if each >= full]
            end = next(each for each in nodes if each > full and letters[each] == "F")
            line = {levels[each]: seen[each] for each in nodes if each <= end}
            clean = interpolated(line, levels[step])
        given = (latents - clean) / distances[step], scheduler.timesteps[step], latents
        latents = scheduler.step(*given, return_dict=False)[0]
        if letter == "F":
            torch.testing.assert_close(found[step], latents, rtol=1e-5, atol=2e-5)
    same_state(loop.scheduler, scheduler)


def same_state(one, other):
    """The last step reads what those of the gap before it left."""
    found, expected = vars(one), vars(other)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor | list):
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=2e-5)
        else:
            assert found[name] == value, name


@pytest.mark.parametrize("letters", ["FFKFKFKFKFKFKFKF", "FFFKKFFKKFFKKFFF", "FFKSKFFKSKFFKKFF"])
@each_scheduler
def test_full_steps_end_as_dense_ones_where_predictions_are_on_a_line(make, letters):
    """But for what these follow of the latents that are not put right yet, the smaller part."""
    loop, dense = Loop(make()), Loop(make()).run("F" * len(letters), straight)
    model = following(make, len(letters))
    found, plain = loop.run(letters, model), loop.run(letters, model, made=unknown)
    for step in (step for step in range(letters.index("K"), len(letters)) if letters[step] == "F"):
        off, before = ((run[step] - dense[step]).abs().max().item() for run in (found, plain))
        assert off < before / 2, (step, off, before)


def test_between_predictions():
    values = ((4.0, 1.0), (2.0, 3.0), (1.0, 9.0))
    falling = [Prediction(level, torch.tensor([value])) for level, value in values]
    for predictions in (falling, falling[::-1]):
        found = [between(predictions, level).item() for level in (4.0, 3.0, 2.0, 1.5, 1.0)]
        assert found == [1.0, 2.0, 3.0, 6.0, 9.0]
    same = [Prediction(2.0, torch.tensor([value])) for value in (1.0, 5.0)]
    assert between(same, 2.0).item() == 1.0


# The scheduler.


@each_scheduler
def test_a_second_generation_gives_the_same_bits(make):
    letters, loop = LISTS[0], Loop(make())
    first = loop.run(letters, curved)
    loop.run(letters[:6], curved)  # broken off in a gap
    loop.told.clear()
    assert all(map(torch.equal, loop.run(letters, curved), first))
    assert loop.told == before_last_full(letters)


# Where a gap ends.


def per_token(step):
    options = {"per_token_timesteps": torch.full((2, 6), 500.0)} if step == 1 else {}
    return {"return_dict": False, **options}


def shorter(_scheduler, step, latents):
    return latents[:1] if step == 2 else latents


def anew(scheduler, step, latents):
    if step == 2:
        scheduler.set_timesteps(6)
        scheduler.set_begin_index(2)
    return latents


CHANGES = {
    "other branches": {"made": lambda step, kind, _: Made(step, kind, BOTH if step < 2 else ONE)},
    "an unknown step": {"made": lambda *made: None if made[0] == 1 else Made(*made)},
    "a step of another loop": {"made": lambda step, *made: Made(step + 4 * (step == 1), *made)},
    "another shape": {"before": shorter},
    "new timesteps": {"before": anew},
    "a timestep per token": {"call": per_token},
}


@pytest.mark.parametrize("change", [None, *CHANGES])
def test_nothing_is_corrected_over_a_change(change):
    letters, options, changed = "FKFKFF", CHANGES.get(change, {}), change is not None
    loop, plain = (Loop(EULERS["euler"]()) for _ in range(2))
    found = loop.run(letters, curved, **options)
    expected = plain.run(letters, curved, **{**options, "made": unknown})
    same = list(map(torch.equal, found, expected))
    assert same == [True, True, changed, changed, False, False]
    assert (loop.told, plain.told) == ([3] if changed else [1, 3], [])


# What pipelines do with a step.


@pytest.mark.parametrize("options", [{}, {"return_dict": True}])
@each_scheduler
def test_both_forms_of_a_result_have_the_same_latents(make, options):
    letters, loop, plain = LISTS[0], Loop(make()), make()
    expected = loop.run(letters, curved)
    assert all(map(torch.equal, loop.run(letters, curved, call=lambda _: options), expected))
    for form in (options, {"return_dict": False}):
        loop.scheduler.set_timesteps(8)
        plain.set_timesteps(8)
        given = {"model_output": BASE, "timestep": plain.timesteps[0], "sample": START, **form}
        assert type(loop.step(**given)) is type(plain.step(**given))


@pytest.mark.parametrize("changed", range(1, 8))
@each_scheduler
def test_latents_that_a_pipeline_changes_in_place_are_as_others(make, changed):
    letters = "FKKFSKFK"

    def in_place(_scheduler, step, latents):
        return latents.add_(BEND) if step == changed else latents

    def apart(_scheduler, step, latents):
        return latents + BEND if step == changed else latents

    found = Loop(make()).run(letters, curved, before=in_place)
    assert all(map(torch.equal, found, Loop(make()).run(letters, curved, before=apart)))
    assert not torch.equal(found[-1], Loop(make()).run(letters, curved)[-1])


@each_euler
def test_what_is_added_before_a_full_step_is_kept(make):
    letters, added = "FKKFKFF", {3: 0.5 * BEND, 5: BASE, 6: SLOPE}
    expected = by_hand(START, levels_of(make, letters), letters, added)
    found = Loop(make()).run(
        letters, curved, before=lambda _, step, latents: latents + added.get(step, 0)
    )
    assert furthest(found, expected) < 1e-5


# A step that is wrapped.


@pytest.fixture(params=SCHEDULERS.values(), ids=SCHEDULERS)
def scheduler(request):
    scheduler = request.param()
    scheduler.set_timesteps(8)
    return scheduler


def watching(wraps):
    """Wraps steps, and lists their schedulers and the number of calls."""

    def wrap(owner, step):
        watched = SimpleNamespace(owner=owner, calls=0)
        wraps.append(watched)

        def wrapped(*args, **kwargs):
            watched.calls += 1
            return step(*args, **kwargs)

        return wrapped

    return wrap


def step_once(scheduler):
    return scheduler.step(BASE, scheduler.timesteps[0], START, return_dict=False)[0]


def test_a_wrapped_step_has_the_signature_of_its_own(scheduler):
    signature, wraps = inspect.signature(scheduler.step), []
    expected = step_once(copy.deepcopy(scheduler))
    with wrapped_step(scheduler, watching(wraps)):
        assert inspect.signature(scheduler.step) == signature
        assert torch.equal(step_once(scheduler), expected)
    assert [(each.owner is scheduler, each.calls) for each in wraps] == [(True, 1)]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, None])
@pytest.mark.parametrize("own", [False, True])
def test_a_step_is_restored(scheduler, own, error):
    if own:
        scheduler.step = scheduler.step  # an attribute of the instance
    before = dict(vars(scheduler))
    try:
        with wrapped_step(scheduler, watching([])):
            outer = vars(scheduler)["step"]
            with wrapped_step(scheduler, watching([])):
                assert vars(scheduler)["step"] is not outer
            assert vars(scheduler)["step"] is outer is not before.get("step")
            if error is not None:
                raise error
    except (ZeroDivisionError, KeyboardInterrupt):
        pass
    assert vars(scheduler) == before
    assert ("step" in vars(scheduler)) is own


@pytest.mark.parametrize("copies", [False, True])
def test_the_step_of_a_deep_copy_is_its_own(scheduler, copies):
    wraps, expected = [], step_once(copy.deepcopy(scheduler))
    with wrapped_step(scheduler, watching(wraps), copies=copies):
        copied = copy.deepcopy(scheduler)
        again = copy.deepcopy(copied)
        for other in (copied, again):
            assert torch.equal(step_once(other), expected)
            assert (scheduler.step_index, other.step_index) == (None, 1)
            assert (other.step == type(other).step.__get__(other)) is not copies
    owners = [scheduler, copied, again] if copies else [scheduler]
    assert [id(each.owner) for each in wraps] == list(map(id, owners))
    assert [each.calls for each in wraps] == [0, 1, 1][: len(owners)]
