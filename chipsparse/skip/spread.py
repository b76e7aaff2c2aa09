"""The steps that a `Spread` computes: full ones by dynamic programming, sparse ones between."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from chipsparse.config import Spread

# The weight of a skipped step by its place u in the generation, 0 to 1:
# exp(EARLY exp(-u / REACH) + LATE u^POWER). Fitted to lists that were searched for two models, and
# the best that was tried where skipped steps are not put right: benchmarks/notes/schedules.md.
EARLY = 4.1
REACH = 0.2
LATE = 1.7
POWER = 9
# They are flatter where sparse steps stand between full ones: the caches of a refresh grow old.
EARLY_OF_SPARSE = 3.0
LATE_OF_SPARSE = 1.4
# A run of at most this number of steps has at most this number of full ones, see `short_list`.
SHORT_RUN = 8
FULL_OF_SHORT = 3


def is_short(form: Spread, count: int) -> bool:
    """Return True where all but some of the first of ``count`` steps are sparse."""
    some_sparse = round(form.full * count) < count and form.sparse > 0
    return some_sparse and 2 < count <= SHORT_RUN


def full_steps(form: Spread, count: int) -> tuple[int, ...]:
    """Return the full steps of a run of ``count`` steps, from 0."""
    if is_short(form, count):
        return short_list(count)
    full = min(count, max(form.at_least, round(form.full * count)))
    return spread(count, full, among_sparse=form.sparse > 0)


def sparse_steps(form: Spread, full: Sequence[int], count: int) -> Sequence[int]:
    """Return the sparse steps between the ``full`` ones of a run of ``count`` steps, from 0."""
    if form.sparse == 1 or is_short(form, count):
        return range(count)
    return halved(full, count, round(form.sparse * count))


def _weights(steps: int, *, among_sparse: bool) -> NDArray[np.float64]:
    early = EARLY_OF_SPARSE if among_sparse else EARLY
    late = LATE_OF_SPARSE if among_sparse else LATE
    places = np.arange(steps) / max(1, steps - 1)
    return np.exp(early * np.exp(-places / REACH) + late * places**POWER)


def halved(full_steps: Sequence[int], end: int, count: int) -> list[int]:
    """Return ``count`` sparse steps, each in the middle of the largest skipped interval then left.

    The size of an interval is the sum of the roots of its steps' weights. The one after the first
    full step has no sparse step, since the first cannot be a refresh.
    """
    sums = np.concatenate([[0.0], np.cumsum(_weights(end, among_sparse=True) ** 0.5)])
    computed = [*full_steps[1:], end]
    for _ in range(min(count, end - full_steps[0] - len(full_steps))):
        intervals = itertools.pairwise(computed)
        largest = max(intervals, key=lambda ends: sums[ends[1]] - sums[ends[0] + 1], default=(0, 0))
        if largest[1] - largest[0] < 2:
            break
        bisect.insort(computed, sum(largest) // 2)
    return sorted(set(computed[:-1]) - set(full_steps))


@functools.lru_cache(maxsize=64)
def spread(steps: int, count: int, *, among_sparse: bool = False) -> tuple[int, ...]:
    """Return ``count`` full steps, from 0: close at the start, and somewhat closer at the end.

    A skipped interval costs the square of the sum of its steps' weights, so intervals are short
    where weights are large. The list costs the least of all of its length, by dynamic programming.
    """
    sums = np.concatenate([[0.0], np.cumsum(_weights(steps, among_sparse=among_sparse))])
    costs = (sums[None, :] - sums[1:, None]) ** 2  # from after a step to another, or to the end
    costs[np.tril_indices(steps, m=steps + 1)] = np.inf
    ending = np.full(steps, np.inf)  # the least cost of a list that ends with each step
    ending[0] = 0.0
    origins = []
    for _ in range(count - 1):
        longer = ending[:, None] + costs[:, :steps]
        origins.append(longer.argmin(axis=0))
        ending = longer.min(axis=0)
    listed = [int((ending + costs[:, steps]).argmin())]
    for origin in reversed(origins):
        listed.append(int(origin[listed[-1]]))
    return tuple(reversed(listed))


def short_list(steps: int, count: int = FULL_OF_SHORT) -> tuple[int, ...]:
    """Return the full steps of a short run: the first two, and then every other one.

    There are at most ``count``, and the last step is never full: benchmarks/notes/few_steps.md.
    """
    return (0, *range(1, steps - 1, 2))[:count]
