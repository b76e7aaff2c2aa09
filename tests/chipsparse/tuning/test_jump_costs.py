"""Costs of leaving steps out, against doing it."""

from dataclasses import replace

import numpy as np
import pytest

from chipsparse.tuning.jump_costs import Reuse, Trajectory, drift, jump_costs
from tests.chipsparse.tuning.trajectories import (
    HOLD,
    errors_of_gaps,
    list_cost,
    outputs,
    reused,
    trajectory,
)

STEPS = 13
LISTS = ([0], [0, 1], [0, 1, 2, 5, 9], [0, 4, 5, 11], [0, 3, 6, 9, 12], list(range(STEPS)))


@pytest.mark.parametrize("full_steps", LISTS)
@pytest.mark.parametrize("growth", [0.0, 2.0])
@pytest.mark.parametrize("reuse", [HOLD, Reuse(1.0, 0.4, correct=False), Reuse(), Reuse(0.5, 0.3)])
def test_a_lists_cost_is_the_error_of_each_gap(full_steps, growth, reuse):
    given = trajectory(STEPS)
    weights = given.effects * ((np.arange(STEPS) + 1) / STEPS) ** -growth
    expected = errors_of_gaps(outputs(STEPS), given.times, weights, full_steps, reuse)
    cost = list_cost(jump_costs(given, reuse, growth), full_steps)
    assert cost == pytest.approx(expected, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("reuse", [Reuse(0.5, correct=False), Reuse(0.5)])
def test_between_equal_timesteps_there_is_no_line_and_the_output_is_held(reuse):
    """Schedulers of whole timesteps have equal ones where the noise levels are close."""
    given, full_steps = trajectory(STEPS), [0, 3, 4, 9]
    times = given.times.copy()
    times[4:7] = times[3]
    given = Trajectory(given.products, given.effects, times)
    expected = errors_of_gaps(outputs(STEPS), times, given.effects, full_steps, reuse)
    costs = jump_costs(given, reuse, 0.0)
    assert list_cost(costs, full_steps) == pytest.approx(expected, rel=1e-9, abs=1e-6)
    assert not np.isnan(costs).any()


@pytest.mark.parametrize("full_steps", LISTS)
@pytest.mark.parametrize("reuse", [HOLD, Reuse(0.5), Reuse(1.0, 0.4)])
def test_drift_is_the_error_of_all_gaps_together(full_steps, reuse):
    given, values = trajectory(STEPS), outputs(STEPS)
    made = reused(values, given.times, full_steps, replace(reuse, correct=False))
    weights = given.effects * ((np.arange(STEPS) + 1) / STEPS) ** -1.5
    result = drift(given, reuse, 1.5, full_steps)
    assert result == pytest.approx(np.sum((weights @ (values - made)) ** 2), rel=1e-9, abs=1e-6)


def test_there_is_no_way_back():
    costs = jump_costs(trajectory(6), HOLD, 0.5)
    a, b, c = np.meshgrid(range(6), range(6), range(7), indexing="ij")
    possible = ((a < b) | ((a == 0) & (b == 0))) & (b < c)
    assert np.isfinite(costs[possible]).all()
    assert np.isinf(costs[~possible]).all()
