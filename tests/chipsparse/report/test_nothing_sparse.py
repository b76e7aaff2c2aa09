"""Why nothing of a generation is sparse, as far as its plan tells, and what would help."""

import pytest

from chipsparse import (
    Actions,
    Branches,
    ByCost,
    Listed,
    Periodic,
    ScheduleConfig,
    SparsityConfig,
    Spread,
)
from chipsparse.report.nothing_sparse import wants_sparse, why_nothing
from chipsparse.sparse.plan import CACHED, SparsityPlan
from tests.chipsparse.sparse.test_plan import LAYOUT, OFF

EVERY = "the schedule computes every step in full; "
DENSE = {"index": "0-3", "attention": "dense", "mlp": "dense"}
ACTIONS = ("dense", "dense", "refresh", "sparse")


def plan_of(steps, form=None, config=(), cost=0.0):
    """The plan of a form of the schedule; without one it is periodic."""
    schedule = ScheduleConfig() if form is None else ScheduleConfig(form)
    config = SparsityConfig(schedule=schedule).override(dict(config))
    return SparsityPlan(config, LAYOUT, steps, sparse_cost=cost)


def too_few(steps, fewest, changes=""):
    few = "1 step is" if steps == 1 else f"{steps} steps are"
    more = f"take more steps, or {changes}" if changes else "take more steps"
    return f"{few} too few for the schedule, which needs at least {fewest}; {more}"


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (plan_of(1), too_few(1, 3)),
        (plan_of(6, Periodic(8)), too_few(6, 11, "lower schedule.periodic.warmup (now 8)")),
        (plan_of(3, Actions(ACTIONS)), too_few(3, 4, "change schedule.actions")),
        (
            plan_of(3, Branches({"*": Actions(ACTIONS)})),
            too_few(3, 4, "change schedule.branches"),
        ),
        (plan_of(4, Spread(0.9)), too_few(4, 5, "lower schedule.spread.full (now 0.9)")),
        (
            plan_of(8, Spread(0.2, at_least=8)),
            too_few(8, 9, "lower schedule.spread.at_least (now 8)"),
        ),
        (
            plan_of(6, ByCost(Spread(0.2, 0.2), Spread(0.2, at_least=8), 0.4), cost=0.5),
            too_few(6, 9, "lower schedule.by_cost.skipping.at_least (now 8)"),
        ),
        (
            plan_of(9, ByCost(Spread(0.2, 0.2, at_least=9), Spread(0.2), 0.4), cost=0.4),
            too_few(9, 3, "lower schedule.by_cost.mixed.at_least (now 9)"),
        ),
        (
            plan_of(4, Listed((1, 2, 3))),
            too_few(4, 5, "shorten schedule.listed.full (now 1, 2, 3)"),
        ),
        (
            plan_of(3, Periodic(4, 1)),
            EVERY + "lower schedule.periodic.warmup (now 4) and raise "
            "schedule.periodic.refresh_every (now 1)",
        ),
        (plan_of(50, Spread(1.0)), EVERY + "lower schedule.spread.full (now 1.0)"),
        (
            plan_of(50, config={"layers": [DENSE]}),
            "what layers names leaves all 4 layers dense",
        ),
        (plan_of(50, Spread(0.3), {"layers": [DENSE]}), None),  # steps are skipped
        (plan_of(None, Periodic(80)), None),  # nobody knows the number of steps
        (
            plan_of(None, Spread(0.3)),
            "a fraction of the steps needs their number, which the pipeline does not tell: spread "
            "makes all of them full",
        ),
    ],
)
def test_the_reason_and_what_would_help(plan, reason):
    found = why_nothing(plan)
    assert (found and found.text) == (reason and f"nothing runs sparse: {reason}")


@pytest.mark.parametrize("warmup", [2, 5, 9])
@pytest.mark.parametrize("more", [{}, {"refresh_every": 2}])
def test_the_fewest_steps_are_enough_and_one_less_is_not(warmup, more):
    form = Periodic(warmup, **more)
    sparse = [n for n in range(1, 20) if {*CACHED} & {*plan_of(n, form).actions()}]
    for steps in range(1, 20):
        reason = why_nothing(plan_of(steps, form))
        assert (reason is None) == (steps in sparse)
        assert reason is None or f"needs at least {sparse[0]};" in reason.text


def test_a_transformer_that_is_called_late():
    assert why_nothing(plan_of(10), 8, "transformer_2").text == (
        "nothing runs sparse: transformer_2 is first called at step 8 of 10 (from 0), and the "
        "schedule needs 3 calls in a row; take more steps"
    )
    assert why_nothing(plan_of(10), 7) is None


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, True),
        (OFF, False),
        ({"mlp.density": "dense"}, True),
        ({"schedule.actions": ["dense", "refresh"]}, False),
        ({**OFF, "schedule.actions": ["dense", "refresh", "sparse"]}, False),
        ({**OFF, "schedule.actions": ["dense", "skip"]}, True),
        ({**OFF, "schedule.spread.full": 0.3}, True),
        ({**OFF, "schedule.spread": {"full": 0.3, "sparse": 1.0}}, False),
        ({**OFF, "schedule.listed": {"full": [3], "sparse": "others"}}, False),
        ({**OFF, "schedule.listed.full": [3]}, True),
        ({**OFF, "schedule.branches": {"*": {"spread": {"full": 0.3}}}}, True),
        ({**OFF, "schedule.branches": {"*": {"periodic": {}}}}, False),
    ],
)
def test_what_a_config_wants(changes, wanted):
    config = SparsityConfig().override(changes)
    assert wants_sparse(config) is wanted
    assert wanted or why_nothing(SparsityPlan(config, LAYOUT, 1)) is None


def test_a_branch_that_is_full_at_every_step_is_no_reason_where_another_one_skips():
    form = Branches({"*": Listed((3,)), "cond": Spread(1.0)})
    plan = SparsityPlan(SparsityConfig(schedule=ScheduleConfig(form)), LAYOUT, 9, branch="cond")
    assert why_nothing(plan) is None
    unknown = SparsityPlan(SparsityConfig(schedule=ScheduleConfig(form)), LAYOUT, branch="cond")
    assert why_nothing(unknown) is None
