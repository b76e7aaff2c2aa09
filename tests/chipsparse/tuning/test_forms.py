"""Forms of schedules: the configs they make, and what these take."""

from dataclasses import replace

import numpy as np
import pytest

from chipsparse.config import Action, Listed, ScheduleConfig, SparsityConfig
from chipsparse.profiles.profile import default_profile
from chipsparse.skip.timetable import Run, Schedule
from chipsparse.tuning.forms import DENSITIES, FORECASTS, ActionSeconds, Candidate, Form, Forms
from chipsparse.tuning.jump_costs import Placed, Reuse, drift
from tests.chipsparse.tuning.trajectories import trajectory

OF_LAYERS = {
    "attention.delta_rule": "difference",
    "layers": [{"index": "0,3", "attention": "dense"}],
}
OF_STEPS = {"schedule.periodic.warmup": 4}
BASE = SparsityConfig().override(OF_LAYERS | OF_STEPS)
SPARSE = dict.fromkeys(((density, False) for density in DENSITIES), 1.0) | {(0.1, True): 0.5}
SECONDS = ActionSeconds(dense=2.0, refresh=3.0, sparse=SPARSE, skipped=0.1, other=10.0)


def test_a_form_takes_the_place_of_the_schedule_and_keeps_the_rest():
    form = Form(reuse=Reuse(0.5, 0.25), density=0.3)
    config = form.config(BASE, (0, 1, 5), 8)
    assert config.schedule == ScheduleConfig(Listed((0, 1, 5)), forecast=0.5, forecast_after=0.25)
    assert config.attention.density == 0.3
    assert (config.attention.delta_rule, config.mlp.is_sparse) == ("difference", False)
    assert config.layers == BASE.layers
    again = form.config(config, (0, 2), 8)  # a tuned profile as the base of another search
    assert again.schedule.form == Listed((0, 2))


@pytest.mark.parametrize(
    ("form", "seconds", "text"),
    [
        (Form(), 10 + 3 * 2 + 5 * 0.1, "3 of 8 steps in full, as listed, the rest skipped"),
        (
            Form(sparse_per_full=0.3),
            10 + 2 * 2 + 3 + 1 + 4 * 0.1,
            "3 of 8 steps in full, as listed, 1 between them sparse, the rest skipped, then "
            "corrected; 10% of the columns",
        ),
        (
            Form(reuse=Reuse(0.5), sparse_mlp=True, sparse_per_full=0.6),
            10 + 2 + 2 * 3 + 2 * 0.5 + 3 * 0.1,
            "with half a forecast, then corrected; 10% of the columns and sparse MLPs",
        ),
    ],
)
def test_the_time_and_the_words_of_a_candidate(form, seconds, text):
    # Full steps are 0, 1 and 4; the middles of the gaps are 6 and, by the next sparse step, 2.
    made = Candidate(form, form.config(BASE, (0, 1, 4), 8), 8)
    assert SECONDS.generation(made) == pytest.approx(seconds)
    assert text in made.describe


def test_a_candidate_is_best_on_the_mean_of_the_prompts():
    both = [trajectory(10), trajectory(10, seed=5)]
    form = Form()
    full = Forms(BASE, both, SECONDS).candidate(form, 4).config.schedule.form.full
    assert full == Placed(both, form.reuse, form.growth).steps(4)
    assert full != Placed(both[:1], form.reuse, form.growth).steps(4)


@pytest.mark.parametrize(
    ("quality", "steps", "full", "sparse"),
    [
        ("balanced", 50, 9, 13),
        ("fast", 50, 7, 10),
        ("draft", 50, 5, 7),
        ("fast", 30, 4, 6),
        ("draft", 8, 3, 5),
        ("fast", 5, 3, 2),
    ],
)
def test_named_qualities_are_among_the_sparse_steps_that_are_tried(quality, steps, full, sparse):
    forms = Forms(BASE, [trajectory(steps)], SECONDS)
    tried = [forms.candidate(form, full) for form in forms.of_sparse_steps(Form(), full)]
    config = default_profile().of_quality(quality).sparsity
    named = Schedule(config.schedule, Run(steps)).actions()
    assert named.count(Action.SPARSE) == sparse
    same = next(made for made in tried if made.schedule.actions() == named)
    assert same.config.attention.density == config.attention.density
    for name in ("forecast", "forecast_after", "correct"):
        assert getattr(same.config.schedule, name) == getattr(config.schedule, name)


def test_sparse_steps_that_take_no_less_time_are_not_tried():
    slow = replace(SECONDS, sparse=SPARSE | {(0.1, False): 2.0, (0.2, False): 2.5})
    rivals = Forms(BASE, [trajectory(10)], slow).of_sparse_steps(Form(), 4)
    assert [(form.sparse_per_full, form.density) for form in rivals] == [(1.4, 0.3)]


def test_the_first_form_has_the_forecast_that_drifts_least():
    both = [trajectory(12), trajectory(12, seed=5)]
    forms = Forms(BASE, both, SECONDS)

    def drifts(form):
        full = forms.candidate(form, 5).config.schedule.form.full
        return np.mean([drift(one, form.reuse, form.growth, full) for one in both])

    for correct in (True, False):
        first = forms.first(5, correct=correct)
        assert first.reuse.correct == correct
        others = [Form(reuse=Reuse(*forecast, correct)) for forecast in FORECASTS]
        assert drifts(first) == min(map(drifts, others))
