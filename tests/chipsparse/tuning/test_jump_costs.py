"""What the outputs of a dense generation say of leaving steps out, against doing it."""

import numpy as np
import pytest

from chipsparse.tuning.jump_costs import Reuse, Trajectory, jump_costs, list_cost
from tests.chipsparse.tuning.trajectories import HOLD, outputs, reused, trajectory

STEPS = 13
LISTS = ([0], [0, 1], [0, 1, 2, 5, 9], [0, 4, 5, 11], [0, 3, 6, 9, 12], list(range(STEPS)))


@pytest.mark.parametrize("full_steps", LISTS)
@pytest.mark.parametrize("growth", [0.0, 0.5, 2.0])
@pytest.mark.parametrize(
    "reuse",
    [
        HOLD,
        Reuse("none", 0.5, correct=False),
        Reuse("none", 1.0, 0.4, correct=False),
        Reuse("middle", correct=False),
        Reuse("middle", 0.25, 0.3, correct=False),
        Reuse("every_other", 0.5, correct=False),
        Reuse("all", 1.0, correct=False),
        Reuse(),
        Reuse("none", 0.5, 0.3),
        Reuse("middle", 0.25),
        Reuse("every_other", 1.0),
    ],
)
def test_a_lists_cost_is_the_error_of_each_gap(full_steps, growth, reuse):
    given, values = trajectory(STEPS), outputs(STEPS)
    errors = values - reused(values, given.times, full_steps, reuse)
    weights = given.effects * ((np.arange(STEPS) + 1) / STEPS) ** -growth
    gaps = zip(full_steps, [*full_steps[1:], STEPS], strict=True)
    expected = sum(np.linalg.norm(weights[a:b] @ errors[a:b]) for a, b in gaps)
    found = list_cost(jump_costs(given, reuse, growth), full_steps)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(
    "reuse",
    [
        Reuse("none", 0.5, correct=False),
        Reuse("all", 1.0, correct=False),
        Reuse("every_other", 1.0, correct=False),
        Reuse("none", 0.5),
        Reuse("every_other", 1.0),
    ],
)
def test_between_equal_timesteps_there_is_no_line_and_the_output_is_held(reuse):
    """As schedulers of whole timesteps have where the noise levels are close."""
    given, values, full_steps = trajectory(STEPS), outputs(STEPS), [0, 3, 4, 9]
    times = given.times.copy()
    times[4:7] = times[3]
    given = Trajectory(given.products, given.effects, times)
    errors = values - reused(values, times, full_steps, reuse)
    gaps = zip(full_steps, [*full_steps[1:], STEPS], strict=True)
    expected = sum(np.linalg.norm(given.effects[a:b] @ errors[a:b]) for a, b in gaps)
    costs = jump_costs(given, reuse, 0.0)
    assert list_cost(costs, full_steps) == pytest.approx(expected, rel=1e-9, abs=1e-6)
    assert not np.isnan(costs).any()


def test_there_is_no_way_back():
    costs = jump_costs(trajectory(6), HOLD, 0.5)
    a, b, c = np.meshgrid(range(6), range(6), range(7), indexing="ij")
    possible = ((a < b) | ((a == 0) & (b == 0))) & (b < c)
    assert np.isfinite(costs[possible]).all()
    assert np.isinf(costs[~possible]).all()
