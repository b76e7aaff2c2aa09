"""The best list of full steps of every length, by dynamic programming over the costs of jumps.

As Cui et al. 2026 (DPCache, arXiv 2602.22654) and BudCache (arXiv 2606.13496) do. What a jump costs
depends on the full step before it, so that a state is the last two full steps.
"""

from __future__ import annotations

import numpy as np


def best_lists(costs: np.ndarray) -> dict[int, tuple[int, ...]]:
    """The list of least cost for every number of full steps.

    Args:
        costs: ``[N, N, N + 1]``, as of `jump_costs`.

    Returns:
        For each number from 1 to N the full steps, the first of which is 0.
    """
    steps = costs.shape[0]
    # Cost of the best list that ends with the full steps a and b, at [a, b].
    ending = np.full((steps, steps), np.inf)
    ending[0, 0] = 0.0
    origins: list[np.ndarray] = []
    lists = {}
    for count in range(1, steps + 1):
        whole = ending + costs[:, :, steps]
        a, b = np.unravel_index(int(whole.argmin()), whole.shape)
        lists[count] = _traced(origins, int(a), int(b))
        longer = ending[:, :, None] + costs[:, :, :steps]  # [a, b, c]
        origins.append(longer.argmin(axis=0))
        ending = longer.min(axis=0)
    return lists


def _traced(origins: list[np.ndarray], a: int, b: int) -> tuple[int, ...]:
    """The list that ends with a and b, from what came before each pair."""
    found = [b]
    for origin in reversed(origins):
        a, b = int(origin[a, b]), a
        found.append(b)
    return tuple(reversed(found))
