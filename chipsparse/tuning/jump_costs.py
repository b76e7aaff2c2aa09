"""What it costs to leave steps out, scored on the outputs of a dense generation, for nothing.

Between two full steps b and c some outputs are sparse. The others are held or forecast and, where
they are corrected once c is known, end up on the line between the outputs computed around them.
Their errors, each times what the scheduler lets it do to the latents, add up to one vector for the
gap. The vectors of different gaps have little to do with each other, so that the square of its
length is the cost of the jump from b to c. All such vectors are linear in the outputs: the outputs'
inner products are all that must be kept of a generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from chipsparse.config import Between
from chipsparse.schedule.step_lists import sparse_between

# What counts of a gap's error before it is corrected: the full step behind it is computed there.
BEFORE_CORRECTION = 0.5


@dataclass(frozen=True)
class Trajectory:
    """A dense generation of N steps.

    Attributes:
        products: ``[N, N]`` float64, inner products of the outputs that the scheduler was given.
        effects: ``[N]`` float64, how far a step moves the latents along its output.
        times: ``[N]`` float64, the timesteps.
    """

    products: np.ndarray
    effects: np.ndarray
    times: np.ndarray

    @property
    def steps(self) -> int:
        """How many there are."""
        return len(self.times)


@dataclass(frozen=True)
class Reuse:
    """What stands for the outputs of the steps that are not full; see `ScheduleConfig`.

    Where the scheduler is none whose steps can be corrected, ``correct`` changes the lists alone.
    """

    between: Between = "none"
    forecast: float = 0.0
    forecast_after: float = 0.0
    correct: bool = True


def jump_costs(trajectory: Trajectory, reuse: Reuse, growth: float) -> np.ndarray:
    """The cost of every jump; infinite where there is none.

    Sparse outputs are taken to be exact: how good they are is for generations to tell.

    Args:
        trajectory: what the outputs are.
        reuse: what stands for them.
        growth: an error at step i counts ``((i + 1) / N) ** -growth`` times, since those of early
            steps grow until the end.

    Returns:
        ``[N, N, N + 1]`` float64: the cost between full steps b and c (N: the end), where a was the
        full step before b, at ``[a, b, c]``. At ``[0, 0, c]`` there was none.
    """
    steps, products, times = trajectory.steps, trajectory.products, trajectory.times
    weights = step_weights(trajectory, growth)
    costs = np.full((steps, steps, steps + 1), np.inf)
    for b in range(steps):
        befores = list(range(b)) or [0]
        computed = [_last_computed(reuse.between, a, b) for a in befores]
        # What a forecast from step b adds to its output: so much of ``change`` a unit of time.
        change = np.zeros((len(befores), steps))
        for row, before in enumerate(computed):
            if times[before] != times[b]:  # of equal ones, as of one step, the output is held
                change[row, [b, before]] = np.array([1.0, -1.0]) / (times[b] - times[before])
        change_products = change @ products
        change_squares = np.einsum("ij,ij->i", change_products, change)
        for c in range(b + 1, steps + 1):
            sparse = sparse_between(b, c, reuse.between)
            error, slope = _gap(trajectory, reuse, weights, (b, *sparse), c)
            squares = (
                error @ products @ error
                - 2 * slope * (change_products @ error)
                + slope**2 * change_squares
            )
            if reuse.correct and c < steps:
                off = _off_lines(times, weights, [b, *sparse, c])
                squares = BEFORE_CORRECTION * squares + off @ products @ off
            costs[befores, b, c] = squares.clip(0)
    return costs


def step_weights(trajectory: Trajectory, growth: float) -> np.ndarray:
    """How much an error of each step's output counts, ``[N]``; see `jump_costs`."""
    steps = trajectory.steps
    return trajectory.effects * ((np.arange(steps) + 1) / steps) ** -growth


def _gap(
    trajectory: Trajectory, reuse: Reuse, weights: np.ndarray, computed: Sequence[int], end: int
) -> tuple[np.ndarray, float]:
    """The weighted sum of the errors between computed steps, and behind the last one to the end.

    Returns:
        What is known without the step computed before them, ``[N]`` in terms of the outputs; and
        how much of the change from that step to the first, a unit of time, is to be taken from it.
    """
    times = trajectory.times
    error, slope = np.zeros(trajectory.steps), 0.0
    last, before = computed[0], None
    for step in range(last + 1, end):
        if step in computed:
            last, before = step, last
            continue
        weight = weights[step]
        error[step] += weight
        error[last] -= weight
        if step >= reuse.forecast_after * trajectory.steps:
            reach = weight * reuse.forecast * (times[step] - times[last])
            if before is None:
                slope += reach
            elif times[last] != times[before]:
                rate = reach / (times[last] - times[before])
                error[last] -= rate
                error[before] += rate
    return error, slope


def _off_lines(times: np.ndarray, weights: np.ndarray, computed: Sequence[int]) -> np.ndarray:
    """The weighted sum of what outputs differ by from the lines between computed steps, ``[N]``."""
    error = np.zeros(len(times))
    for old, new in pairwise(computed):
        inner, share = along_line(times, old, new)
        error[inner] += weights[inner]
        error[old] -= weights[inner] @ (1 - share)
        error[new] -= weights[inner] @ share
    return error


def along_line(times: np.ndarray, old: int, new: int) -> tuple[np.ndarray, np.ndarray]:
    """The steps between two, and what share of the way from one to the other each stands."""
    inner = np.arange(old + 1, new)
    span = times[new] - times[old]
    return inner, (times[inner] - times[old]) / span if span else np.zeros(len(inner))


def _last_computed(between: Between, a: int, b: int) -> int:
    """The step computed last before the full step b, where a was the full one before."""
    return max([a, *sparse_between(a, b, between)])


def drift(trajectory: Trajectory, reuse: Reuse, growth: float, computed: Sequence[int]) -> float:
    """How far a list leads astray before anything is corrected: the errors of all gaps together.

    What is held lags behind in every gap, to the same side, which the costs of jumps do not know
    of each other. So this tells one forecast from another, as those do one list from another.

    Args:
        trajectory: what the outputs are.
        reuse: what stands for them.
        growth: of errors, see `jump_costs`.
        computed: all steps that are, from 0, in order.

    Returns:
        The square of the length of the sum.
    """
    weights = step_weights(trajectory, growth)
    # Before the first step there is none that a forecast could start from.
    error, _ = _gap(trajectory, reuse, weights, computed, trajectory.steps)
    return float(error @ trajectory.products @ error)
