"""Forms of schedules: the configs they make, and what these take."""

import itertools

import pytest

from chipsparse.config import SparsityConfig
from chipsparse.tuning.forms import ActionSeconds, Form, Lists
from chipsparse.tuning.jump_costs import Reuse
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
    form = Form(reuse=Reuse("middle", 0.5, 0.25), density=0.3)
    config = form.config(BASE, Steps((0, 1, 5)))
    expected = {"full_steps": (0, 1, 5), "between": "middle", "forecast": 0.5}
    expected |= {"forecast_after": 0.25, "warmup_steps": 2}
    expected |= {"first_dense_layers": 1}
    assert {name: getattr(config.schedule, name) for name in expected} == expected
    assert config.attention.density == 0.3
    assert (config.attention.delta_rule, config.mlp.enabled) == ("difference", False)
    assert config.layers == BASE.layers
    again = form.config(config, Steps((0, 2)))  # a tuned profile as the base of another search
    assert again.schedule.full_steps == (0, 2)


def test_times_are_counted_by_what_the_steps_do():
    # 0 dense, 1 dense, 2 skip, 3 skip, 4 refresh, 5 skip, 6 sparse, 7 skip
    middle, full_steps = Reuse("middle"), (0, 1, 4)

    def seconds(form):
        return SECONDS.generation(form, Steps(full_steps), 8)

    assert seconds(Form(reuse=middle)) == pytest.approx(10 + 2 * 2 + 3 + 1 + 4 * 0.1)
    assert seconds(Form(reuse=middle, sparse_mlp=True)) == pytest.approx(10 + 4 + 3 + 0.5 + 0.4)
    assert seconds(Form()) == pytest.approx(10 + 3 * 2 + 5 * 0.1)


def test_searched_lists_are_best_on_the_mean_of_the_prompts():
    both = [trajectory(10), trajectory(10, seed=5)]
    lists, form = Lists(both, SECONDS), Form()
    costs = lists.costs(form.reuse, form.growth)
    own = list_cost(costs, lists.steps(form, 4).full)
    for rest in itertools.combinations(range(1, 10), 3):
        assert own <= list_cost(costs, (0, *rest))
    for each in both:
        alone = Lists([each], SECONDS)
        assert alone.steps(form, 4).full[0] == 0
        assert list_cost(
            alone.costs(form.reuse, form.growth), alone.steps(form, 4).full
        ) <= list_cost(alone.costs(form.reuse, form.growth), lists.steps(form, 4).full)


@pytest.mark.parametrize(
    ("form", "phrases"),
    [
        (Form(), ["3 of 8 steps in full", "(list by growth 1)"]),
        (Form(sparse_error=0.3), ["2 sparse, likewise", "20% of the columns"]),
        (
            Form(reuse=Reuse("middle", 0.5), sparse_mlp=True),
            [
                "one sparse step in each gap of 3 and more",
                "half a forecast",
                "20% of the columns and sparse MLPs",
            ],
        ),
    ],
)
def test_a_form_in_words(form, phrases):
    text = form.describe(
        form.config(BASE, Steps((0, 1, 4), None if form.sparse_error is None else (2, 6))), 8
    )
    assert all(phrase in text for phrase in phrases), text
