"""Forms of schedules: the configs they make, and what these take."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from chipsparse.config import SparsityConfig
from chipsparse.tuning.forms import FORECASTS, ActionSeconds, Form, Lists
from chipsparse.tuning.jump_costs import Reuse, drift, jump_costs
from chipsparse.tuning.placed_steps import Steps
from tests.chipsparse.tuning.trajectories import list_cost, trajectory

BASE = SparsityConfig().override(
    {
        "schedule.warmup_steps": 4,
        "schedule.first_dense_layers": 1,
        "attention.delta_rule": "difference",
        "layers": [{"layers": "3", "attention": "dense"}],
    }
)
SECONDS = ActionSeconds(
    dense=2.0, refresh=3.0, sparse={(0.2, False): 1.0, (0.2, True): 0.5}, skipped=0.1, other=10.0
)


def test_a_form_takes_the_place_of_the_schedule_and_keeps_the_rest():
    form = Form(reuse=Reuse(0.5, 0.25), density=0.3)
    config = form.config(BASE, Steps((0, 1, 5)))
    expected = {"full_steps": (0, 1, 5), "between": "none", "forecast": 0.5}
    expected |= {"forecast_after": 0.25, "warmup_steps": 2, "first_dense_layers": 1}
    assert {name: getattr(config.schedule, name) for name in expected} == expected
    assert config.attention.density == 0.3
    assert (config.attention.delta_rule, config.mlp.is_sparse) == ("difference", False)
    assert config.layers == BASE.layers
    again = form.config(config, Steps((0, 2)))  # a tuned profile as the base of another search
    assert again.schedule.full_steps == (0, 2)


def test_times_are_counted_by_what_the_steps_do():
    # 0 dense, 1 dense, 2 skip, 3 skip, 4 refresh, 5 skip, 6 sparse, 7 skip
    def seconds(form, sparse=None):
        return SECONDS.generation(form, Steps((0, 1, 4), sparse), 8)

    placed = Form(sparse_error=0.3)
    assert seconds(placed, (6,)) == pytest.approx(10 + 2 * 2 + 3 + 1 + 4 * 0.1)
    assert seconds(replace(placed, sparse_mlp=True), (6,)) == pytest.approx(10 + 4 + 3 + 0.5 + 0.4)
    assert seconds(Form()) == pytest.approx(10 + 3 * 2 + 5 * 0.1)


def test_searched_lists_are_best_on_the_mean_of_the_prompts():
    both = [trajectory(10), trajectory(10, seed=5)]
    lists, form = Lists(both, SECONDS), Form()
    each_costs = [jump_costs(each, form.reuse, form.growth) for each in both]
    costs = np.mean(each_costs, axis=0)
    own = list_cost(costs, lists.steps(form, 4).full)
    for rest in itertools.combinations(range(1, 10), 3):
        assert own <= list_cost(costs, (0, *rest))
    for each, its_costs in zip(both, each_costs, strict=True):
        alone = Lists([each], SECONDS).steps(form, 4).full
        assert list_cost(its_costs, alone) <= list_cost(its_costs, lists.steps(form, 4).full)


def test_the_first_form_has_the_forecast_that_drifts_least():
    both = [trajectory(12), trajectory(12, seed=5)]
    lists = Lists(both, SECONDS)

    def drifts(form):
        full = lists.steps(form, 5).full
        return np.mean([drift(each, form.reuse, form.growth, full) for each in both])

    for correct in (True, False):
        first = lists.first(5, correct=correct)
        assert first.reuse.correct == correct
        others = [Form(reuse=Reuse(*forecast, correct)) for forecast in FORECASTS]
        assert drifts(first) == min(map(drifts, others))


def test_rivals_of_each_choice():
    lists = Lists([trajectory(12)], SECONDS)
    first = lists.first(5)
    skips = list(lists.of_skips(first, 5))
    assert [(form.growth, form.reuse.correct) for form in skips] == [
        (1.0, True),
        (2.0, True),
        (1.0, False),
    ]
    sparse = list(lists.of_sparse_steps(first, 5))
    assert [(form.density, form.sparse_error) for form in sparse] == [
        (0.2, 0.3),
        (0.1, 0.3),
        (0.3, 0.3),
        (0.2, 0.1),
        (0.2, 0.6),
    ]
    assert list(lists.of_sparse_mlps(sparse[0], 5)) == [replace(sparse[0], sparse_mlp=True)]
    assert list(lists.of_sparse_mlps(first, 5)) == []  # nothing is sparse


@pytest.mark.parametrize(
    ("form", "phrases"),
    [
        (Form(), ["3 of 8 steps in full", "(list by growth 1)"]),
        (Form(sparse_error=0.3), ["2 sparse, likewise", "20% of the columns"]),
        (
            Form(reuse=Reuse(0.5), sparse_mlp=True, sparse_error=0.3),
            ["half a forecast", "20% of the columns and sparse MLPs"],
        ),
    ],
)
def test_a_form_in_words(form, phrases):
    text = form.describe(
        form.config(BASE, Steps((0, 1, 4), None if form.sparse_error is None else (2, 6))), 8
    )
    assert all(phrase in text for phrase in phrases), text
