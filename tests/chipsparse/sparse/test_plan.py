"""The schedule: actions by period, by list, by layer."""

import dataclasses
import re

import pytest

from chipsparse import (
    Actions,
    Branches,
    ConfigError,
    Listed,
    Periodic,
    ScheduleConfig,
    SparsityConfig,
    Spread,
)
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.sparse.plan import SparsityPlan
from chipsparse.sparse.plan_notes import plan_notes
from tests import schedules
from tests.schedules import letters_of

LAYOUT = ModelLayout((LayerKind("block", 4, 100),), 2, 8, 1, ((3, 4, 5),))
WIDE_LAYOUT = ModelLayout((LayerKind("block", 2, 512),), 2, 64, 1, ((4, 8, 8),))


def config_of(form, **fields):
    """A config with a form of the schedule, or with listed actions by their letters."""
    form = Actions(schedules.listed(form)["schedule"]["actions"]) if isinstance(form, str) else form
    return SparsityConfig(schedule=ScheduleConfig(form, **fields))


def planned(steps, form, **fields):
    return SparsityPlan(config_of(form, **fields), LAYOUT, steps)


OFF = {"attention.density": "dense", "mlp.density": "dense"}
# Steps, form and the actions of a guidance branch.
TAKEN = [
    (12, Periodic(refresh_every=5), "DRSSSSRSSSSD"),
    (12, Periodic(4, 4), "DDDRSSSRSSSD"),
    (12, Periodic(40), "DDDDDDDDDDDD"),
    (12, Listed((1, 2, 4, 7)), "DDDKDKKDKKKK"),
    (12, Listed((1, 2, 4, 7), (9,)), "DDDKDKKRKSKK"),
    (12, Listed((1, 2, 4, 7), (5, 9, 10)), "DDDKRSKRKSSK"),
    (12, Listed((1, 2, 4, 7), "others"), "DDRSRSSRSSSS"),
    (12, Listed((1, 4, 8), (5, 7, 10)), "DDKKRSKSRKSK"),
    (12, Listed((6,), (3, 9)), "DKKDKKRKKSKK"),  # 3 has no refresh to read
    (12, Spread(0.3, 0.35), "DRSKRSKSSKDK"),
    (8, Spread(0.3, 0.1, 7), "DRSRSSSS"),
    (8, Spread(1.0, 0.5), "DDDDDDDD"),
    (5, Spread(0.3, 0.1), "DRSRS"),
    (4, Spread(0.3, 0.1, 4), "DRSS"),
    (3, Spread(0.3, 0.1), "DRS"),
    (2, Spread(0.3, 0.1), "DD"),
    (2, Spread(0.5), "DD"),
    (6, Spread(1.0), "DDDDDD"),
    (9, Spread(0.1, at_least=4), "DDKDKKKKD"),
    (12, Spread(0.3, 1.0), "DRSSRSSSSSRS"),
    # Without a number of steps there is no fraction of them.
    (None, Spread(0.5), "DDDDDDDDDDDD"),
    (None, Listed((1, 4)), "DDKKDKKKKKKK"),
    (None, Listed((1, 4), "others"), "DRSSRSSSSSSS"),
    # A refresh that no sparse step reads is a dense step.
    (12, Listed((1, 4, 5), (2, 6)), "DRSKDRSKKKKK"),
    (None, Listed((1, 4, 5), (2, 6)), "DRSKDRSKKKKK"),
    (5, "DRDSK", "DRDSK"),
    (5, "DRRSR", "DRRSR"),
    (5, "DRDKD", "DDDKD"),
    (4, "DK", "DKKK"),
]


@pytest.mark.parametrize(("steps", "form", "expected"), TAKEN)
def test_actions_of_schedules(steps, form, expected):
    plan = planned(steps, form)
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
        {"index": "0", "attention": "dense", "mlp": "dense"},
        {"index": 2, "attention": "dense", "mlp": 1.0},
        {"index": "3", "attention": 0.5, "mlp": "dense"},
    ]
    changes = {"attention.density": 0.1, "mlp.density": 0.3}
    config = SparsityConfig().override({**changes, "layers": layers})
    plan = SparsityPlan(config, LAYOUT, 12)
    assert [plan.density(layer, "attention") for layer in range(4)] == [None, 0.1, None, 0.5]
    assert [plan.density(layer, "mlp") for layer in range(4)] == [None, 0.3, 1.0, None]
    assert [plan.attention_keep_count(layer) for layer in range(4)] == [60, 6, 60, 30]
    assert [plan.mlp_keep_count(layer) for layer in range(4)] == [100, 30, 100, 100]
    named = [(0, "attention"), (0, "mlp"), (2, "attention"), (3, "mlp")]
    assert plan.dense == dict.fromkeys(named, NAMED)
    off = SparsityPlan(config.override({"attention.density": "dense"}), LAYOUT, 12)
    never = {(layer, "attention"): "attention.density is dense" for layer in range(4)}
    assert off.dense == {(0, "mlp"): NAMED, (3, "mlp"): NAMED, **never}
    with pytest.raises(ConfigError) as error:
        SparsityPlan(config, dataclasses.replace(LAYOUT, kinds=(LayerKind("block", 3, 8),)), 12)
    said = "layers[2].index: names layer 3, but this model has 3 layers, 0 to 2"
    assert str(error.value) == said


NAMED = "layers names it dense"
REST = "the rest skipped, then corrected"
# Steps, form, further fields, the words, and the beginning of its note, if it has one.
DESCRIBED = [
    (
        12,
        Listed((0, 1, 6), (3, 4, 5, 7, 9, 11)),
        {"forecast": 1},
        "3 of 12 steps in full, as listed, 6 between them sparse, the rest skipped "
        "with a full forecast, then corrected",
        None,
    ),
    (
        12,
        Spread(0.25),
        {"forecast": 0.3, "forecast_after": 0.3, "correct": False},
        "3 of 12 steps in full, close at the start, "
        "the rest skipped with 0.3 of a forecast from step 4 on",
        "spread.full 0.25 of only 12 steps lists 3 of them: such fractions are made for some 50",
    ),
    (
        12,
        "DRSSKS",
        {"forecast": 0.5},
        "1 dense, 1 refresh, 2 sparse, 1 skip, 7 sparse; skipped ones with half a forecast",
        None,
    ),
    (4, Spread(0.1, at_least=4), {}, "all 4 steps in full", None),
    (8, Spread(0.1, 0.1), {}, "3 of 8 steps in full, at the start, all others sparse", None),
    (
        12,
        Listed((1, 12, 40), (3, 13)),
        {},
        f"2 of 12 steps in full, as listed, 1 between them sparse, {REST}",
        "the listed steps 12, 13, 40 are never reached: the last of 12 steps is 11",
    ),
    (
        12,
        Listed((6,), (3, 9)),
        {},
        f"2 of 12 steps in full, as listed, 2 between them sparse, {REST}",
        "step 3 is computed in full: it was to be sparse, and the only full step before it is",
    ),
    (None, Listed((1, 4)), {}, f"3 steps in full, as listed, {REST}", None),
    (
        None,
        Spread(0.5),
        {},
        "number of steps unknown",
        "a fraction of the steps needs their number, which the pipeline does not tell: spread",
    ),
    (
        8,
        Branches({"*": Spread(0.5), "uncond": Listed((2,))}),
        {"correct": False},
        "*: 4 of 8 steps in full, close at the start, the rest skipped; "
        "uncond: 2 of 8 steps in full, as listed, the rest skipped",
        None,
    ),
    (
        6,
        Branches({"*": Periodic(), "uncond": Listed((2,))}),
        {"forecast": 1},
        "*: 1 dense, 1 refresh, 4 sparse; skipped ones with a full forecast; "
        "uncond: 1 dense, 1 skip, 1 dense, 3 skip; skipped ones with a full forecast",
        None,
    ),
]


@pytest.mark.parametrize(("steps", "form", "fields", "text", "note"), DESCRIBED)
def test_a_schedule_in_words_and_what_it_cannot_do(steps, form, fields, text, note):
    plan = planned(steps, form, **fields)
    assert plan.describe() == text
    assert len(plan_notes(plan)) == (note is not None)
    assert "".join(plan_notes(plan)).startswith(note or "")


def test_with_few_tokens_attention_in_8_bits_is_said_to_be_slower():
    many = dataclasses.replace(LAYOUT, grids=((10, 20, 50),))
    config = SparsityConfig().override({"attention.precision": "fp8"})
    assert plan_notes(SparsityPlan(config, LAYOUT, 12)) == [
        "attention.precision: with 60 tokens attention is slower in 8 bits than in 16 (on an "
        "H200 they pay from about 5,000 on)",
    ]
    assert plan_notes(SparsityPlan(config, many, 12)) == []


@pytest.mark.parametrize("first", [0, 20, 35, 42])
def test_a_fraction_is_one_of_the_steps_that_run(first):
    """Of image to image, which starts late."""
    form = Spread(0.3, at_least=8)
    late = SparsityPlan(config_of(form, forecast_after=0.2), LAYOUT, 50, first)
    alone = planned(50 - first, form, forecast_after=0.2)
    assert letters_of(late.actions(first)) == letters_of(alone.actions())
    full = late.schedule.full_steps()
    assert full == tuple(first + step for step in alone.schedule.full_steps())
    assert len(full) == max(8, round(0.3 * (50 - first)))
    for step in range(50 - first):
        assert late.schedule.forecast(first + step) == alone.schedule.forecast(step)
    named = SparsityPlan(config_of(Listed((5, 24, 30, 45))), LAYOUT, 50, first)
    listed_steps = {first, *(step for step in (5, 24, 30, 45) if step > first)}
    assert named.schedule.full_steps() == tuple(sorted(listed_steps))


def test_which_skipped_outputs_are_forecast():
    def forecasts(steps, **fields):
        schedule = planned(steps, Listed((1, 4)), **fields).schedule
        return [step for step in range(6) if schedule.forecast(step) == 0.5]

    assert forecasts(12) == []
    assert not planned(12, Periodic(), forecast=0.5).schedule.forecasts_any
    assert not planned(12, Listed((1,), "others"), forecast=0.5).schedule.forecasts_any
    late = planned(12, Listed((1,)), forecast=0.5, forecast_after=1)
    assert not late.schedule.forecasts_any
    assert forecasts(12, forecast=0.5) == [0, 1, 2, 3, 4, 5]
    assert forecasts(12, forecast=0.5, forecast_after=0.2) == [3, 4, 5]
    assert forecasts(None, forecast=0.5, forecast_after=0.2) == []


def test_each_branch_has_a_plan_of_its_own():
    """A branch that is never sparse records nothing, whatever the others do."""
    form = Branches({"*": Listed((1,), "others"), "uncond": Actions(("dense", "refresh", "skip"))})
    plan = SparsityPlan(config_of(form), LAYOUT, 5)
    own = dataclasses.replace(plan, branch="uncond")
    assert (letters_of(plan.actions()), letters_of(own.actions())) == ("DRSSS", "DDKKK")
    assert (plan.sparse_steps, own.sparse_steps) == (3, 0)
    assert not plan.is_dense()
    assert not own.is_dense()
    assert plan.schedule.skips_any
    off = dataclasses.replace(own, config=own.config.override(OFF))
    assert off.is_dense()


@pytest.mark.parametrize(
    ("first", "expected"),
    [(0, "DRSSRSSK"), (2, "DDRSSK"), (3, "DRSSK"), (6, "DK")],
)
def test_actions_are_raised_where_their_inputs_are_missing(first, expected):
    """A branch that starts late, as an image-to-image call does, has recorded nothing yet."""
    plan = planned(8, Listed((1, 4), (2, 3, 5, 6)))
    assert letters_of(plan.actions(first)) == expected


def test_layers_are_numbered_kind_after_kind():
    kinds = LayerKind("double", 19, 12288), LayerKind("single", 38, 6000)
    layout = dataclasses.replace(LAYOUT, kinds=kinds)
    assert [layout.kind(n).name for n in range(57)] == ["double"] * 19 + ["single"] * 38
    for layer in (-1, 57):
        with pytest.raises(ValueError, match=f"from 0 to 56, got {layer}"):
            layout.kind(layer)
