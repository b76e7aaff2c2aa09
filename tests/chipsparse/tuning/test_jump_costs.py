"""Costs of leaving steps out, against doing it."""

from dataclasses import replace

import numpy as np
import pytest

from chipsparse.tuning.jump_costs import Reuse, drift, jump_costs
from tests.chipsparse.tuning.trajectories import (
    HOLD,
    errors_of_gaps,
    list_cost,
    outputs,
    reused,
    trajectory,
)

STEPS = 13
VALUES = outputs(STEPS)
LISTS = ([0], [0, 1], [0, 1, 2, 5, 9], [0, 3, 4, 9], [0, 4, 5, 11], [0, 3, 6, 9, 12], range(STEPS))


@pytest.fixture(params=["falling", "equal in part", "rising to 1"])
def dense(request):
    """Schedulers of whole timesteps have equal ones where the noise levels are close."""
    dense = trajectory(STEPS)
    times = dense.times.copy()
    if request.param == "equal in part":
        times[4:7] = times[3]
    return replace(dense, times=1 - times / 1000 if request.param == "rising to 1" else times)


@pytest.mark.parametrize("full_steps", LISTS)
@pytest.mark.parametrize("growth", [0.0, 2.0])
@pytest.mark.parametrize("reuse", [HOLD, Reuse(1.0, 0.4, correct=False), Reuse(), Reuse(0.5, 0.3)])
def test_a_lists_cost_is_the_error_of_each_gap(dense, full_steps, growth, reuse):
    weights = dense.effects * ((np.arange(STEPS) + 1) / STEPS) ** -growth
    expected = errors_of_gaps(VALUES, dense.times, weights, full_steps, reuse)
    costs = jump_costs(dense, reuse, growth)
    assert list_cost(costs, full_steps) == pytest.approx(expected, rel=1e-9, abs=1e-6)
    a, b, c = np.meshgrid(range(STEPS), range(STEPS), range(STEPS + 1), indexing="ij")
    forth = ((a < b) | ((a == 0) & (b == 0))) & (b < c)
    assert np.isfinite(costs[forth]).all()
    assert np.isinf(costs[~forth]).all()


@pytest.mark.parametrize("full_steps", LISTS)
@pytest.mark.parametrize("reuse", [HOLD, Reuse(0.5), Reuse(1.0, 0.4)])
def test_drift_is_the_error_of_all_gaps_together(dense, full_steps, reuse):
    made = reused(VALUES, dense.times, full_steps, replace(reuse, correct=False))
    weights = dense.effects * ((np.arange(STEPS) + 1) / STEPS) ** -1.5
    result = drift(dense, reuse, 1.5, full_steps)
    assert result == pytest.approx(np.sum((weights @ (VALUES - made)) ** 2), rel=1e-9, abs=1e-6)
