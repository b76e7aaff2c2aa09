"""The schedule: actions by period, by list, by layer."""

import dataclasses
import re

import pytest

from chipsparse import ConfigError, SparsityConfig
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.sparse.plan import SparsityPlan
from tests import schedules
from tests.schedules import letters_of

LAYOUT = ModelLayout((LayerKind("block", 4, 100),), 2, 8, 1, ((3, 4, 5),))
WIDE_LAYOUT = ModelLayout((LayerKind("block", 2, 512),), 2, 64, 1, ((4, 8, 8),))


def config_of(**schedule):
    return SparsityConfig().override({f"schedule.{k}": v for k, v in schedule.items()})


def listed(steps=12, **schedule):
    return SparsityPlan(config_of(**schedule), LAYOUT, steps)


OFF = {"attention.density": "dense", "mlp.density": "dense"}
# Steps, schedule and the actions of a guidance branch.
TAKEN = [
    (12, {"refresh_every": 5}, "DRSSSSRSSSSD"),
    (12, {"refresh_every": 4, "warmup_steps": 4}, "DDDRSSSRSSSD"),
    (12, {"warmup_steps": 40}, "DDDDDDDDDDDD"),
    (12, {"full_steps": [1, 2, 4, 7], "sparse_steps": 0.0}, "DDDKDKKDKKKK"),
    (12, {"full_steps": [1, 2, 4, 7], "sparse_steps": 0.1}, "DDDKDKKRKSKK"),
    (12, {"full_steps": [1, 2, 4, 7], "sparse_steps": 0.25}, "DDDKRSKRKSSK"),
    (12, {"full_steps": [1, 2, 4, 7], "sparse_steps": 1.0}, "DDRSRSSRSSSS"),
    (12, {"full_steps": [1, 4, 8], "sparse_steps": [5, 7, 10]}, "DDKKRSKSRKSK"),
    (12, {"full_steps": [6], "sparse_steps": [3, 9]}, "DKKDKKRKKSKK"),  # 3 has no refresh to read
    (12, {"full_share": 0.3, "sparse_steps": 0.35}, "DRSKRSKSSKDK"),
    (8, {"full_share": 0.3, "least_full": 7, "sparse_steps": 0.1}, "DRSRSSSS"),
    (8, {"full_share": 1.0, "sparse_steps": 0.5}, "DDDDDDDD"),
    (5, {"full_share": 0.3, "sparse_steps": 0.1}, "DRSRS"),
    (4, {"full_share": 0.3, "least_full": 4, "sparse_steps": 0.1}, "DRSS"),
    (3, {"full_share": 0.3, "sparse_steps": 0.1}, "DRS"),
    (2, {"full_share": 0.3, "sparse_steps": 0.1}, "DD"),
    (2, {"full_share": 0.5}, "DD"),
    (6, {"full_share": 1.0}, "DDDDDD"),
    (9, {"full_share": 0.1, "least_full": 4, "sparse_steps": 0.0}, "DDKDKKKKD"),
    # Without a number of steps there is no share of them.
    (None, {"full_share": 0.5}, "DDDDDDDDDDDD"),
    (None, {"full_steps": [1, 4], "sparse_steps": 0.5}, "DDKKDKKKKKKK"),
    (None, {"full_steps": [1, 4], "sparse_steps": 1.0}, "DRSSRSSSSSSS"),
    # A refresh that no sparse step reads is a dense step.
    (12, {"full_steps": [1, 4, 5], "sparse_steps": [2, 6]}, "DRSKDRSKKKKK"),
    (None, {"full_steps": [1, 4, 5], "sparse_steps": [2, 6]}, "DRSKDRSKKKKK"),
    (5, schedules.listed("DRDSK")["schedule"], "DRDSK"),
    (5, schedules.listed("DRRSR")["schedule"], "DRRSR"),
    (5, schedules.listed("DRDKD")["schedule"], "DDDKD"),
    (4, {"full_steps": [0], "actions": ["dense", "skip"]}, "DKKK"),
]


@pytest.mark.parametrize(("steps", "schedule", "expected"), TAKEN)
def test_actions_of_schedules(steps, schedule, expected):
    plan = listed(steps, **schedule)
    off = SparsityPlan(plan.config.override(OFF), LAYOUT, steps)
    assert off.is_dense()
    assert letters_of(off.step_actions[: len(expected)]) == re.sub("[RS]", "D", expected)
    if steps is None:
        assert letters_of(plan.step_actions[:12]) == expected
    else:
        assert letters_of(plan.actions()) == expected
        assert plan.is_dense() == ("S" not in expected)
        assert plan.schedule.skips_any == ("K" in expected)


def test_layers_have_budgets_of_their_own():
    layers = [
        {"layers": "0,3", "attention": 0.5},  # layer 0 stays dense
        {"layers": 2, "attention": "dense", "mlp": 1.0},
        {"layers": "3", "mlp": "dense"},
    ]
    changes = {"attention.density": 0.1, "mlp.density": 0.3, "schedule.first_dense_layers": 1}
    config = SparsityConfig().override({**changes, "layers": layers})
    plan = SparsityPlan(config, LAYOUT, 12)
    assert [plan.density(layer, "attention") for layer in range(4)] == [None, 0.1, None, 0.5]
    assert [plan.density(layer, "mlp") for layer in range(4)] == [None, 0.3, 1.0, None]
    assert [plan.attention_keep_count(layer) for layer in range(4)] == [60, 6, 60, 30]
    assert [plan.mlp_keep_count(layer) for layer in range(4)] == [100, 30, 100, 100]
    first = dict.fromkeys([(0, "attention"), (0, "mlp")], "schedule.first_dense_layers is 1")
    assert plan.dense == first | dict.fromkeys([(2, "attention"), (3, "mlp")], NAMED)
    off = SparsityPlan(config.override({"attention.density": "dense"}), LAYOUT, 12)
    never = {(layer, "attention"): "attention.density is dense" for layer in range(4)}
    assert off.dense == {(0, "mlp"): first[0, "mlp"], (3, "mlp"): NAMED, **never}
    with pytest.raises(ConfigError) as error:
        SparsityPlan(config, dataclasses.replace(LAYOUT, kinds=(LayerKind("block", 3, 8),)), 12)
    said = "layers[0].layers: names layer 3, but this model has 3 layers, 0 to 2"
    assert str(error.value) == said


NAMED = "layers names it dense"
REST = "the rest skipped, then corrected"
# Steps, schedule, how it is described, and the beginning of its note, if it has one.
DESCRIBED = [
    (
        12,
        {"full_steps": [0, 1, 6], "sparse_steps": 0.5, "forecast": 1},
        "3 of 12 steps in full, as listed, 6 between them sparse, the rest skipped "
        "with a full forecast, then corrected",
        None,
    ),
    (
        12,
        {"full_share": 0.25, "forecast": 0.3, "forecast_after": 0.3, "correct": False},
        "3 of 12 steps in full, close at the start, "
        "the rest skipped with 0.3 of a forecast from step 4 on",
        "full_share 0.25 of only 12 steps lists 3 of them: such shares are made for some 50",
    ),
    (
        12,
        {**schedules.listed("DRSSKS")["schedule"], "forecast": 0.5},
        "1 dense, 1 refresh, 2 sparse, 1 skip, 7 sparse; skipped ones with half a forecast",
        None,
    ),
    (4, {"full_share": 0.1, "least_full": 4}, "all 4 steps in full", None),
    (
        12,
        {"full_steps": [1, 12, 40], "sparse_steps": [3]},
        f"2 of 12 steps in full, as listed, 1 between them sparse, {REST}",
        "full_steps 12, 40 are never reached: the last of 12 steps is 11",
    ),
    (
        12,
        {"full_steps": [6], "sparse_steps": [3, 9]},
        f"2 of 12 steps in full, as listed, 2 between them sparse, {REST}",
        "step 3 is computed in full: it was to be sparse, and the only full step before it is",
    ),
    (
        None,
        {"full_steps": [1, 4], "sparse_steps": 0.5},
        f"3 steps in full, as listed, {REST}",
        "a share of the steps needs their number, which the pipeline does not tell",
    ),
    (None, {"full_share": 0.5}, "number of steps unknown", "a share of the steps needs their"),
]


@pytest.mark.parametrize(("steps", "schedule", "text", "note"), DESCRIBED)
def test_a_schedule_in_words_and_what_it_cannot_do(steps, schedule, text, note):
    plan = listed(steps, **schedule)
    assert plan.describe() == text
    assert len(plan.notes()) == (note is not None)
    assert "".join(plan.notes()).startswith(note or "")


def test_with_few_tokens_attention_in_8_bits_is_said_to_be_slower():
    many = dataclasses.replace(LAYOUT, grids=((10, 20, 50),))
    config = SparsityConfig().override({"attention.precision": "fp8"})
    assert SparsityPlan(config, LAYOUT, 12).notes() == [
        "attention.precision: with 60 tokens attention is slower in 8 bits than in 16 (on an "
        "H200 they pay from about 5,000 on)",
    ]
    assert SparsityPlan(config, many, 12).notes() == []


@pytest.mark.parametrize("first", [0, 20, 35, 42])
def test_a_share_is_one_of_the_steps_that_run(first):
    """Of image to image, which starts late."""
    schedule = {"full_share": 0.3, "least_full": 8, "sparse_steps": 0.0, "forecast_after": 0.2}
    late = SparsityPlan(config_of(**schedule), LAYOUT, 50, first)
    alone = listed(50 - first, **schedule)
    assert letters_of(late.actions(first)) == letters_of(alone.actions())
    assert late.schedule.full_steps == tuple(first + step for step in alone.schedule.full_steps)
    assert len(late.schedule.full_steps) == max(8, round(0.3 * (50 - first)))
    for step in range(50 - first):
        assert late.schedule.forecast_share(first + step) == alone.schedule.forecast_share(step)
    named = SparsityPlan(config_of(full_steps=[5, 24, 30, 45]), LAYOUT, 50, first)
    listed_steps = {first, *(step for step in (5, 24, 30, 45) if step > first)}
    assert named.schedule.full_steps == tuple(sorted(listed_steps))


def test_which_skipped_outputs_are_forecast():
    def forecasts(steps, **schedule):
        schedule = listed(steps, full_steps=[1, 4], **schedule).schedule
        return [step for step in range(6) if schedule.forecast_share(step) == 0.5]

    assert forecasts(12) == []
    assert not listed(forecast=0.5).schedule.forecasts_any
    for changes in ({"sparse_steps": 1.0}, {"forecast_after": 1}):
        assert not listed(forecast=0.5, full_steps=[1], **changes).schedule.forecasts_any
    assert forecasts(12, forecast=0.5) == [0, 1, 2, 3, 4, 5]
    assert forecasts(12, forecast=0.5, forecast_after=0.2) == [3, 4, 5]
    assert forecasts(None, forecast=0.5, forecast_after=0.2) == []


@pytest.mark.parametrize(
    ("first", "expected"),
    [(0, "DRSSRSSK"), (2, "DDRSSK"), (3, "DRSSK"), (6, "DK")],
)
def test_actions_are_raised_where_their_inputs_are_missing(first, expected):
    """A branch that starts late, as an image-to-image call does, has recorded nothing yet."""
    plan = listed(8, full_steps=[1, 4], sparse_steps=[2, 3, 5, 6])
    assert letters_of(plan.actions(first)) == expected


def test_layers_are_numbered_kind_after_kind():
    kinds = LayerKind("double", 19, 12288), LayerKind("single", 38, 6000)
    layout = dataclasses.replace(LAYOUT, kinds=kinds)
    assert [layout.kind(n).name for n in range(57)] == ["double"] * 19 + ["single"] * 38
    for layer in (-1, 57):
        with pytest.raises(ValueError, match=f"from 0 to 56, got {layer}"):
            layout.kind(layer)
