"""Why nothing of a generation is sparse, as far as its plan tells, and what would help."""

import pytest

from chipsparse import SparsityConfig
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.plan import CACHED, SparsityPlan
from chipsparse.report.nothing_sparse import wants_sparse, why_nothing

LAYOUT = ModelLayout((LayerKind("blocks", 4, 100),), 2, 8, 1, grids=((3, 4, 5),))
OFF = {"attention.density": "dense", "mlp.density": "dense"}
EVERY = "the schedule computes every step in full; "
DENSE = {"layers": "1-3", "attention": "dense", "mlp": "dense"}


def plan_of(steps, config=(), **schedule):
    changes = {f"schedule.{k}": v for k, v in {"first_dense_layers": 0, **schedule}.items()}
    return SparsityPlan(SparsityConfig().override(changes | dict(config)), LAYOUT, steps)


@pytest.mark.parametrize(
    ("steps", "schedule", "fewest", "changes"),
    [
        (6, {"warmup_steps": 8}, 11, "lower schedule.warmup_steps (now 8)"),
        (2, {}, 3, ""),
        (3, {"actions": ["dense", "dense", "refresh", "sparse"]}, 4, "change schedule.actions"),
        (4, {"full_share": 0.9}, 5, "lower schedule.full_share (now 0.9)"),
        (8, {"full_share": 0.2, "least_full": 8}, 9, "lower schedule.least_full (now 8)"),
        (
            4,
            {"full_steps": [1, 2, 3], "least_full": 8},
            5,
            "shorten schedule.full_steps (now 1, 2, 3)",
        ),
    ],
)
def test_steps_that_are_too_few(steps, schedule, fewest, changes):
    sentence = (
        f"nothing runs sparse: {steps} steps are too few for the schedule, which needs at least "
        f"{fewest}; take more steps" + (f", or {changes}" if changes else "")
    )
    assert why_nothing(plan_of(steps, **schedule)) == sentence


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (plan_of(1), "1 step is too few for the schedule, which needs at least 3; "),
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
    ],
)
def test_other_reasons(plan, reason):
    assert why_nothing(plan).startswith(f"nothing runs sparse: {reason}")


def test_nothing_to_say_where_steps_are_skipped_or_nobody_knows_their_number():
    assert why_nothing(plan_of(50, full_share=0.3, first_dense_layers=9)) is None
    assert why_nothing(plan_of(None, warmup_steps=80)) is None


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
        ({**OFF, "schedule.full_share": 0.3, "schedule.between": "all"}, False),
    ],
)
def test_what_a_config_wants(changes, wanted):
    config = SparsityConfig().override(changes)
    assert wants_sparse(config) is wanted
    assert wanted or why_nothing(SparsityPlan(config, LAYOUT, 1)) is None
