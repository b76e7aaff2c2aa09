"""Full and sparse steps placed together: against all lists, and at the ends of what they cost."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from chipsparse.tuning.jump_costs import Reuse, jump_costs
from chipsparse.tuning.placed_steps import PARTS, Placed, Steps
from tests.chipsparse.tuning.trajectories import errors_of_gaps, list_cost, outputs, trajectory

STEPS = 7
REFRESH, SPARSE, ERROR = 1.1, 0.2, 0.1
HELD = Reuse(correct=False)
HALF = Reuse(forecast=0.5, forecast_after=0.4, correct=False)


def expected_cost(given, values, steps, reuse, growth, error):
    """The cost of one list: of its gaps, and of what its sparse steps miss."""
    weights, times = given.weights(growth), given.times
    level = [given.effects[step:].sum() / given.effects.sum() for step in range(STEPS)]
    computed = sorted([*steps.full, *steps.sparse])
    total = errors_of_gaps(values, times, weights, computed, reuse)

    def share(step, old, new):
        return (times[step] - times[old]) / (times[new] - times[old])

    for before, last, end in zip(computed, computed[1:], [*computed[2:], STEPS], strict=False):
        if last not in steps.sparse:
            continue
        reach = weights[last:end].sum() ** 2
        if reuse.correct and end < STEPS:
            behind, inner = range(before + 1, last), range(last + 1, end)
            lines = weights[last] + sum(weights[n] * share(n, before, last) for n in behind)
            lines += sum(weights[n] * (1 - share(n, last, end)) for n in inner)
            reach = reach / 2 + lines**2
        missed = error + (1 - error) * level[last] ** 8
        total += missed**2 * np.sum((values[last] - values[before]) ** 2) * reach
    return total


def parts(steps):
    """Time as the search counts it."""
    sparse = round(PARTS * (REFRESH - 1 + SPARSE))
    return len(steps.full) * PARTS + len(steps.sparse) * sparse


def all_lists():
    for kinds in itertools.product("fs-", repeat=STEPS - 1):
        taken = ["f", *kinds]
        full = tuple(n for n, kind in enumerate(taken) if kind == "f")
        sparse = tuple(n for n, kind in enumerate(taken) if kind == "s")
        refreshed = [max(step for step in full if step < thin) for thin in sparse]
        if 0 not in refreshed and len(set(refreshed)) == len(refreshed):
            yield Steps(full, sparse)


@pytest.mark.parametrize("reuse", [HELD, HALF, Reuse(0.5)])
@pytest.mark.parametrize(
    ("seed", "counted"),
    [(0, lambda times: times), (3, lambda times: 1 - times / 1000)],
    ids=["falling", "rising to 1"],
)
def test_no_list_costs_less_in_the_same_time(reuse, seed, counted):
    """Whichever way timesteps are counted."""
    given, values = trajectory(STEPS, seed=seed), outputs(STEPS, seed=seed)
    as_counted = replace(given, times=counted(given.times))
    placed = Placed([as_counted], reuse, 1.0, error=ERROR, refresh=REFRESH, sparse=SPARSE)

    def cost(steps):
        return expected_cost(given, values, steps, reuse, 1.0, ERROR)

    known = [(parts(steps), cost(steps)) for steps in all_lists()]
    with_sparse = 0
    for time in (1, 2, 2.5, 3, 3.45, 4, 5, 7):
        steps = placed.steps(time)
        assert parts(steps) <= time * PARTS
        least = min(own for needed, own in known if needed <= time * PARTS)
        assert cost(steps) == pytest.approx(least, rel=1e-5)
        with_sparse += bool(steps.sparse)
    assert with_sparse > 1


@pytest.mark.parametrize("reuse", [HELD, Reuse(), Reuse(0.5, 0.25)])
def test_no_list_of_full_steps_alone_costs_less(reuse):
    both = [trajectory(9, seed=seed) for seed in (0, 3)]
    costs = np.mean([jump_costs(given, reuse, 0.5) for given in both], axis=0)
    placed = Placed(both, reuse, 0.5)
    worthless = Placed(both, reuse, 0.5, error=1.0, refresh=1.5, sparse=0.9)
    for count in range(1, 10):
        steps = placed.steps(count)
        lists = [(0, *rest) for rest in itertools.combinations(range(1, 9), count - 1)]
        assert steps.full in lists
        least = min(list_cost(costs, full) for full in lists)
        assert list_cost(costs, steps.full) == pytest.approx(least, rel=1e-5, abs=1e-4)
        assert not steps.sparse
        assert worthless.steps(count) == steps
