"""Skipped steps put right by the solver, against sums by hand and against dense generations."""

import copy
import inspect

import diffusers
import numpy as np
import pytest
import torch

from chipsparse.schedule.correction import CorrectedSteps, Made, Prediction, between
from chipsparse.schedule.wrapped_step import wrapped_step

STEPS, SHAPE = 12, (2, 3)
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
SOLVERS = {
    "euler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    "unipc": lambda: diffusers.UniPCMultistepScheduler(**FLOW),
    "dpm": lambda: diffusers.DPMSolverMultistepScheduler(**FLOW),
}


@pytest.fixture(params=SOLVERS)
def scheduler(request):
    return prepared(SOLVERS[request.param]())


def prepared(made):
    made.set_timesteps(STEPS)
    return made


def noise():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float32)


def curved(latents, level):
    """A velocity that depends on the latents and bends."""
    return torch.sin(3 * latents) + latents * level**2


def straight(latents, level):
    """The velocity of clean latents that change along a line."""
    clean = torch.arange(6.0).view(SHAPE) + 2 * level
    return (latents - clean) / level


def generated(
    scheduler, model, full, *, correct=True, sparse=(), branches=None, returns=False, until=STEPS
):
    """Latents, and the steps that were corrected; skipped steps hold the last output."""
    now, told = [None], []
    latents, held = noise(), None
    step = scheduler.step
    if correct:
        step = CorrectedSteps(scheduler, step, lambda: now[0], told.extend)
    for number, time in enumerate(scheduler.timesteps[:until]):
        computed = number in full or number in sparse
        if computed:
            held = model(latents, float(scheduler.sigmas[number]))
        kind = "full" if number in full else "sparse" if number in sparse else "reused"
        now[0] = Made(number, kind, frozenset((branches or {}).get(number, ("cond",))))
        stepped = step(held, time, latents, return_dict=returns)
        latents = stepped.prev_sample if returns else stepped[0]
    return latents, told


def by_hand(levels, full):
    """What `generated` should give of `curved` by Euler's method, in float64."""
    levels = np.asarray(levels, dtype=np.float64)
    latents, held, last = noise().double().numpy(), None, None
    for number in range(STEPS):
        level, change = levels[number], levels[number + 1] - levels[number]
        if number not in full:
            latents = latents + change * held
            continue
        held = output = np.sin(3 * latents) + latents * level**2
        clean = latents - level * held
        if last is not None:
            began, first, before = last
            latents = began
            for other in range(first + 1, number):
                share = (levels[other] - levels[first]) / (level - levels[first])
                target = before + share * (clean - before)
                velocity = (latents - target) / levels[other]
                latents = latents + (levels[other + 1] - levels[other]) * velocity
            output = (latents - clean) / level  # skipped steps hold the model's own
        latents = latents + change * output
        last = latents, number, clean
    return latents


@pytest.mark.parametrize("full", [(0, 1, 4, 9), (0, 3, 6, 7, 11), (0, 10), (0, 5, 6)])
def test_euler_goes_over_gaps_again(full):
    scheduler = prepared(SOLVERS["euler"]())
    found, told = generated(scheduler, curved, full)
    np.testing.assert_allclose(found.numpy(), by_hand(scheduler.sigmas, full), rtol=3e-5, atol=3e-5)
    assert told == [step for step in range(full[-1]) if step not in full]
    plain, _ = generated(prepared(SOLVERS["euler"]()), curved, full, correct=False)
    assert (plain - found).abs().max() > 1e-2


def test_clean_latents_along_a_line_are_exact(scheduler):
    full, part = (0, 1, 5, 10), {"until": 11}
    dense, _ = generated(copy.deepcopy(scheduler), straight, range(11), correct=False, **part)
    found, _ = generated(copy.deepcopy(scheduler), straight, full, **part)
    held, _ = generated(scheduler, straight, full, correct=False, **part)
    torch.testing.assert_close(found, dense, rtol=1e-4, atol=1e-4)
    assert (held - dense).abs().max() > 1e-2


def test_the_solver_is_left_as_it_would_be(scheduler):
    first, _ = generated(scheduler, curved, (0, 4, 7))
    scheduler.set_timesteps(STEPS)
    again, _ = generated(scheduler, curved, (0, 4, 7), returns=True)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert scheduler.step_index == STEPS


def test_with_nothing_between_full_steps_nothing_changes(scheduler):
    plain, _ = generated(copy.deepcopy(scheduler), curved, range(STEPS), correct=False)
    found, told = generated(scheduler, curved, range(STEPS))
    assert torch.equal(found, plain)
    assert not told


def test_other_branches_end_a_gap():
    scheduler = prepared(SOLVERS["euler"]())
    both = dict.fromkeys(range(5), ("cond", "uncond"))
    _, told = generated(scheduler, curved, (0, 3, 6, 9), branches=both)
    assert told == [1, 2, 7, 8]  # not 4 and 5: the full step before had two branches


def test_what_a_pipeline_adds_between_steps_stays():
    """As those do that put known latents back, or change them in place."""
    scheduler, now = prepared(SOLVERS["euler"]()), [None]
    step = CorrectedSteps(scheduler, scheduler.step, lambda: now[0], lambda _: None)
    results = []
    for added in (0.0, 0.25):
        scheduler.set_timesteps(STEPS)
        latents = noise()
        for number, time in enumerate(scheduler.timesteps[:4]):
            now[0] = Made(number, "full" if number in (0, 3) else "reused", frozenset(["cond"]))
            if number == 3:
                latents += added  # in place
            latents = step(torch.full(SHAPE, number / 10), time, latents, return_dict=False)[0]
        results.append(latents)
    # D = x - level v rises by what was added, by a line over the gap.
    assert (results[1] - results[0]).min() > 0.2


@pytest.mark.parametrize("forgets", ["timesteps", "unknown", "shape"])
def test_what_does_not_follow_is_not_corrected(forgets):
    scheduler, now, told = prepared(SOLVERS["euler"]()), [None], []
    step = CorrectedSteps(scheduler, scheduler.step, lambda: now[0], told.extend)
    latents = noise()
    for number, time in enumerate(scheduler.timesteps[:4]):
        kind = "full" if number in (0, 3) else "reused"
        now[0] = Made(number, kind, frozenset(["cond"]))
        if number == 2 and forgets == "unknown":
            now[0] = None
        if number == 2 and forgets == "timesteps":
            scheduler.timesteps = scheduler.timesteps.clone()
        if number == 2 and forgets == "shape":
            latents = latents[:1]
        latents = step(torch.zeros_like(latents), time, latents, return_dict=False)[0]
    assert not told


def test_sparse_steps_are_corners_of_the_line():
    scheduler = prepared(SOLVERS["euler"]())
    some, told = generated(scheduler, curved, (0, 8), sparse=(4,))
    scheduler.set_timesteps(STEPS)
    none, _ = generated(scheduler, curved, (0, 8))
    assert told == list(range(1, 8))
    assert not torch.equal(some, none)
    ends = [Prediction(level, torch.tensor([value])) for level, value in ((1, 2.0), (0.5, 4.0))]
    corner = Prediction(0.2, torch.tensor([10.0]))
    assert between([*ends, corner], 0.75).item() == pytest.approx(3)
    assert between([*ends, corner], 0.35).item() == pytest.approx(7)
    assert between(ends, 1.0).item() == pytest.approx(2)


def test_a_wrapped_step_looks_like_the_schedulers_and_goes_again():
    scheduler, calls = prepared(SOLVERS["euler"]()), []

    def wrap(owner, step):
        return lambda *args, **kwargs: (calls.append(owner), step(*args, **kwargs))[1]

    signature = inspect.signature(scheduler.step)
    with wrapped_step(scheduler, wrap, copies=True):
        assert inspect.signature(scheduler.step) == signature
        other = copy.deepcopy(scheduler)
        other.step(noise(), other.timesteps[0], noise())
        assert calls == [other]
        assert (scheduler.step_index, other.step_index) == (None, 1)
    assert "step" not in vars(scheduler)
    with pytest.raises(TypeError), wrapped_step(scheduler, wrap):
        scheduler.step()
    assert "step" not in vars(scheduler)
    with wrapped_step(scheduler, wrap):
        plain = copy.deepcopy(scheduler)
        plain.step(noise(), plain.timesteps[0], noise())
    assert calls == [other, scheduler]
    own = scheduler.step = scheduler.step
    with wrapped_step(scheduler, wrap):
        assert scheduler.step is not own
    assert scheduler.step is own
