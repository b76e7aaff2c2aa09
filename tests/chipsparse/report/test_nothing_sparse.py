"""Why nothing of a generation is sparse, as far as its plan tells, and what would help."""

import pytest

from chipsparse import SparsityConfig
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.plan import CACHED, SparsityPlan
from chipsparse.report.nothing_sparse import wants_sparse, why_nothing, why_nothing_was

LAYOUT = ModelLayout((LayerKind("blocks", 4, 100),), 2, 8, 1, grids=((3, 4, 5),))
OFF = {"attention.density": "dense", "mlp.density": "dense"}


def plan_of(steps, first_dense_layers=0, **schedule):
    schedule["first_dense_layers"] = first_dense_layers
    config = SparsityConfig().override({f"schedule.{k}": v for k, v in schedule.items()})
    return SparsityPlan(config, LAYOUT, steps)


@pytest.mark.parametrize(
    ("steps", "schedule", "reason"),
    [
        (
            6,
            {"warmup_steps": 8},
            "6 steps are too few for the schedule, which needs at least 11; take more steps, or "
            "lower schedule.warmup_steps (now 8)",
        ),
        (2, {}, "2 steps are too few for the schedule, which needs at least 3; take more steps"),
        (1, {}, "1 step is too few for the schedule, which needs at least 3; take more steps"),
        (
            50,
            {"refresh_every": 1},
            "the schedule computes every step in full; raise schedule.refresh_every (now 1)",
        ),
        (
            3,
            {"actions": ["dense", "dense", "refresh", "sparse"]},
            "3 steps are too few for the schedule, which needs at least 4; take more steps, or "
            "change schedule.actions",
        ),
        (
            2,
            {"full_share": 0.9},
            "2 steps are too few for the schedule, which needs at least 5; take more steps",
        ),
        (
            4,
            {"full_share": 0.9},
            "4 steps are too few for the schedule, which needs at least 5; take more steps, or "
            "lower schedule.full_share (now 0.9)",
        ),
        (
            4,
            {"full_steps": [1, 2, 3, 9]},
            "4 steps are too few for the schedule, which needs at least 5; take more steps, or "
            "shorten schedule.full_steps (now 1, 2, 3, 9)",
        ),
        (
            8,
            {"full_share": 0.2, "least_full": 8},
            "8 steps are too few for the schedule, which needs at least 9; take more steps, or "
            "lower schedule.least_full (now 8)",
        ),
        (
            4,
            {"full_steps": [1, 2, 3], "least_full": 8},
            "4 steps are too few for the schedule, which needs at least 5; take more steps, or "
            "shorten schedule.full_steps (now 1, 2, 3)",
        ),
        (
            50,
            {"full_share": 1.0},
            "the schedule computes every step in full; lower schedule.full_share (now 1.0)",
        ),
        (50, {"first_dense_layers": 9}, "schedule.first_dense_layers is 9, and the model has 4 la"),
    ],
)
def test_reasons(steps, schedule, reason):
    assert why_nothing(plan_of(steps, **schedule)).startswith(f"nothing runs sparse: {reason}")


@pytest.mark.parametrize(
    ("steps", "schedule"),
    [
        (50, {}),
        (3, {}),
        (11, {"warmup_steps": 8}),
        (None, {"warmup_steps": 80}),
        (50, {"full_share": 0.3, "first_dense_layers": 9}),  # steps are skipped
    ],
)
def test_nothing_to_say_where_a_step_is_sparse_or_nobody_knows(steps, schedule):
    assert why_nothing(plan_of(steps, **schedule)) is None


@pytest.mark.parametrize("warmup", [2, 5, 9])
@pytest.mark.parametrize("more", [{}, {"refresh_every": 2}])
def test_the_fewest_steps_are_enough_and_one_less_is_not(warmup, more):
    schedule = {"warmup_steps": warmup, **more}
    sparse = [
        n
        for n in range(1, 20)
        if any(action in CACHED for action in plan_of(n, **schedule).actions())
    ]
    for steps in range(1, 20):
        said = why_nothing(plan_of(steps, **schedule))
        assert (said is None) == (steps in sparse)
        assert said is None or f"needs at least {sparse[0]};" in said


def test_a_transformer_that_is_called_late():
    said = why_nothing(plan_of(10), 8, "transformer_2")
    assert said == (
        "nothing runs sparse: transformer_2 is first called at step 8 of 10 (from 0), and the "
        "schedule needs 3 calls in a row; take more steps"
    )
    assert why_nothing(plan_of(10), 7) is None


def test_layers_that_are_all_named_dense():
    budgets = [{"layers": "1-3", "attention": "dense", "mlp": "dense"}]
    config = SparsityConfig().override({"layers": budgets, "schedule.first_dense_layers": 1})
    assert why_nothing(SparsityPlan(config, LAYOUT, 50)) == (
        "nothing runs sparse: what layers and schedule.first_dense_layers name leaves all 4 layers "
        "dense"
    )


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, True),
        (OFF, False),
        ({"mlp.density": "dense"}, True),
        ({"schedule.actions": ["dense"]}, False),
        ({"schedule.actions": ["dense", "refresh"]}, False),
        ({"schedule.actions": ["dense", "refresh", "sparse"]}, True),
        ({**OFF, "schedule.actions": ["dense", "refresh", "sparse"]}, False),
        ({**OFF, "schedule.actions": ["dense", "skip"]}, True),
        ({**OFF, "schedule.full_share": 0.3}, True),
        ({**OFF, "schedule.full_share": 0.3, "schedule.between": "all"}, False),
    ],
)
def test_what_a_config_wants(changes, wanted):
    config = SparsityConfig().override(changes)
    assert wants_sparse(config) is wanted
    if not wanted:
        assert why_nothing(SparsityPlan(config, LAYOUT, 1)) is None


def test_behind_a_generation_whose_number_of_steps_was_not_known():
    assert "needs at least 11" in why_nothing_was(plan_of(None, warmup_steps=8), 6)
