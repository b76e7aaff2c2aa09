"""Which steps are computed in full, and which of those between them sparsely: plain numbers."""

from __future__ import annotations

import functools

import numpy as np

from chipsparse.config import Between

# How much it counts to skip a step, by its place u in the generation, 0 to 1:
# exp(EARLY exp(-u / REACH) + LATE u^POWER). Fitted to lists that were searched for two models, and
# the best that was tried where skipped steps are not put right: benchmarks/notes/schedules.md.
EARLY, REACH, LATE, POWER = 4.1, 0.2, 1.7, 9
# Steps of a gap whose middle is worth a sparse one: shorter ones are early, where outputs change
# too much for it.
LEAST_GAP = 3


def full_count(steps: int, share: float, least: int) -> int:
    """How many of the steps are computed in full: a share of them, but so many if there are."""
    return min(steps, max(least, round(share * steps)))


@functools.lru_cache(maxsize=64)
def spread(steps: int, count: int) -> tuple[int, ...]:
    """Full steps where the others count least: close at the start, somewhat closer at the end.

    A gap costs the square of what its skipped steps count together, so that gaps are short where
    each counts much. The list costs the least of all of its length, by dynamic programming.

    Args:
        steps: how many there are.
        count: how many are listed, 1 to ``steps``.

    Returns:
        ``count`` different steps, from 0, in order.
    """
    places = np.arange(steps) / max(1, steps - 1)
    counts = np.exp(EARLY * np.exp(-places / REACH) + LATE * places**POWER)
    sums = np.concatenate([[0.0], np.cumsum(counts)])
    gaps = (sums[None, :] - sums[1:, None]) ** 2  # from behind a step to one, or to the end
    gaps[np.tril_indices(steps, m=steps + 1)] = np.inf
    ending = np.full(steps, np.inf)  # the least cost of a list that ends with each step
    ending[0] = 0.0
    origins = []
    for _ in range(count - 1):
        longer = ending[:, None] + gaps[:, :steps]
        origins.append(longer.argmin(axis=0))
        ending = longer.min(axis=0)
    found = [int((ending + gaps[:, steps]).argmin())]
    for origin in reversed(origins):
        found.append(int(origin[found[-1]]))
    return tuple(reversed(found))


def sparse_between(full: int, end: int, between: Between) -> range:
    """The sparse ones of the steps behind a full one.

    Args:
        full: the full step.
        end: the next full one, or the number of steps.
        between: none of them; all; of two and more every second one; or of `LEAST_GAP` and more
            the middle one.
    """
    gap = range(full + 1, end)
    if between == "all":
        return gap
    if between == "every_other":
        return gap[1::2]
    middle = len(gap) // 2
    return gap[middle : middle + 1] if between == "middle" and len(gap) >= LEAST_GAP else gap[:0]
