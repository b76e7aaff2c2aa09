"""Made-up dense generations, and what a schedule does to them, step by step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from chipsparse.tuning.jump_costs import Reuse, Trajectory


def outputs(steps, *, seed=0, width=12):
    """A smooth random walk ``[N, D]``."""
    changes = np.random.default_rng(seed).standard_normal((steps, width))
    return np.cumsum(np.cumsum(changes, axis=0), axis=0)


def trajectory(steps, *, seed=0):
    """The trajectory of those outputs, with uneven times and effects."""
    values = outputs(steps, seed=seed)
    generator = np.random.default_rng(seed + 1)
    times = 1000 - np.cumsum(generator.uniform(5, 30, steps))
    return Trajectory(values @ values.T, -generator.uniform(0.01, 0.1, steps), times)


def reused(values, times, full_steps, reuse):
    """The outputs of a list of full steps ``[N, D]``, as the session makes them.

    Where they are corrected, those that the solver has in the end.
    """
    steps = len(values)
    made = values.copy()
    ends = [*full_steps[1:], steps]
    for before, last, end in zip([0, *full_steps], full_steps, ends, strict=False):
        for step in range(last + 1, end):
            made[step] = values[last]
            if reuse.correct and end < steps:
                old = last
                new = end
                scale = 1.0
            elif step >= reuse.forecast_after * steps:
                old = before
                new = last
                scale = reuse.forecast
            else:
                continue
            if times[old] != times[new]:
                reach = (times[step] - times[last]) / (times[new] - times[old])
                made[step] += scale * reach * (values[new] - values[old])
    return made


def errors_of_gaps(values, times, weights, full_steps, reuse):
    """The squares of their lengths; where they are corrected, with half of those before that."""

    def squares(reuse):
        errors = values - reused(values, times, full_steps, reuse)
        gaps = zip(full_steps, [*full_steps[1:], len(values)], strict=True)
        return np.array([np.sum((weights[a:b] @ errors[a:b]) ** 2) for a, b in gaps])

    before = squares(replace(reuse, correct=False))
    if not reuse.correct:
        return before.sum()
    return squares(reuse).sum() + before[:-1].sum() / 2


def list_cost(costs, full_steps):
    """The cost of a whole list: the sum over its jumps, the one to the end included."""
    places = [0, *full_steps, costs.shape[0]]
    jumps = zip(places, places[1:], places[2:], strict=False)
    return float(sum(costs[a, b, c] for a, b, c in jumps))


HOLD = Reuse(correct=False)
