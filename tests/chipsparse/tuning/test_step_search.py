"""The dynamic programming against trying every list."""

from itertools import combinations

import numpy as np
import pytest

from chipsparse.tuning.jump_costs import Reuse, jump_costs
from chipsparse.tuning.step_search import best_lists
from tests.chipsparse.tuning.trajectories import list_cost, trajectory

STEPS = 9


def made_up(seed):
    """Costs that depend on all three steps, with no order in them."""
    costs = np.random.default_rng(seed).uniform(1, 2, (STEPS, STEPS, STEPS + 1))
    a, b, c = np.meshgrid(range(STEPS), range(STEPS), range(STEPS + 1), indexing="ij")
    costs[~(((a < b) | ((a == 0) & (b == 0))) & (b < c))] = np.inf
    return costs


@pytest.mark.parametrize(
    "costs",
    [
        made_up(0),
        made_up(1),
        jump_costs(trajectory(STEPS), Reuse(), 0.5),
        jump_costs(trajectory(STEPS, seed=3), Reuse("middle", 0.5, 0.25), 1.0),
    ],
)
def test_no_list_of_the_same_length_costs_less(costs):
    found = best_lists(costs)
    assert sorted(found) == list(range(1, STEPS + 1))
    for count, own in found.items():
        every = [(0, *rest) for rest in combinations(range(1, STEPS), count - 1)]
        assert own in every
        least = min(list_cost(costs, each) for each in every)
        assert list_cost(costs, own) == pytest.approx(least, rel=1e-12, abs=1e-6)
