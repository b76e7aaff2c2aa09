"""Costs of leaving steps out, against doing it; full steps placed by them, against all lists."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from chipsparse.tuning.jump_costs import Placed, Reuse, drift, jump_costs
from tests.chipsparse.tuning import trajectories

STEPS = 13
VALUES = trajectories.outputs(STEPS)
LISTS = ([0], [0, 1], [0, 1, 2, 5, 9], [0, 3, 4, 9], [0, 4, 5, 11], [0, 3, 6, 9, 12], range(STEPS))


@pytest.fixture(params=["falling", "equal in part", "rising to 1"])
def dense(request):
    """Schedulers of whole timesteps have equal ones where the noise levels are close."""
    dense = trajectories.trajectory(STEPS)
    times = dense.times.copy()
    if request.param == "equal in part":
        times[4:7] = times[3]
    return replace(dense, times=1 - times / 1000 if request.param == "rising to 1" else times)


@pytest.mark.parametrize("full_steps", LISTS)
@pytest.mark.parametrize("growth", [0.0, 2.0])
@pytest.mark.parametrize(
    "reuse",
    [trajectories.HOLD, Reuse(1.0, 0.4, correct=False), Reuse(), Reuse(0.5, 0.3)],
)
def test_a_lists_cost_is_the_error_of_each_gap(dense, full_steps, growth, reuse):
    weights = dense.effects * ((np.arange(STEPS) + 1) / STEPS) ** -growth
    expected = trajectories.errors_of_gaps(VALUES, dense.times, weights, full_steps, reuse)
    costs = jump_costs(dense, reuse, growth)
    assert trajectories.list_cost(costs, full_steps) == pytest.approx(expected, rel=1e-9, abs=1e-6)
    a, b, c = np.meshgrid(range(STEPS), range(STEPS), range(STEPS + 1), indexing="ij")
    forth = ((a < b) | ((a == 0) & (b == 0))) & (b < c)
    assert np.isfinite(costs[forth]).all()
    assert np.isinf(costs[~forth]).all()


@pytest.mark.parametrize("full_steps", LISTS)
@pytest.mark.parametrize("reuse", [trajectories.HOLD, Reuse(0.5), Reuse(1.0, 0.4)])
def test_drift_is_the_error_of_all_gaps_together(dense, full_steps, reuse):
    made = trajectories.reused(VALUES, dense.times, full_steps, replace(reuse, correct=False))
    weights = dense.effects * ((np.arange(STEPS) + 1) / STEPS) ** -1.5
    result = drift(dense, reuse, 1.5, full_steps)
    assert result == pytest.approx(np.sum((weights @ (VALUES - made)) ** 2), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("reuse", [Reuse(correct=False), Reuse(), Reuse(0.5, 0.25)])
def test_no_list_of_full_steps_costs_less(reuse):
    both = [trajectories.trajectory(9, seed=seed) for seed in (0, 3)]
    costs = np.mean([jump_costs(given, reuse, 0.5) for given in both], axis=0)
    placed = Placed(both, reuse, 0.5)
    for count in range(1, 10):
        lists = [(0, *rest) for rest in itertools.combinations(range(1, 9), count - 1)]
        steps = placed.steps(count)
        assert steps in lists
        least = min(trajectories.list_cost(costs, full) for full in lists)
        assert trajectories.list_cost(costs, steps) == pytest.approx(least, rel=1e-5, abs=1e-4)
