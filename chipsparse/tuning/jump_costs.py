"""The cost of leaving steps out, computed from the outputs of a dense generation.

Between two full steps b and c the outputs are held or forecast. Where they are corrected once c is
known, they end up on the line between the outputs of b and c. Their errors, each times its effect
on the latents, add up to one vector for the gap. The vectors of different gaps are nearly
unrelated, so the square of its length is the cost of the jump from b to c. All such vectors are
linear in the outputs, so the outputs' inner products are all that is kept of a generation.

Full steps are placed by dynamic programming over these costs, as in DPCache (Cui et al. 2026, arXiv
2602.22654) and BudCache (arXiv 2606.13496).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# The weight of a gap's error before it is corrected: the full step behind it is computed there.
BEFORE_CORRECTION = 0.5


@dataclass(frozen=True)
class Trajectory:
    """A dense generation of N steps, in float64."""

    products: np.ndarray  # [N, N], inner products of the outputs that the scheduler was given
    effects: np.ndarray  # [N], how far a step moves the latents along its output
    times: np.ndarray  # [N], the timesteps

    @property
    def steps(self) -> int:
        """Denoising steps."""
        return len(self.times)

    def weights(self, growth: float) -> np.ndarray:
        """Return the weight of an error of each step's output, ``[N]``.

        One at step i counts ``((i + 1) / N) ** -growth`` times: early ones grow until the end.
        """
        return self.effects * ((np.arange(self.steps) + 1) / self.steps) ** -growth


@dataclass(frozen=True)
class Reuse:
    """The outputs that stand for those of skipped steps; see `ScheduleConfig`.

    Where the scheduler's steps cannot be corrected, ``correct`` changes the lists alone.
    """

    forecast: float = 0.0
    forecast_after: float = 0.0
    correct: bool = True


def jump_costs(trajectory: Trajectory, reuse: Reuse, growth: float) -> np.ndarray:
    """Return the cost of every jump, ``[N, N, N + 1]`` float64; infinite where there is none.

    At ``[a, b, c]`` is that between full steps b and c (N: the end), where a was the full step
    before b. At ``[0, 0, c]`` there was none.
    """
    steps = trajectory.steps
    products = trajectory.products
    times = trajectory.times
    weights = trajectory.weights(growth)
    costs = np.full((steps, steps, steps + 1), np.inf)
    for b in range(steps):
        befores = list(range(b)) or [0]
        held, reaches = _gap_errors(trajectory, reuse, weights, b)
        changes = np.stack([_change(times, a, b) for a in befores])
        # The squares of ``held - reaches * changes``, for every a and c.
        projected = changes @ products
        squares = (
            np.einsum("cn,cn->c", held @ products, held)
            - 2 * reaches * (projected @ held.T)
            + reaches**2 * np.einsum("an,an->a", projected, changes)[:, None]
        )
        for c in range(b + 1, steps if reuse.correct else 0):
            off = _off_line(times, weights, b, c)
            gap = c - b - 1
            squares[:, gap] = BEFORE_CORRECTION * squares[:, gap] + off @ products @ off
        costs[befores, b, b + 1 :] = squares.clip(0)
    return costs


def drift(trajectory: Trajectory, reuse: Reuse, growth: float, full: Sequence[int]) -> float:
    """Return the square of a list's error before anything is corrected: of all gaps together.

    A held output lags behind in every gap, to the same side, which the costs of single jumps cannot
    show. So drift compares forecasts, as the costs compare lists. ``full`` begins with 0.
    """
    weights = trajectory.weights(growth)
    error = np.zeros(trajectory.steps)
    ends = [*full[1:], trajectory.steps]
    for before, start, end in zip([0, *full], full, ends, strict=False):
        held, reaches = _gap_errors(trajectory, reuse, weights, start)
        gap = end - start - 1
        error += held[gap] - reaches[gap] * _change(trajectory.times, before, start)
    return float(error @ trajectory.products @ error)


def _gap_errors(
    trajectory: Trajectory,
    reuse: Reuse,
    weights: np.ndarray,
    start: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the weighted sums of the errors behind a full step, at ``c - start - 1`` up to c.

    They are those of the held output, ``[N - start, N]`` in terms of the outputs; and how much of
    the change before that step, a unit of time, forecasts take off, ``[N - start]``.
    """
    steps = np.arange(trajectory.steps)
    times = trajectory.times
    behind = np.where(steps > start, weights, 0.0)
    outputs = np.eye(trajectory.steps)
    held = behind[:, None] * (outputs - outputs[start])
    first_forecast = reuse.forecast_after * trajectory.steps
    forecast = np.where(steps >= first_forecast, reuse.forecast, 0.0)
    reaches = behind * forecast * (times - times[start])
    return held.cumsum(axis=0)[start:], reaches.cumsum()[start:]


def _change(times: np.ndarray, old: int, new: int) -> np.ndarray:
    """Return the change of the output between two steps, a unit of time, ``[N]``."""
    change = np.zeros(len(times))
    if times[old] != times[new]:  # of equal ones, as of one step, the output is held
        change[[new, old]] = np.array([1.0, -1.0]) / (times[new] - times[old])
    return change


def _off_line(times: np.ndarray, weights: np.ndarray, old: int, new: int) -> np.ndarray:
    """Return the weighted sum of the outputs' distances from the line between two steps, ``[N]``.

    Between equal timesteps the output of the old step is held.
    """
    inner = np.arange(old + 1, new)
    span = times[new] - times[old]
    share = (times[inner] - times[old]) / span if span else np.zeros(len(inner))
    error = np.zeros(len(times))
    error[inner] = weights[inner]
    error[old] = -(weights[inner] @ (1 - share))
    error[new] = -(weights[inner] @ share)
    return error


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
