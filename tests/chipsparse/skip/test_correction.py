"""Skipped steps that are put right, by real schedulers in a loop without a transformer."""

import copy
import pickle
from collections.abc import Callable
from typing import NamedTuple

import diffusers
import numpy as np
import pytest
import torch

from chipsparse.skip.correction import CorrectedSteps, held_bytes, latents_of
from chipsparse.skip.step_log import StepKind, StepOrigin
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
KINDS = {"F": StepKind.FULL, "S": StepKind.SPARSE, "K": StepKind.REUSED}
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

    def run(self, letters, model, *, made=StepOrigin, before=None, call=None, start=START):
        """The latents after each step."""
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
            index = self.scheduler.step_index
            latents = latents_of(self.step(*given, **options))
            assert self.scheduler.step_index == (step if index is None else index) + 1
            found.append(latents.clone())
        return found


def by_hand(make, letters, *, start=START, added=None):
    """The latents after each step with the curved model, and the scheduler after the last one.

    At a full step the interval before it is gone through once more, from the full step before, with
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
    after_full = clean = None
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
            if after_full is not None:
                led = latents
                (full, latents, scheduler) = after_full
                for skipped in range(full + 1, step):
                    line = interpolated(predictions, levels[skipped])
                    latents = stepped(scheduler, skipped, latents, line)
                latents = latents + others
                # It follows their change by the share of the latents that is clean.
                clean = clean + (1 - abs(distances[step])) * (latents - led)
            latents = stepped(scheduler, step, latents, clean)
            after_full = step, latents, copy.deepcopy(scheduler)
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
    """The last step reads what those of the interval before it left."""
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
    """After one that broke off in an interval, or had other sigmas or another number of steps."""

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


class Case(NamedTuple):
    """A change by which a skipped interval does not go on: the options of `Loop.run`."""

    id: str
    made: Callable[..., StepOrigin | None] = StepOrigin
    before: Callable[..., torch.Tensor] | None = None
    call: Callable[[int], dict[str, object]] | None = None
    make: Callable[[], object] = EULERS["euler"]

    def run(self, letters, **changes):
        """Return the loop and the latents after its steps."""
        options = {"made": self.made, "before": self.before, "call": self.call}
        loop = Loop(self.make())
        return loop, loop.run(letters, curved, **options | changes)


def at_step_2(change):
    """Before that step, on the scheduler."""

    def before(scheduler, step, latents):
        if step == 2:
            change(scheduler)
        return latents

    return before


def other_timesteps(scheduler):
    scheduler.timesteps = scheduler.timesteps.clone()


def other_sigmas(scheduler):
    scheduler.sigmas = scheduler.sigmas.clone()


def set_anew(scheduler):
    scheduler.set_timesteps(6)
    scheduler.set_begin_index(2)


def one_step_back(scheduler):
    scheduler._step_index -= 1


def without_history(scheduler):
    scheduler.model_outputs = [None] * scheduler.config.solver_order
    scheduler.lower_order_nums = 0


def without_last_sample(scheduler):
    scheduler.last_sample = None


def fewer_samples(_scheduler, step, latents):
    return latents[:1] if step == 2 else latents


def per_token(*steps):
    def call(step):
        tokens = {"per_token_timesteps": torch.full((2, 6), 500.0)} if step in steps else {}
        return {"return_dict": False, **tokens}

    return call


# Each breaks one condition, but for "new timesteps", which a user breaks together.
CHANGES = [
    Case("an unknown origin", made=lambda *origin: None if origin[0] == 1 else StepOrigin(*origin)),
    Case(
        "other branches",
        made=lambda step, kind, _: StepOrigin(step, kind, BOTH if step < 2 else ONE),
    ),
    Case(
        "a step that does not follow",
        made=lambda step, *origin: StepOrigin(5 if step == 1 else step, *origin),
    ),
    Case(
        "a branch that restarted",
        made=lambda step, *origin: StepOrigin(step, *origin, restarted=step == 2),
    ),
    Case("another shape", before=fewer_samples),
    Case("new timesteps", before=at_step_2(set_anew)),
    Case("timesteps of another generation", before=at_step_2(other_timesteps)),
    Case("other sigmas", before=at_step_2(other_sigmas)),
    Case("another step index", before=at_step_2(one_step_back)),
    Case(
        "a history that was reset",
        before=at_step_2(without_history),
        make=SCHEDULERS["dpm"],
    ),
    Case(
        "a last sample that was reset",
        before=at_step_2(without_last_sample),
        make=SCHEDULERS["unipc"],
    ),
    Case("timesteps per token begin", call=per_token(*range(2, 6))),
    Case("timesteps per token end", call=per_token(0, 1)),
]
UNCHANGED = [
    Case("euler"),
    Case("timesteps per token", call=per_token(*range(6))),
    Case("dpm", make=SCHEDULERS["dpm"]),
    Case("unipc", make=SCHEDULERS["unipc"]),
]


def ids_of(cases):
    return [case.id for case in cases]


@pytest.mark.parametrize("case", UNCHANGED, ids=ids_of(UNCHANGED))
def test_without_a_change_each_interval_is_corrected(case):
    loop, found = case.run("FKFKFF")
    _, plain = case.run("FKFKFF", made=unknown)
    assert loop.told == [1, 3]
    assert list(map(torch.equal, found, plain)) == [True, True, False, False, False, False]


@pytest.mark.parametrize("case", CHANGES, ids=ids_of(CHANGES))
def test_nothing_is_corrected_over_a_change(case):
    """Steps are as without a corrector until the end of the interval after the change."""
    loop, found = case.run("FKFKFF")
    _, plain = case.run("FKFKFF", made=unknown)
    assert loop.told == [3]
    assert list(map(torch.equal, found, plain)) == [True, True, True, True, False, False]


def test_steps_without_skipped_ones_are_not_corrected():
    loop, found = Case("sparse").run("FSFSFF")
    _, plain = Case("sparse").run("FSFSFF", made=unknown)
    assert loop.told == []
    assert all(map(torch.equal, found, plain))


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
def test_an_interval_takes_as_much_whatever_its_length(make):
    """As pickled: tensors that are shared count once."""
    latents = random(1, 128, 128, seed=9)
    sizes = []
    for letters in ("FFKKF", "FFKKKKKKKKKKF"):
        loop = Loop(make())
        held = []

        def look(_scheduler, _step, latents, loop=loop, held=held):
            held.append(len(pickle.dumps(loop.step._interval)))
            return latents

        loop.run(letters, curved, before=look, start=latents)
        assert not loop.step.has_interval  # after the last step
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
