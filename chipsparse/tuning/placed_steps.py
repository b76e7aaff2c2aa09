"""Full steps placed by dynamic programming over the costs of jumps.

So do DPCache (Cui et al. 2026, arXiv 2602.22654) and BudCache (arXiv 2606.13496).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from chipsparse.tuning.jump_costs import Reuse, Trajectory, jump_costs


class Placed:
    """The best full steps for any number of them; all others are skipped."""

    def __init__(
        self,
        trajectories: Sequence[Trajectory],  # one of each calibrating prompt, all of N steps
        reuse: Reuse,
        growth: float,
    ) -> None:
        costs = np.mean([jump_costs(one, reuse, growth) for one in trajectories], axis=0)
        steps = len(costs)
        # Least costs of lists that end with the steps a and b, by their number of steps.
        ends = np.full((steps, steps, steps + 1), np.inf)
        ends[0, 0, 1] = 0.0
        self._origins = np.zeros(ends.shape, dtype=np.int16)  # the step before a
        for b, c in itertools.combinations(range(steps), 2):
            jumps = ends[: b + 1, b] + costs[: b + 1, b, c, None]
            ends[b, c, 1:] = jumps.min(axis=0)[:-1]
            self._origins[b, c, 1:] = jumps.argmin(axis=0)[:-1]
        self._whole = ends + costs[..., steps, None]

    def steps(self, count: int) -> tuple[int, ...]:
        """Return that many steps of least cost, 0 among them."""
        whole = self._whole[..., count]
        a, b = (int(step) for step in np.unravel_index(whole.argmin(), whole.shape))
        listed = [b]
        for left in range(count, 1, -1):
            listed.append(a)
            a, b = int(self._origins[a, b, left]), a
        return tuple(reversed(listed))
