"""Why nothing of a generation is sparse, as far as its plan tells, and what would help."""

import pytest

from chipsparse import SparsityConfig
from chipsparse.report.nothing_sparse import wants_sparse, why_nothing
from chipsparse.sparse.plan import CACHED, SparsityPlan
from tests.chipsparse.sparse.test_plan import LAYOUT, OFF

EVERY = "the schedule computes every step in full; "
DENSE = {"layers": "1-3", "attention": "dense", "mlp": "dense"}
ACTIONS = ["dense", "dense", "refresh", "sparse"]


def plan_of(steps, config=(), **schedule):
    changes = {f"schedule.{k}": v for k, v in {"first_dense_layers": 0, **schedule}.items()}
    return SparsityPlan(SparsityConfig().override(changes | dict(config)), LAYOUT, steps)


def too_few(steps, fewest, changes=""):
    few = "1 step is" if steps == 1 else f"{steps} steps are"
    more = f"take more steps, or {changes}" if changes else "take more steps"
    return f"{few} too few for the schedule, which needs at least {fewest}; {more}"


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (plan_of(1), too_few(1, 3)),
        (plan_of(6, warmup_steps=8), too_few(6, 11, "lower schedule.warmup_steps (now 8)")),
        (plan_of(3, actions=ACTIONS), too_few(3, 4, "change schedule.actions")),
        (plan_of(4, full_share=0.9), too_few(4, 5, "lower schedule.full_share (now 0.9)")),
        (
            plan_of(8, full_share=0.2, least_full=8),
            too_few(8, 9, "lower schedule.least_full (now 8)"),
        ),
        (
            plan_of(4, full_steps=[1, 2, 3], least_full=8),
            too_few(4, 5, "shorten schedule.full_steps (now 1, 2, 3)"),
        ),
        (
            plan_of(3, warmup_steps=4, refresh_every=1),
            EVERY + "lower schedule.warmup_steps (now 4) and raise schedule.refresh_every (now 1)",
        ),
        (plan_of(50, full_share=1.0), EVERY + "lower schedule.full_share (now 1.0)"),
        (
            plan_of(50, first_dense_layers=9),
            "schedule.first_dense_layers is 9, and the model has 4 layers",
        ),
        (
            plan_of(50, {"layers": [DENSE]}, first_dense_layers=1),
            "what layers and schedule.first_dense_layers name leaves all 4 layers dense",
        ),
        (plan_of(50, full_share=0.3, first_dense_layers=9), None),  # steps are skipped
        (plan_of(None, warmup_steps=80), None),  # nobody knows the number of steps
    ],
)
def test_the_reason_and_what_would_help(plan, reason):
    assert why_nothing(plan) == (reason and f"nothing runs sparse: {reason}")


@pytest.mark.parametrize("warmup", [2, 5, 9])
@pytest.mark.parametrize("more", [{}, {"refresh_every": 2}])
def test_the_fewest_steps_are_enough_and_one_less_is_not(warmup, more):
    schedule = {"warmup_steps": warmup, **more}
    sparse = [n for n in range(1, 20) if {*CACHED} & {*plan_of(n, **schedule).actions()}]
    for steps in range(1, 20):
        sentence = why_nothing(plan_of(steps, **schedule))
        assert (sentence is None) == (steps in sparse)
        assert sentence is None or f"needs at least {sparse[0]};" in sentence


def test_a_transformer_that_is_called_late():
    assert why_nothing(plan_of(10), 8, "transformer_2") == (
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
        ({**OFF, "schedule.full_share": 0.3}, True),
        ({**OFF, "schedule.full_share": 0.3, "schedule.sparse_steps": 1.0}, False),
    ],
)
def test_what_a_config_wants(changes, wanted):
    config = SparsityConfig().override(changes)
    assert wants_sparse(config) is wanted
    assert wanted or why_nothing(SparsityPlan(config, LAYOUT, 1)) is None
