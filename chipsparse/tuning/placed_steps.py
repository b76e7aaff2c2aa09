"""Full and sparse steps placed together, by dynamic programming over the costs of jumps and time.

A sparse step may stand anywhere between two full ones, or nowhere, as it pays: it costs less time
than a full one and leaves an error behind. That error is a share of what has changed since the
refresh before it, all of it while the layout takes shape and little later on. It goes on until the
next full step or, where skipped steps are corrected, along the lines that meet in it. Those between
the last full step and a sparse one behind it count as if they were corrected, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from chipsparse.tuning.jump_costs import (
    BEFORE_CORRECTION,
    Reuse,
    Trajectory,
    along_line,
    jump_costs,
    step_weights,
)

# Parts of a dense step's time that are told apart.
PARTS = 20
# How fast the share of a sparse step's error falls with the noise level, measured on tiny-wan. The
# level is the share of all that is to be removed which is still there before the step.
FALL = 8


class Steps(NamedTuple):
    """Which steps are computed.

    Attributes:
        full: in full, 0 among them.
        sparse: sparsely; None where a rule says which.
    """

    full: tuple[int, ...]
    sparse: tuple[int, ...] | None = None


class Placed:
    """The best steps for any time.

    Args:
        trajectories: one of each calibrating prompt, of the same number of steps N.
        reuse: what stands for skipped steps.
        growth: of errors, see `jump_costs`.
        error: share of a change that a late sparse step misses.
        refresh: time of a refresh, in dense steps.
        sparse: likewise of a sparse step.
    """

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        reuse: Reuse,
        growth: float,
        *,
        error: float,
        refresh: float,
        sparse: float,
    ) -> None:
        steps = self._steps = trajectories[0].steps
        held = [jump_costs(each, reuse, growth) for each in trajectories]
        behind_full = np.mean(held, axis=0).astype(np.float32)
        pairs = zip(trajectories, held, strict=True)
        behind_sparse = np.mean(
            [_behind_sparse(*pair, reuse, growth, error) for pair in pairs], axis=0
        ).astype(np.float32)
        full_parts, sparse_parts = PARTS, max(1, round(PARTS * (max(0, refresh - 1) + sparse)))
        parts = steps * PARTS + 1
        # Least costs of lists that end with the computed steps a and b, by time: [a, b, parts].
        # Of two sparse steps none follows the other, so that behind a sparse b stands a full a.
        shape = steps, steps, parts
        full, thin = (np.full(shape, np.inf, dtype=np.float32) for _ in range(2))
        full[0, 0, PARTS] = 0.0
        # Which step stood before a and b; that of `full` counts on from `steps` where a is sparse.
        self._before_full, self._before_thin = (np.zeros(shape, dtype=np.int16) for _ in range(2))
        for b in range(steps):
            ends_full, ends_thin = full[: b + 1, b], thin[: b + 1, b]
            for c in range(b + 1, steps):
                go_full = ends_full + behind_full[: b + 1, b, c, None]
                both = np.concatenate([go_full, ends_thin + behind_sparse[: b + 1, b, c, None]])
                best = both.argmin(axis=0)
                cost = np.take_along_axis(both, best[None], axis=0)[0]
                full[b, c, full_parts:] = cost[:-full_parts]
                origin = np.where(best > b, best - (b + 1) + steps, best)
                self._before_full[b, c, full_parts:] = origin[:-full_parts]
                if b == 0:  # the first step cannot be a refresh
                    continue
                best = go_full.argmin(axis=0)
                cost = np.take_along_axis(go_full, best[None], axis=0)[0]
                thin[b, c, sparse_parts:] = cost[:-sparse_parts]
                self._before_thin[b, c, sparse_parts:] = best[:-sparse_parts]
        self._parts_of_thin = sparse_parts
        end_full = full + behind_full[:, :, steps, None]
        end_thin = thin + behind_sparse[:, :, steps, None]
        self._whole = np.stack([end_full, end_thin])

    def steps(self, time: float) -> Steps:
        """The steps of least cost in the time of so many dense steps, one at least."""
        within = self._whole[..., : int(time * PARTS) + 1]
        thin, a, b, parts = (int(n) for n in np.unravel_index(within.argmin(), within.shape))
        found: tuple[list[int], list[int]] = ([], [])
        while True:
            found[thin].append(b)
            if b == 0:
                return Steps(tuple(reversed(found[0])), tuple(reversed(found[1])))
            origins = self._before_thin if thin else self._before_full
            origin = int(origins[a, b, parts])
            parts -= self._parts_of_thin if thin else PARTS
            b, (thin, a) = a, divmod(origin, self._steps)


def _behind_sparse(
    trajectory: Trajectory, held: np.ndarray, reuse: Reuse, growth: float, error: float
) -> np.ndarray:
    """Costs of jumps from a sparse step b, with the full a before it, to c; as of `jump_costs`."""
    products = trajectory.products
    squares = np.diag(products)
    changes = (squares[:, None] + squares - 2 * products).clip(0)
    left = np.cumsum(trajectory.effects[::-1])[::-1]
    level = left / left[0]  # timesteps may rise or fall, by any scale
    missed = changes * (error + (1 - error) * level**FALL) ** 2  # [a, b]
    weights = step_weights(trajectory, growth)
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    reach = np.broadcast_to((sums[None, :] - sums[:-1, None]) ** 2, held.shape)  # [a, b, c]
    if reuse.correct:
        before, behind = _along_lines(trajectory.times, weights)
        corrected = (before[:, :, None] + behind[None]) ** 2 + BEFORE_CORRECTION * reach[..., :-1]
        reach = np.concatenate([corrected, reach[..., -1:]], axis=-1)
    return held + missed[:, :, None] * reach


def _along_lines(times: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How much the error of a step b counts along the lines to the steps around it.

    Returns:
        From a before it to b, ``[a, b]``, and from b on to c behind it, ``[b, c]``.
    """
    steps = len(times)
    before, behind = np.zeros((2, steps, steps))
    for a in range(steps):
        for b in range(a + 1, steps):
            inner, share = along_line(times, a, b)
            before[a, b] = weights[inner] @ share
            behind[a, b] = weights[a] + weights[inner] @ (1 - share)
    return before, behind
