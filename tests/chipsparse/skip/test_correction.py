"""Skipped steps that are put right, by real schedulers in a loop without a transformer."""

import copy
import inspect
import pickle

import diffusers
import numpy as np
import pytest
import torch

from chipsparse.skip.correction import CorrectedSteps, Made, held_bytes, latents_of
from chipsparse.skip.patched_step import wrap_step
from tests.tiny_models import FLOW, random

# Of diffusers' older schedulers, which mix tensors and NumPy arrays.
pytestmark = pytest.mark.filterwarnings("ignore:.*__array:DeprecationWarning")

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
# Full steps, sparse ones and skipped ones.
KINDS = {"F": "full", "S": "sparse", "K": "reused"}
LISTS = ("FKKFFKKKFK", "FFKFKKKKFF", "FKKKKKKKKFF", "FFFFFKKKKK", "FKSKFKKSSFKS")
BOTH = frozenset({"cond", "uncond"})
ONE = frozenset({"cond"})
START, BASE = (random(2, 6, 4, seed=seed) for seed in (0, 1))


def curved(latents, level, _distance=None):
    """Its predictions are on no line."""
    return torch.sin(2 * latents + 5 * level) + latents


def unknown(*_made):
    """With which nothing is corrected."""


class Loop:
    """A pipeline's, with the steps of a scheduler that puts skipped ones right."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.now = None
        self.told = []
        self.step = CorrectedSteps(scheduler, scheduler.step, lambda: self.now, self.told.extend)

    def run(self, letters, model, *, made=Made, before=None, call=None, start=START):
        """The latents behind each step."""
        self.scheduler.set_timesteps(len(letters))
        clean_level = float(self.scheduler.config.get("invert_sigmas", False))
        latents = start
        output = None
        found = []
        for step, letter in enumerate(letters):
            if before is not None:
                latents = before(self.scheduler, step, latents)
            self.now = made(step, KINDS[letter], BOTH)
            level = self.scheduler.sigmas[step]
            if letter != "K":
                output = model(latents.float(), level, level - clean_level).to(latents.dtype)
            given = output[: len(latents)], self.scheduler.timesteps[step], latents
            options = {"return_dict": False} if call is None else call(step)
            latents = latents_of(self.step(*given, **options))
            assert self.scheduler.step_index == step + 1
            found.append(latents.clone())
        return found


def by_hand(make, letters, *, start=START, added=None):
    """The latents behind each step with the curved model, and the scheduler behind the last one.

    At a full step the gap before it is gone through once more, from the full step before, with
    predictions on the line between those that were computed. Before a step a pipeline adds to the
    latents what ``added`` says.
    """
    scheduler = make()
    scheduler.set_timesteps(len(letters))
    levels = scheduler.sigmas.double().tolist()
    clean_level = float(scheduler.config.get("invert_sigmas", False))
    distances = [level - clean_level for level in levels]
    results = []
    latents = start.float()
    added = added or {}
    predictions = {}
    behind_full = clean = None
    others = torch.zeros_like(latents)  # added since the last full step

    def stepped(scheduler, step, latents, clean):
        velocity = (latents - clean) / distances[step]
        return scheduler.step(velocity, scheduler.timesteps[step], latents, return_dict=False)[0]

    for step, letter in enumerate(letters):
        latents = latents + added.get(step, 0)
        others = others + added.get(step, 0)
        if letter != "K":
            velocity = curved(latents, levels[step])
            clean = latents - distances[step] * velocity
            predictions[levels[step]] = clean - others
        if letter == "F":
            if behind_full is not None:
                led = latents
                (full, latents, scheduler) = behind_full
                for skipped in range(full + 1, step):
                    line = interpolated(predictions, levels[skipped])
                    latents = stepped(scheduler, skipped, latents, line)
                latents = latents + others
                # It follows their change by the share of the latents that is clean.
                clean = clean + (1 - abs(distances[step])) * (latents - led)
            latents = stepped(scheduler, step, latents, clean)
            behind_full = step, latents, copy.deepcopy(scheduler)
            predictions = {levels[step]: clean}
            others = torch.zeros_like(latents)
        else:
            clean = latents - distances[step] * velocity
            latents = stepped(scheduler, step, latents, clean)
        results.append(latents)
    return results, scheduler


def interpolated(values, place):
    places = sorted(values)
    hats = zip(places, np.eye(len(places)), strict=True)
    return sum(np.interp(place, places, hat) * values[each] for each, hat in hats)


def before_last_full(letters):
    return [step for step in range(letters.rindex("F")) if letters[step] != "F"]


def furthest(found, expected):
    pairs = zip(found, expected, strict=True)
    return max((one.double() - other).abs().max().item() for one, other in pairs)


@pytest.mark.parametrize("letters", [*LISTS, "FKKFFKKF", "FKKKKFKF", "FKSKFKKF"])
@pytest.mark.parametrize("make", [*SCHEDULERS.values(), *SHORT.values()])
def test_steps_are_the_formulas_and_leave_the_scheduler_as_they_do(make, letters):
    (expected, scheduler) = by_hand(make, letters)
    loop = Loop(make())
    assert furthest(loop.run(letters, curved), expected) < 5e-5
    assert loop.told == before_last_full(letters)
    same_state(loop.scheduler, scheduler)
    plain = loop.run(letters, curved, made=unknown)
    assert (furthest(plain, expected) > 1e-3) == bool(loop.told)


def test_in_half_precision_it_is_the_formula_but_for_rounding():
    make = EULERS["euler"]
    letters = LISTS[0]
    start = START.bfloat16()
    found = Loop(make()).run(letters, curved, start=start)
    assert {latents.dtype for latents in found} == {torch.bfloat16}
    assert furthest(found, by_hand(make, letters, start=start)[0]) < 0.05


def same_state(one, other):
    """The last step reads what those of the gap before it left."""
    found = vars(one)
    expected = vars(other)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor | list):
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=2e-5)
        else:
            assert found[name] == value, name


@pytest.mark.parametrize("other", [LISTS[0], "FKFKFF", "scaled"])
@each_scheduler
def test_another_generation_gives_the_same_bits(make, other):
    """Behind one that was broken off in a gap, at other levels, or with other numbers of steps."""

    def scaled(scheduler, step, latents):
        if other == "scaled" and step == 0:
            scheduler.sigmas[1:-1] *= 0.9
        return latents

    loop = Loop(make())
    fresh = Loop(make())
    loop.run(LISTS[0][:6] if other == "scaled" else other, curved)
    loop.told.clear()
    found = loop.run(LISTS[0], curved, before=scaled)
    assert all(map(torch.equal, found, fresh.run(LISTS[0], curved, before=scaled)))
    assert loop.told == before_last_full(LISTS[0])


@pytest.mark.parametrize("form", [{}, {"return_dict": True}])
@each_scheduler
def test_results_have_the_form_that_is_asked_for(make, form):
    expected = Loop(make()).run(LISTS[0], curved)
    loop = Loop(make())
    plain = make()
    assert all(map(torch.equal, loop.run(LISTS[0], curved, call=lambda _: form), expected))
    for scheduler in (loop.scheduler, plain):
        scheduler.set_timesteps(8)
    given = {"model_output": BASE, "timestep": plain.timesteps[0], "sample": START, **form}
    assert type(loop.step(**given)) is type(plain.step(**given))


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
    "a step of another loop": {"made": lambda step, *made: Made(5 if step == 1 else step, *made)},
    "another shape": {"before": shorter},
    "new timesteps": {"before": anew},
    "a timestep per token": {"call": per_token},
}


@pytest.mark.parametrize("change", [None, *CHANGES])
def test_nothing_is_corrected_over_a_change(change):
    letters = "FKFKFF"
    options = CHANGES.get(change, {})
    changed = change is not None
    loop, plain = (Loop(EULERS["euler"]()) for _ in range(2))
    found = loop.run(letters, curved, **options)
    expected = plain.run(letters, curved, **{**options, "made": unknown})
    same = list(map(torch.equal, found, expected))
    assert same == [True, True, changed, changed, False, False]
    assert (loop.told, plain.told) == ([3] if changed else [1, 3], [])


@pytest.mark.parametrize("make", EULERS.values(), ids=EULERS)
def test_tokens_with_timesteps_of_their_own_go_as_all_where_they_are_free(make):
    """Those that are held are put back by the pipeline, and are not moved."""
    letters = "FKKFSKF"
    held = torch.tensor([False, True] * 3)
    expected = Loop(make()).run(letters, curved)
    loop = Loop(make())
    plain = Loop(make())

    def own_step(output, time, latents, *, per_token_timesteps, return_dict):
        # Levels that rise begin at 0, which half of it is, too.
        stays = torch.equal(latents[:, held], START[:, held])
        assert stays or make is EULERS["euler, rising"]
        return plain.step._step(-output, time, latents, return_dict=return_dict)

    loop.step._step = own_step
    loop.step._scheduler = loop.scheduler = plain.scheduler

    def call(step):
        level = plain.scheduler.timesteps[step].expand(2, 6)
        return {"return_dict": False, "per_token_timesteps": torch.where(held, level / 2, level)}

    def back(_scheduler, step, latents):
        return torch.where(held[:, None], START, latents)

    found = loop.run(letters, lambda *given: -curved(*given), before=back, call=call)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[:, ~held], other[:, ~held], rtol=1e-5, atol=1e-5)
    assert loop.told == before_last_full(letters)


@each_scheduler
def test_a_gap_holds_as_much_whatever_its_length(make):
    """As pickled: tensors that are shared count once."""
    latents = random(1, 128, 128, seed=9)
    sizes = []
    for letters in ("FFKKF", "FFKKKKKKKKKKF"):
        loop = Loop(make())
        held = []

        def look(_scheduler, _step, latents, loop=loop, held=held):
            held.append(len(pickle.dumps(loop.step._gap)))
            return latents

        loop.run(letters, curved, before=look, start=latents)
        assert loop.step._gap is None  # behind the last step
        sizes.append(max(held))
        assert sizes[-1] <= held_bytes(make(), latents) + 16_384
    assert sizes[0] == pytest.approx(sizes[1], abs=16_384)


@pytest.mark.parametrize("steps", [[1], [3], [1, 2], [2, 3, 4, 5], range(1, 7)])
@each_scheduler
def test_what_others_add_is_no_part_of_the_line(make, steps):
    """Changed in place, latents are the same as new ones."""
    letters = "FKKFKSF"
    added = {step: random(2, 6, 4, seed=20 + step) for step in steps}

    def in_place(_scheduler, step, latents):
        return latents.add_(added.get(step, 0))

    def anew(_scheduler, step, latents):
        return latents + added.get(step, 0)

    result = Loop(make()).run(letters, curved, before=in_place)
    assert all(map(torch.equal, result, Loop(make()).run(letters, curved, before=anew)))
    if make in EULERS.values():  # the others also mix older predictions
        assert furthest(result, by_hand(make, letters, added=added)[0]) < 1e-5


# A step that is wrapped.


@pytest.fixture(params=SCHEDULERS.values(), ids=SCHEDULERS)
def scheduler(request):
    scheduler = request.param()
    scheduler.set_timesteps(8)
    return scheduler


def counting(calls, name=""):
    def wrap(step):
        return lambda *args, **kwargs: (calls.append(name), step(*args, **kwargs))[1]

    return wrap


def step_once(scheduler):
    place = scheduler.step_index or 0
    return scheduler.step(BASE, scheduler.timesteps[place], START, return_dict=False)[0]


COPIES = {
    "shallow": copy.copy,
    "deep": copy.deepcopy,
    "pickled": lambda scheduler: pickle.loads(pickle.dumps(scheduler)),
    "pickled, old": lambda scheduler: pickle.loads(pickle.dumps(scheduler, 0)),
    "made anew": lambda scheduler: type(scheduler).from_config(scheduler.config),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_of_a_scheduler_with_a_wrapped_step_are_stock(scheduler, copied):
    stock = copy.deepcopy(scheduler)
    calls = []
    undo = wrap_step(scheduler, counting(calls))
    other = copied(scheduler)
    if len(other.timesteps) != 8:
        other.set_timesteps(8)
    undo()
    assert type(other) is type(scheduler) is type(stock)
    assert vars(scheduler).keys() == vars(stock).keys() <= vars(other).keys()
    assert "step" not in vars(other)
    assert torch.equal(step_once(other), step_once(stock))
    assert (scheduler.step_index, other.step_index, calls) == (None, 1, [])


@pytest.mark.parametrize("own", ["none", "before", "behind", "around"])
def test_a_wrapped_step_is_around_the_users_own(scheduler, own):
    """The user's own step was there before, came later, or is set around the wrapped one."""
    stock = copy.deepcopy(scheduler)
    calls = []
    mine = counting(calls, "own")(scheduler.step)
    if own == "before":
        scheduler.step = mine
    undo = wrap_step(scheduler, counting(calls, "wrapped"))
    wrapped = mine if own == "before" else stock.step
    assert inspect.signature(scheduler.step) == inspect.signature(wrapped)
    if own == "behind":
        scheduler.step = mine
    elif own == "around":
        scheduler.step = counting(calls, "own")(scheduler.step)
    assert torch.equal(step_once(scheduler), step_once(stock))
    expected = [] if own == "none" else ["own"]
    assert calls == ["wrapped", *expected]
    assert isinstance(scheduler, type(stock))
    assert type(scheduler).__name__ == type(stock).__name__
    undo()
    assert torch.equal(step_once(scheduler), step_once(stock))
    assert calls == ["wrapped", *expected, *expected]
    if own != "none":
        assert own == "around" or scheduler.step is mine
        del scheduler.step
    assert vars(scheduler).keys() == vars(stock).keys()


@pytest.mark.parametrize("first", [0, 1])
def test_wrappings_around_each_other_are_taken_back_in_any_order(scheduler, first):
    calls = []
    kind = type(scheduler)
    undo = [wrap_step(scheduler, counting(calls, name)) for name in "ab"]
    step_once(scheduler)
    assert calls == ["b", "a"]
    assert type(copy.deepcopy(scheduler)) is kind
    undo[first]()
    step_once(scheduler)
    assert calls == ["b", "a", "ab"[1 - first]]
    undo[1 - first]()
    assert type(scheduler) is kind
