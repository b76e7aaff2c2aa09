"""Position in the denoising loop, from every source that a pipeline may offer."""

import pytest
import torch

from chipsparse.step import PositionTracker

TIMESTEPS = [900.0, 600.0, 300.0]


def indexed(tracker, schedule, steps=range(3), branches=("cond", "uncond")):
    return [
        tracker.locate(branch=branch, step_index=step, steps=3, schedule=schedule)
        for step in steps
        for branch in branches
    ]


def timed(tracker, timesteps, *, schedule=None, branches=(None,)):
    return [
        tracker.locate(branch=branch, timestep=lambda value=value: value, schedule=schedule)
        for value in timesteps
        for branch in branches
    ]


def test_reads_the_step_index_and_branch():
    found = indexed(PositionTracker(), list(TIMESTEPS))
    assert [(c.step, c.branch) for c in found] == [
        (step, branch) for step in range(3) for branch in ("cond", "uncond")
    ]
    assert {c.generation for c in found} == {1}
    assert {c.steps for c in found} == {3}


def test_tells_the_timestep_of_the_schedule():
    found = indexed(PositionTracker(), torch.tensor(TIMESTEPS), branches=("cond",))
    assert [c.time for c in found] == [c.timestep for c in found] == TIMESTEPS
    unknown = indexed(PositionTracker(), None, branches=("cond",))
    other = indexed(PositionTracker(), [*TIMESTEPS, 0.0], branches=("cond",))  # of four steps
    for calls in (unknown, other):
        assert [(c.timestep, c.time) for c in calls] == [(None, 0.0), (None, 1.0), (None, 2.0)]


def test_finds_the_timestep_in_the_schedule():
    schedule = list(TIMESTEPS)
    found = timed(PositionTracker(), TIMESTEPS[1:], schedule=schedule, branches=("cond", "uncond"))
    assert [c.step for c in found] == [1, 1, 2, 2]  # a generation may start late


def test_counts_timesteps_without_a_schedule():
    found = timed(PositionTracker(), TIMESTEPS, branches=("cond", "uncond"))
    assert [c.step for c in found] == [0, 0, 1, 1, 2, 2]


def test_names_calls_that_no_context_names():
    found = timed(PositionTracker(), [900.0, 900.0, 600.0, 600.0], schedule=list(TIMESTEPS))
    assert [(c.step, c.branch) for c in found] == [
        (0, "call0"),
        (0, "call1"),
        (1, "call0"),
        (1, "call1"),
    ]


def test_a_new_schedule_starts_a_generation_even_after_one_call():
    tracker = PositionTracker()
    first = timed(tracker, TIMESTEPS[:1], schedule=list(TIMESTEPS))
    second = timed(tracker, TIMESTEPS, schedule=list(TIMESTEPS))
    assert [c.generation for c in (*first, *second)] == [1, 2, 2, 2]
    assert [c.branch for c in second] == ["call0"] * 3


def test_a_step_that_goes_back_starts_a_generation():
    tracker, schedule = PositionTracker(), list(TIMESTEPS)
    first = indexed(tracker, schedule, steps=range(2))
    second = indexed(tracker, schedule)
    assert {c.generation for c in first} == {1}
    assert {c.generation for c in second} == {2}
    tracker = PositionTracker()
    back = timed(tracker, [900.0, 600.0, 900.0, 600.0])
    assert [(c.generation, c.step) for c in back] == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_a_repeated_call_starts_a_generation():
    tracker, schedule = PositionTracker(), list(TIMESTEPS)
    one, two = indexed(tracker, schedule, steps=(0, 0), branches=("cond",))
    assert (one.generation, two.generation) == (1, 2)


@pytest.mark.parametrize("broken_off_at", [0, 1])
def test_a_repeated_name_starts_a_generation_where_timesteps_are_counted(broken_off_at):
    """The other branch of its first step, at the same timestep, belongs to it."""
    tracker, branches = PositionTracker(), ("cond", "uncond")
    timed(tracker, TIMESTEPS[: broken_off_at + 1], branches=branches)
    again = timed(tracker, TIMESTEPS[broken_off_at:], branches=branches)
    assert {each.generation for each in again} == {2}
    steps = range(len(TIMESTEPS) - broken_off_at)
    assert [(each.step, each.branch) for each in again] == [
        (step, branch) for step in steps for branch in branches
    ]


def test_finish_starts_a_generation():
    tracker, schedule = PositionTracker(), list(TIMESTEPS)
    (before,) = indexed(tracker, schedule, steps=(0,), branches=("cond",))
    tracker.finish()
    (after,) = indexed(tracker, schedule, steps=(1,), branches=("cond",))
    assert after.generation > before.generation


def test_another_number_of_steps_starts_a_generation():
    tracker = PositionTracker()
    first = tracker.locate(branch="cond", step_index=0, steps=3)
    second = tracker.locate(branch="cond", step_index=1, steps=4)
    assert first.generation != second.generation


def test_the_timestep_is_not_read_where_the_index_is_given():
    def read() -> float:
        raise AssertionError("reading a timestep waits for the device")

    context = PositionTracker().locate(branch="cond", step_index=4, timestep=read)
    assert context.step == 4


def test_says_what_is_missing():
    with pytest.raises(ValueError, match="cannot tell the denoising step"):
        PositionTracker().locate(branch="cond")
