"""The schedule: actions by period, by list, by layer."""

import pytest

from chipsparse import ConfigError, SparsityConfig
from chipsparse.cache_kinds import PARTS
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.plan import Action, SparsityPlan

LAYOUT = ModelLayout(
    kinds=(LayerKind("block", layers=4, mlp_width=100),),
    heads=2,
    head_dim=8,
    batch=1,
    grids=((3, 4, 5),),
)
LETTERS = {Action.DENSE: "D", Action.REFRESH: "R", Action.SPARSE: "S", Action.SKIP: "K"}


def actions(steps=12, **schedule):
    config = SparsityConfig().override({f"schedule.{k}": v for k, v in schedule.items()})
    plan = SparsityPlan(config, LAYOUT, steps)
    return "".join(LETTERS[plan.step_action(step)] for step in range(steps))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"refresh_every": 5}, "DRSSSSRSSSSR"),
        ({"refresh_every": 4, "warmup_steps": 4}, "DDDRSSSRSSSR"),
        ({"refresh_steps": [3, 7]}, "DRSRSSSRSSSS"),
        ({"refresh_steps": []}, "DRSSSSSSSSSS"),
        ({"refresh_every": 5, "skip_steps": [0, 1, 4, 6]}, "DRSSKSKSSSSR"),
        ({"refresh_every": 5, "dense_steps": [6, 9]}, "DRSSSSDSSDSR"),
        ({"refresh_every": 5, "final_dense_steps": 3, "skip_steps": [8, 10]}, "DRSSSSRSKDDD"),
        ({"final_dense_steps": 20}, "DDDDDDDDDDDD"),
        ({"actions": ["dense", "refresh", "sparse", "skip"]}, "DRSKKKKKKKKK"),
    ],
)
def test_step_actions(schedule, expected):
    assert actions(**schedule) == expected


def test_first_layers_stay_dense_but_are_skipped_too():
    config = SparsityConfig().override(
        {"schedule.first_dense_layers": 2, "schedule.skip_steps": [5]}
    )
    plan = SparsityPlan(config, LAYOUT, 12)
    for part in PARTS:
        found = [plan.action(layer, 3, part).value for layer in range(4)]
        assert found == ["dense"] * 2 + ["sparse"] * 2
        assert plan.action(0, 5, part) is Action.SKIP


def test_layers_have_budgets_of_their_own():
    config = SparsityConfig().override(
        {
            "attention.keep_fraction": 0.1,
            "mlp.keep_fraction": 0.3,
            "schedule.first_dense_layers": 1,
            "layers": [
                {"layers": "0,3", "attention": 0.5},  # layer 0 stays dense
                {"layers": 2, "attention": "dense", "mlp": 1.0},
                {"layers": "3", "mlp": "dense"},
            ],
        }
    )
    plan = SparsityPlan(config, LAYOUT, 12)
    assert [plan.keep_fraction(layer, "attention") for layer in range(4)] == [None, 0.1, None, 0.5]
    assert [plan.keep_fraction(layer, "mlp") for layer in range(4)] == [None, 0.3, 1.0, None]
    assert [plan.attention_keep_count(layer) for layer in range(4)] == [60, 6, 60, 30]
    assert [plan.mlp_keep_count(layer) for layer in range(4)] == [100, 30, 100, 100]
    assert plan.action(3, 5, "attention") is Action.SPARSE
    assert plan.action(3, 5, "mlp") is Action.DENSE
    off = SparsityPlan(config.override({"attention.enabled": False}), LAYOUT, 12)
    assert not any(off.is_sparse(layer, "attention") for layer in range(4))


def test_a_layer_that_the_model_does_not_have_is_refused():
    config = SparsityConfig().override({"layers": [{"layers": 3}, {"layers": "1-4", "mlp": 0.1}]})
    with pytest.raises(ConfigError) as error:
        SparsityPlan(config, LAYOUT, 12)
    assert str(error.value) == (
        "layers[1].layers: names layer 4, but this model has 4 layers, 0 to 3"
    )


def test_all_dense_plans_are_recognized():
    assert SparsityPlan(SparsityConfig.dense(), LAYOUT, 50).is_dense()
    listed = SparsityConfig().override({"schedule.actions": ["dense"]})
    assert SparsityPlan(listed, LAYOUT, None).is_dense()
    assert not SparsityPlan(SparsityConfig(), LAYOUT, 50).is_dense()
    assert SparsityPlan(SparsityConfig(), LAYOUT, 1).is_dense()


def test_budgets_and_description():
    config = SparsityConfig().override(
        {
            "attention.keep_fraction": 0.1,
            "attention.random_fraction": 0.05,
            "mlp.keep_fraction": 0.255,
        }
    )
    plan = SparsityPlan(config, LAYOUT, 12)
    assert plan.attention_keep_count(0) == 6
    assert plan.attention_random_count() == 3
    assert plan.mlp_keep_count(0) == 26
    assert plan.describe() == "1 dense, 1 refresh, 9 sparse, 1 refresh"
    assert plan == SparsityPlan(config, LAYOUT, 12)
    assert plan != SparsityPlan(config, LAYOUT, 13)


@pytest.mark.parametrize(
    ("actions", "taken"),
    [
        ("SSSSS", "DRSSS"),
        ("RSSRD", "DRSRD"),
        ("DKSSR", "DRSSR"),
        ("DDRDD", "DDDDD"),  # nobody would read what the refresh records
        ("DDDDD", "DDDDD"),
        ("DRDSK", "DRDSK"),
    ],
)
def test_actions_are_raised_where_their_inputs_are_missing(actions, taken):
    names = {letter: action.value for action, letter in LETTERS.items()}
    config = SparsityConfig().override({"schedule.actions": [names[letter] for letter in actions]})
    plan = SparsityPlan(config, LAYOUT, len(actions))
    assert "".join(LETTERS[action] for action in plan.actions()) == taken
