"""Forms of schedules: the configs they make, and what these take."""

from dataclasses import replace

import numpy as np
import pytest

from chipsparse.config import SparsityConfig
from chipsparse.tuning.forms import FORECASTS, ActionSeconds, Candidate, Form, Forms
from chipsparse.tuning.jump_costs import Reuse, drift
from chipsparse.tuning.placed_steps import Placed, Steps
from tests.chipsparse.tuning.trajectories import trajectory

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
    expected = {"full_steps": (0, 1, 5), "sparse_steps": 0.0, "forecast": 0.5}
    expected |= {"forecast_after": 0.25, "warmup_steps": 2, "first_dense_layers": 1}
    assert {name: getattr(config.schedule, name) for name in expected} == expected
    assert config.attention.density == 0.3
    assert (config.attention.delta_rule, config.mlp.is_sparse) == ("difference", False)
    assert config.layers == BASE.layers
    again = form.config(config, Steps((0, 2)))  # a tuned profile as the base of another search
    assert again.schedule.full_steps == (0, 2)


def candidate(form, sparse=()):
    # 0 dense, 1 dense, 2 skip, 3 skip, 4 dense or refresh, 5 skip, 6 skip or sparse, 7 skip
    return Candidate(form, form.config(BASE, Steps((0, 1, 4), sparse)), 8)


@pytest.mark.parametrize(
    ("form", "sparse", "seconds", "text"),
    [
        (Form(), (), 10 + 3 * 2 + 5 * 0.1, "3 of 8 steps in full, as listed, the rest skipped"),
        (
            Form(sparse_error=0.3),
            (6,),
            10 + 2 * 2 + 3 + 1 + 4 * 0.1,
            "3 of 8 steps in full, as listed, 1 between them sparse, the rest skipped, then "
            "corrected; 20% of the columns (list by growth 1)",
        ),
        (
            Form(reuse=Reuse(0.5), sparse_mlp=True, sparse_error=0.3),
            (6,),
            10 + 2 * 2 + 3 + 0.5 + 4 * 0.1,
            "with half a forecast, then corrected; 20% of the columns and sparse MLPs (list",
        ),
    ],
)
def test_the_time_and_the_words_of_a_candidate(form, sparse, seconds, text):
    made = candidate(form, sparse)
    assert SECONDS.generation(made) == pytest.approx(seconds)
    assert text in made.describe


def test_a_candidate_is_best_on_the_mean_of_the_prompts():
    both, form = [trajectory(10), trajectory(10, seed=5)], Form()
    full = Forms(BASE, both, SECONDS).candidate(form, 4).config.schedule.full_steps
    assert full == Placed(both, form.reuse, form.growth).steps(4).full
    assert full != Placed(both[:1], form.reuse, form.growth).steps(4).full


def test_a_form_whose_sparse_steps_never_pay_is_the_same_without_them():
    slow = replace(SECONDS, sparse=dict.fromkeys(SECONDS.sparse, 9.0))
    forms = Forms(BASE, [trajectory(10)], slow)
    assert forms.candidate(Form(sparse_error=0.3), 4) == forms.candidate(Form(), 4)


def test_the_first_form_has_the_forecast_that_drifts_least():
    both = [trajectory(12), trajectory(12, seed=5)]
    forms = Forms(BASE, both, SECONDS)

    def drifts(form):
        full = forms.candidate(form, 5).config.schedule.full_steps
        return np.mean([drift(one, form.reuse, form.growth, full) for one in both])

    for correct in (True, False):
        first = forms.first(5, correct=correct)
        assert first.reuse.correct == correct
        others = [Form(reuse=Reuse(*forecast, correct)) for forecast in FORECASTS]
        assert drifts(first) == min(map(drifts, others))
