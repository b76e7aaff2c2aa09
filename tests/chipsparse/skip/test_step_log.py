"""The log of the calls of a step, and what it tells of their outputs' origin."""

import pytest

from chipsparse.config import Action
from chipsparse.skip.step_log import LoggedCall, StepKind, StepLog, StepOrigin


def logged(*actions, step=3, generation=1, **facts):
    log = StepLog()
    for branch, action in zip(("cond", "uncond"), actions, strict=False):
        log.append(LoggedCall(generation, step, branch, Action(action), **facts))
    return log


@pytest.mark.parametrize(
    ("taken", "kind"),
    [
        (("skip", "skip"), StepKind.REUSED),
        (("skip", "dense"), None),
        (("dense", "skip"), None),
        (("sparse", "dense"), StepKind.SPARSE),
        (("refresh", "dense"), StepKind.FULL),
        (("sparse", "skip"), None),
    ],
    ids=lambda taken: " and ".join(taken) if isinstance(taken, tuple) else str(taken),
)
def test_the_origin_of_a_step_of_two_branches(taken, kind):
    """A step of which one branch was skipped and the other computed is no part of an interval."""
    both = frozenset({"cond", "uncond"})
    expected = None if kind is None else StepOrigin(3, kind, both)
    assert logged(*taken).origin() == expected


def test_a_branch_that_restarted_restarts_the_step():
    log = logged("dense", restarted=True)
    log.append(LoggedCall(1, 3, "uncond", Action.DENSE))
    assert log.origin() == StepOrigin(3, StepKind.FULL, frozenset({"cond", "uncond"}), True)


@pytest.mark.parametrize(
    ("generation", "step"),
    [(1, 4), (2, 3)],
    ids=["the next step", "the same step of another generation"],
)
def test_a_step_replaces_the_one_before(generation, step):
    log = logged("skip", "skip")
    log.append(LoggedCall(generation, step, "cond", Action.SPARSE))
    assert log.origin() == StepOrigin(step, StepKind.SPARSE, frozenset({"cond"}))


def test_a_log_without_calls_knows_no_origin():
    log = logged("dense")
    assert log.last == LoggedCall(1, 3, "cond", Action.DENSE)
    log.clear()
    assert (log.last, log.origin()) == (None, None)
