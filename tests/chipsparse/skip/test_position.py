"""Position in the denoising loop, from every source that a pipeline may offer."""

import pytest
import torch

from chipsparse.skip.position import Locator

TIMES = [900.0, 600.0, 300.0]
LEVELS = [1.0, 0.7, 0.7, 0.3]
BOTH = ("cond", "uncond")


def indexed(*steps, branches=("cond",), count=3, schedule=TIMES):
    return [
        {"branch": branch, "step_index": step, "steps": count, "schedule": schedule}
        for step in steps
        for branch in branches
    ]


def timed(*times, branches=(None,), schedule=None):
    return [
        {"branch": branch, "timestep": lambda value=time: value, "schedule": schedule}
        for time in times
        for branch in branches
    ]


def twice(steps, generation=1):
    return [(generation, step, branch) for step in steps for branch in BOTH]


@pytest.mark.parametrize(
    ("calls", "places"),
    [
        (indexed(0, 1, 2, branches=BOTH), twice(range(3))),
        # A schedule has the place of a timestep, and a generation may start late.
        (timed(*TIMES[1:], branches=BOTH, schedule=TIMES), twice((1, 2))),
        # Without one, timesteps are counted.
        (timed(*TIMES, branches=BOTH), twice(range(3))),
        # Calls that nobody names.
        (timed(900, 900, 600, schedule=TIMES), [(1, 0, "call0"), (1, 0, "call1"), (1, 1, "call0")]),
        # A generation starts where a step goes back,
        (indexed(0, 1) + indexed(0), [(1, 0, "cond"), (1, 1, "cond"), (2, 0, "cond")]),
        (timed(900, 600, 900), [(1, 0, "call0"), (1, 1, "call0"), (2, 0, "call0")]),
        # where it comes again, by its name also at the same timestep,
        (indexed(0, 0), [(1, 0, "cond"), (2, 0, "cond")]),
        (timed(900, *TIMES, branches=BOTH), twice((0,)) + twice(range(3), 2)),
        (timed(900, 600, *TIMES[1:], branches=BOTH), twice(range(2)) + twice(range(2), 2)),
        # A level that a schedule has twice is that of the branch's next step, of one call or two.
        (
            timed(1.0, 0.7, 0.7, 0.3, branches=("cond",), schedule=LEVELS),
            [(1, step, "cond") for step in range(4)],
        ),
        (timed(1.0, 0.7, 0.7, 0.3, branches=BOTH, schedule=LEVELS), twice(range(4))),
        (
            timed(0.7, 0.7, 0.3, branches=BOTH, schedule=LEVELS),  # it starts late
            twice(range(1, 4)),
        ),
        (
            timed(0.7, 0.3, 0.7, 0.3, schedule=[0.7, 0.7, 0.3]),
            [(1, 0, "call0"), (1, 2, "call0"), (2, 0, "call0"), (2, 2, "call0")],
        ),
        # with another number of steps, and with another schedule, even after one call.
        (indexed(0) + indexed(1, count=4), [(1, 0, "cond"), (2, 1, "cond")]),
        (
            timed(900, schedule=list(TIMES)) + timed(900, 600, schedule=TIMES),
            [(1, 0, "call0"), (2, 0, "call0"), (2, 1, "call0")],
        ),
    ],
)
def test_generations_steps_and_branches(calls, places):
    tracker = Locator()
    contexts = [tracker.locate(**call) for call in calls]
    assert [(c.generation, c.step, c.branch) for c in contexts] == places


def test_the_timestep_of_a_step_is_that_of_the_schedule():
    def times(schedule):
        tracker = Locator()
        contexts = [tracker.locate(**call) for call in indexed(0, 1, 2, schedule=schedule)]
        return [(context.timestep, context.time) for context in contexts]

    assert times(torch.tensor(TIMES)) == [(time, time) for time in TIMES]
    unknown = [(None, 0.0), (None, 1.0), (None, 2.0)]
    assert times(None) == times([*TIMES, 0.0]) == unknown  # which is one of four steps


def test_finish_starts_a_generation():
    tracker = Locator()
    (first, second) = indexed(0, 1)
    before = tracker.locate(**first)
    tracker.finish()
    assert tracker.locate(**second).generation > before.generation


def test_the_timestep_is_not_read_where_the_index_is_given():
    """Reading it would wait for the device."""
    context = Locator().locate(branch="cond", step_index=4, timestep=pytest.fail)
    assert context.step == 4
    with pytest.raises(ValueError, match="cannot tell the denoising step"):
        Locator().locate(branch="cond")
