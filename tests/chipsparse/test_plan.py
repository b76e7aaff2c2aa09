"""The schedule: actions by period, by list, by layer."""

import dataclasses
import re

import pytest

from chipsparse import ConfigError, SparsityConfig
from chipsparse.cache.kinds import PARTS
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.plan import Action, SparsityPlan
from chipsparse.profiles.profile import ASSETS, QUALITIES_FILE, load_profile
from tests import schedules

LAYOUT = ModelLayout(
    kinds=(LayerKind("block", layers=4, intermediate_size=100),),
    heads=2,
    head_dim=8,
    batch=1,
    grids=((3, 4, 5),),
)
SHORT = "1 dense, 1 refresh, 2 sparse, 1 skip, 7 sparse; skipped ones with half a forecast"
LETTERS = {action: letter for letter, action in schedules.ACTIONS.items()}


def letters(actions):
    return "".join(LETTERS[action] for action in actions)


def config_of(**schedule):
    return SparsityConfig().override({f"schedule.{k}": v for k, v in schedule.items()})


def listed(steps=12, **schedule):
    return SparsityPlan(config_of(**schedule), LAYOUT, steps)


def taken(steps=12, config=None, **schedule):
    return letters(SparsityPlan(config or config_of(**schedule), LAYOUT, steps).actions())


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"refresh_every": 5}, "DRSSSSRSSSSR"),
        ({"refresh_every": 4, "warmup_steps": 4}, "DDDRSSSRSSSD"),
        ({"refresh_every": 3, "warmup_steps": 7}, "DDDDDDRSSRDD"),
        ({"warmup_steps": 40}, "DDDDDDDDDDDD"),
        ({"actions": ["dense", "refresh", "sparse", "skip"]}, "DRSKKKKKKKKK"),
    ],
)
def test_step_actions(schedule, expected):
    plan = listed(**schedule)
    assert letters(map(plan.step_action, range(12))) == expected


def test_first_layers_stay_dense_but_are_skipped_too():
    config = SparsityConfig().override(
        {**schedules.listed("DRSSSKS"), "schedule.first_dense_layers": 2}
    )
    plan = SparsityPlan(config, LAYOUT, 12)
    for part in PARTS:
        found = [plan.action(layer, 3, part).value for layer in range(4)]
        assert found == ["dense"] * 2 + ["sparse"] * 2
        assert plan.action(0, 5, part) is Action.SKIP


def test_layers_have_budgets_of_their_own():
    config = SparsityConfig().override(
        {
            "attention.density": 0.1,
            "mlp.density": 0.3,
            "schedule.first_dense_layers": 1,
            "layers": [
                {"layers": "0,3", "attention": 0.5},  # layer 0 stays dense
                {"layers": 2, "attention": "dense", "mlp": 1.0},
                {"layers": "3", "mlp": "dense"},
            ],
        }
    )
    plan = SparsityPlan(config, LAYOUT, 12)
    assert [plan.density(layer, "attention") for layer in range(4)] == [None, 0.1, None, 0.5]
    assert [plan.density(layer, "mlp") for layer in range(4)] == [None, 0.3, 1.0, None]
    assert [plan.attention_keep_count(layer) for layer in range(4)] == [60, 6, 60, 30]
    assert [plan.mlp_keep_count(layer) for layer in range(4)] == [100, 30, 100, 100]
    assert plan.action(3, 5, "attention") is Action.SPARSE
    assert plan.action(3, 5, "mlp") is Action.DENSE
    off = SparsityPlan(config.override({"attention.density": "dense"}), LAYOUT, 12)
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


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        ("none", "DDDKDKKDKKKK"),
        ("middle", "DDDKDKKRKKSK"),
        ("every_other", "DDDKRKSRKSKS"),
        ("all", "DDRSRSSRSSSS"),
    ],
)
def test_steps_between_listed_full_ones(between, expected):
    """A refresh only where a sparse step comes before the next full one."""
    plan = listed(full_steps=[1, 2, 4, 7], between=between)
    assert letters(plan.actions()) == expected
    assert plan.notes() == []
    assert plan.schedule.full_steps == (0, 1, 2, 4, 7)
    assert plan.is_dense() == (between == "none")
    assert plan.schedule.skips_any == (between != "all")
    off = plan.config.override({"attention.density": "dense", "mlp.density": "dense"})
    assert taken(config=off) == expected.replace("R", "D").replace("S", "D")


def test_a_share_of_the_steps_in_full():
    plan = listed(50, full_share=0.26)
    found = letters(plan.actions())
    assert found == "DDDDDKDKDKKRKSKRKKKSKKRKKKKSKKKRKKKKSKKKKRKKSKKDKK"
    assert plan.describe() == (
        "13 of 50 steps in full, close at the start, one sparse step in each gap of 3 and "
        "more, the rest skipped, then corrected"
    )
    assert taken(1, full_share=0.5) == "D"
    assert taken(2, full_share=0.5) == "DD"
    assert taken(6, full_share=1.0) == "DDDDDD"
    assert taken(9, full_share=0.1, least_full=4, between="none") == "DDKDKKKKD"
    few = listed(4, full_share=0.1, least_full=4)
    assert (few.is_dense(), few.describe(), few.notes()) == (True, "all 4 steps in full", [])
    assert taken(4, full_steps=[0], actions=["dense", "skip"]) == "DKKK"


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (
            {"full_steps": [0, 1, 6], "between": "every_other", "forecast": 0.5},
            "3 of 12 steps in full, as listed, every other step of a gap sparse, the rest skipped "
            "with half a forecast, then corrected",
        ),
        (
            {"full_share": 0.25, "between": "none", "forecast": 1},
            "3 of 12 steps in full, close at the start, the rest skipped with a full forecast, "
            "then corrected",
        ),
        (
            {"full_share": 0.25, "forecast": 0.3, "forecast_after": 0.3, "correct": False},
            "3 of 12 steps in full, close at the start, one sparse step in each gap of 3 "
            "and more, the rest skipped with 0.3 of a forecast from step 4 on",
        ),
        (
            {"full_share": 0.25, "between": "all", "forecast": 0.5},
            "3 of 12 steps in full, close at the start, all others sparse",
        ),
        ({**schedules.listed("DRSSKS")["schedule"], "forecast": 0.5}, SHORT),
    ],
)
def test_lists_are_described_in_one_line(schedule, expected):
    assert listed(**schedule).describe() == expected


def test_with_few_tokens_attention_in_8_bits_is_said_to_be_slower():
    many = dataclasses.replace(LAYOUT, grids=((10, 20, 50),))
    config = config_of().override({"attention.precision": "fp8"})
    (note,) = SparsityPlan(config, LAYOUT, 12).notes()
    assert note == (
        "attention.precision: with 60 tokens attention is slower in 8 bits than in 16 (on an "
        "H200 they pay from about 5,000 on)"
    )
    assert SparsityPlan(config, many, 12).notes() == []


def test_sparse_steps_may_be_listed_too():
    plan = listed(full_steps=[1, 4, 8], between=[5, 7, 10])
    assert letters(plan.actions()) == "DDKKRSKSRKSK"
    assert plan.describe() == (
        "4 of 12 steps in full, as listed, 3 sparse, likewise, the rest skipped, then corrected"
    )
    none = listed(full_steps=[1, 4, 8], between=[])
    assert letters(none.actions()) == "DDKKDKKKDKKK"
    assert none.is_dense()
    assert none.describe() == ("4 of 12 steps in full, as listed, the rest skipped, then corrected")
    (note,) = listed(full_steps=[1], between=[3, 14]).notes()
    assert note == "between 14 are never reached: the last of 12 steps is 11"
    assert not listed(None, full_steps=[1], between=[3]).notes()


def test_what_a_list_cannot_do_is_said():
    (note,) = listed(full_steps=[1, 4, 12, 40]).notes()
    assert note == "full_steps 12, 40 are never reached: the last of 12 steps is 11"
    share = listed(8, full_share=0.26).notes()[0]
    assert share.startswith("full_share 0.26 of only 8 steps lists 2 of them: such shares are made")
    assert listed(50, full_share=0.26).notes() == []
    assert listed(8, full_share=0.26, least_full=4).notes() == []
    plan = listed(full_steps=[6])  # 3 was to be sparse, and there is no refresh yet
    assert letters(plan.actions()) == "DKKDKKRKKSKK"
    (note,) = plan.notes()
    assert note.startswith("step 3 is computed in full: it was to be sparse, and the only full")


@pytest.mark.parametrize("first", [0, 20, 35, 42])
def test_a_share_is_one_of_the_steps_that_run(first):
    """Of image to image, which starts late."""
    schedule = {"full_share": 0.3, "least_full": 8, "between": "none", "forecast_after": 0.2}
    late = SparsityPlan(config_of(**schedule), LAYOUT, 50, first)
    alone = listed(50 - first, **schedule)
    assert letters(late.actions(first)) == letters(alone.actions())
    assert late.schedule.full_steps == tuple(first + step for step in alone.schedule.full_steps)
    assert len(late.schedule.full_steps) == max(8, round(0.3 * (50 - first)))
    for step in range(50 - first):
        assert late.schedule.forecast_share(first + step) == alone.schedule.forecast_share(step)
    named = SparsityPlan(config_of(full_steps=[5, 24, 30, 45]), LAYOUT, 50, first)
    listed_steps = {first, *(step for step in (5, 24, 30, 45) if step > first)}
    assert named.schedule.full_steps == tuple(sorted(listed_steps))


def test_lists_where_the_number_of_steps_is_unknown():
    def found(count=24, **schedule):
        plan = listed(None, **schedule)
        return letters(plan.actions(0, count)), plan.notes()

    taken, (note,) = found(full_share=0.5)
    assert taken == "D" * 24
    assert note.startswith("schedule.full_share needs the number of steps")
    taken, (note,) = found(10, full_steps=[1, 4])
    assert taken == "DDKKRKSKSK"
    assert "every other step is sparse" in note
    assert found(10, full_steps=[1, 4], between="none") == ("DDKKDKKKKK", [])
    assert found(10, full_steps=[1, 4], between="all") == ("DRSSRSSSSS", [])
    assert listed(None, full_steps=[1, 4]).describe() == (
        "3 steps in full, as listed, one sparse step in each gap of 3 and more, the rest skipped, "
        "then corrected"
    )


def test_which_skipped_outputs_are_forecast():
    def forecasts(steps, **schedule):
        schedule = listed(steps, full_steps=[1, 4], **schedule).schedule
        return [step for step in range(6) if schedule.forecast_share(step) == 0.5]

    assert forecasts(12) == []
    assert not listed(forecast=0.5, full_steps=[1, 4], between="all").schedule.forecasts_any
    assert not listed(forecast=0.5).schedule.forecasts_any
    assert not listed(forecast=0.5, forecast_after=1, full_steps=[1, 4]).schedule.forecasts_any
    assert forecasts(12, forecast=0.5) == [0, 1, 2, 3, 4, 5]
    assert forecasts(12, forecast=0.5, forecast_after=0.2) == [3, 4, 5]
    assert forecasts(None, forecast=0.5, forecast_after=0.2) == []


def test_budgets_and_description():
    config = SparsityConfig().override(
        {
            "attention.density": 0.1,
            "attention.random_fraction": 0.05,
            "mlp.density": 0.255,
        }
    )
    plan = SparsityPlan(config, LAYOUT, 12)
    assert plan.attention_keep_count(0) == 6
    assert plan.attention_random_count() == 3
    assert plan.mlp_keep_count(0) == 26
    assert plan.describe() == "1 dense, 1 refresh, 9 sparse, 1 dense"
    assert plan == SparsityPlan(config, LAYOUT, 12)
    assert plan != SparsityPlan(config, LAYOUT, 13)


@pytest.mark.parametrize(
    ("actions", "taken"),
    [
        ("DDRDD", "DDDDD"),  # nobody would read what the refresh records
        ("DDDDD", "DDDDD"),
        ("DRDSK", "DRDSK"),
        ("DRRSR", "DRRSR"),
        ("DRDKD", "DDDKD"),
        ("DKKDK", "DKKDK"),
    ],
)
def test_listed_actions_are_taken(actions, taken):
    config = SparsityConfig().override(schedules.listed(actions))
    plan = SparsityPlan(config, LAYOUT, len(actions))
    assert letters(plan.actions()) == taken


@pytest.mark.parametrize(
    ("first", "expected"), [(0, "DRSSRSSK"), (2, "DDRSSK"), (3, "DRSSK"), (6, "DK")]
)
def test_actions_are_raised_where_their_inputs_are_missing(first, expected):
    """A branch that starts late, as an image-to-image call does, has recorded nothing yet."""
    plan = listed(8, full_steps=[1, 4], between=[2, 3, 5, 6])
    assert letters(plan.actions(first)) == expected


PROFILES = [QUALITIES_FILE, *sorted(ASSETS.glob("*/*.yaml"))]


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_refresh_of_a_quality_is_read_by_a_sparse_step(path):
    for config in load_profile(path).qualities.values():
        for steps in (*range(1, 16), 20, 28, 40, 50, 60):
            for first in {0, steps // 3}:
                found = letters(SparsityPlan(config, LAYOUT, steps).actions(first))
                assert not re.search("R[^S]*(R|$)", found), (steps, first, found)
                assert "S" not in found.partition("R")[0]


@pytest.mark.parametrize("steps", [12, None])
def test_a_refresh_that_nothing_reads_is_a_dense_step(steps):
    def found(**schedule):
        return letters(listed(steps, **schedule).actions(0, 12))

    assert found(full_steps=[1, 4, 5], between=[2, 6]) == "DRSKDRSKKKKK"
    assert found(full_steps=[1, 3], between=[4]) == "DDKRSKKKKKKK"


def test_a_schedule_that_skips_half_of_50_steps():
    """25 skipped steps between four dense ones, as published for column-sparse video models."""
    skipped = [7, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26, 27, 29, 31]
    skipped += [33, 34, 35, 37, 38, 39, 41, 42, 43]
    full = [1, 10, 40]
    sparse = [step for step in range(1, 50) if step not in (*full, *skipped)]
    found = taken(50, full_steps=full, between=sparse)
    assert [step for step, letter in enumerate(found) if letter == "K"] == skipped
    assert [step for step, letter in enumerate(found) if letter == "R"] == [1, 10, 40]
    assert found.count("D") == 1
    assert found.count("S") == 50 - 25 - 4


def test_steps_can_be_skipped_where_nothing_is_sparse():
    off = {"attention.density": "dense", "mlp.density": "dense"}
    config = SparsityConfig().override({**off, **schedules.listed("DRKSKKRSSSSS")})
    assert taken(config=config) == "DDKDKKDDDDDD"
    assert SparsityPlan(config, LAYOUT, 12).is_dense()
