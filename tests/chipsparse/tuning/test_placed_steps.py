"""Full steps placed by dynamic programming, against all lists."""

import itertools

import numpy as np
import pytest

from chipsparse.tuning.jump_costs import Reuse, jump_costs
from chipsparse.tuning.placed_steps import Placed
from tests.chipsparse.tuning.trajectories import list_cost, trajectory


@pytest.mark.parametrize("reuse", [Reuse(correct=False), Reuse(), Reuse(0.5, 0.25)])
def test_no_list_of_full_steps_costs_less(reuse):
    both = [trajectory(9, seed=seed) for seed in (0, 3)]
    costs = np.mean([jump_costs(given, reuse, 0.5) for given in both], axis=0)
    placed = Placed(both, reuse, 0.5)
    for count in range(1, 10):
        lists = [(0, *rest) for rest in itertools.combinations(range(1, 9), count - 1)]
        steps = placed.steps(count)
        assert steps in lists
        least = min(list_cost(costs, full) for full in lists)
        assert list_cost(costs, steps) == pytest.approx(least, rel=1e-5, abs=1e-4)
