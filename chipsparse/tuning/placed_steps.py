"""Full and sparse steps placed together, by dynamic programming over the costs of jumps and time.

So DPCache (Cui et al. 2026, arXiv 2602.22654) and BudCache (arXiv 2606.13496) find full steps. A
sparse step may stand anywhere between two full ones, or nowhere, as it pays: it costs less time
than a full one and leaves an error behind. That error is a share of what has changed since the
refresh before it, all of it while the layout takes shape and little later on. It goes on until the
next full step or, where skipped steps are corrected, along the lines that meet in it. Those between
the last full step and a sparse one behind it count as if they were corrected, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from chipsparse.tuning.jump_costs import BEFORE_CORRECTION, Reuse, Trajectory, jump_costs, off_line

PARTS = 20  # of a dense step's time that are told apart where steps may be sparse
# How fast the share of a sparse step's error falls with the noise level, measured on tiny-wan. The
# level is the share of all that is to be removed which is still there before the step.
FALL = 8
FULL, SPARSE = 0, 1


class Steps(NamedTuple):
    """The steps that are computed: in full, 0 among them, and sparsely."""

    full: tuple[int, ...]
    sparse: tuple[int, ...] = ()


class Placed:
    """The best steps for any time."""

    def __init__(
        self,
        trajectories: Sequence[Trajectory],  # one of each calibrating prompt, all of N steps
        reuse: Reuse,
        growth: float,
        *,
        error: float | None = None,  # share of a change that a late sparse step misses; None: none
        refresh: float = 1.0,  # its time in dense steps
        sparse: float = 1.0,  # its time in dense steps
    ) -> None:
        steps = trajectories[0].steps
        held = [jump_costs(trajectory, reuse, growth) for trajectory in trajectories]
        costs = np.full((2, steps, steps, steps + 1), np.inf, dtype=np.float32)
        costs[FULL] = np.mean(held, axis=0)
        self._parts = [1]  # of a full step, and of a sparse one with what its refresh takes more
        if error is not None:
            pairs = zip(trajectories, held, strict=True)
            behind = [_behind_sparse(*pair, reuse, growth, error) for pair in pairs]
            costs[SPARSE] = np.mean(behind, axis=0)
            self._parts = [PARTS, max(1, round(PARTS * (max(0, refresh - 1) + sparse)))]
        # Least costs of lists that end with the steps a and b, by kind of b and time. Of two sparse
        # steps none follows the other, so that a full a stands before a sparse b.
        ends = np.full((2, steps, steps, steps * self._parts[FULL] + 1), np.inf, dtype=np.float32)
        ends[FULL, 0, 0, self._parts[FULL]] = 0.0
        # The step before a, and the kind of a: both as one number, ``kind * (a + 1) + step``.
        self._origins = np.zeros(ends.shape, dtype=np.int16)
        for b, c in itertools.combinations(range(steps), 2):
            jumps = ends[:, : b + 1, b] + costs[:, : b + 1, b, c, None]
            for kind, parts in enumerate(self._parts):
                if kind == SPARSE and b == 0:  # the first step cannot be a refresh
                    continue
                origins = jumps.reshape(-1, jumps.shape[-1]) if kind == FULL else jumps[FULL]
                ends[kind, b, c, parts:] = origins.min(axis=0)[:-parts]
                self._origins[kind, b, c, parts:] = origins.argmin(axis=0)[:-parts]
        self._whole = ends + costs[..., steps, None]

    def steps(self, time: float) -> Steps:
        """Return the steps of least cost in the time of so many dense steps, one at least."""
        within = self._whole[..., : int(time * self._parts[FULL]) + 1]
        kind, a, b, parts = (int(n) for n in np.unravel_index(within.argmin(), within.shape))
        computed: tuple[list[int], list[int]] = ([], [])
        while b > 0:
            computed[kind].insert(0, b)
            origin = int(self._origins[kind, a, b, parts])
            parts -= self._parts[kind]
            b = a
            kind, a = divmod(origin, a + 1)
        return Steps((0, *computed[FULL]), tuple(computed[SPARSE]))


def _behind_sparse(
    trajectory: Trajectory, held: np.ndarray, reuse: Reuse, growth: float, error: float
) -> np.ndarray:
    """Return the costs of jumps from a sparse step b to c; ``held`` are those from a full b."""
    products, steps = trajectory.products, trajectory.steps
    squares = np.diag(products)
    changes = (squares[:, None] + squares - 2 * products).clip(0)
    left = np.cumsum(trajectory.effects[::-1])[::-1]
    level = left / left[0]  # timesteps may rise or fall, by any scale
    missed = changes * (error + (1 - error) * level**FALL) ** 2  # [a, b]
    weights = trajectory.weights(growth)
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    reach = np.broadcast_to((sums - sums[:-1, None]) ** 2, held.shape)  # [a, b, c]
    if reuse.correct:
        # How much the error of b counts along the line from a to b, and along that from b to c.
        before, behind = np.zeros((2, steps, steps))
        for a, b in itertools.combinations(range(steps), 2):
            off = off_line(trajectory.times, weights, a, b)
            before[a, b] = -off[b]
            behind[a, b] = weights[a] - off[a]
        corrected = (before[:, :, None] + behind) ** 2 + BEFORE_CORRECTION * reach[..., :-1]
        reach = np.concatenate([corrected, reach[..., -1:]], axis=-1)
    return held + missed[:, :, None] * reach
