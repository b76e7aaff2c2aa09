"""Which steps are computed in full, and which of those between them sparsely: plain numbers."""

from __future__ import annotations

from typing import Literal

Between = Literal["none", "middle", "every_other", "all"]

# Where the last full step of a list stands: skipped steps behind it cannot be corrected.
END = 0.96
# Steps of a gap whose middle is worth a sparse one: shorter ones are early, where outputs change
# too much for it.
LEAST_GAP = 3


def full_count(steps: int, share: float, least: int) -> int:
    """How many of the steps are computed in full: a share of them, but so many if there are."""
    return min(steps, max(least, round(share * steps)))


def front_loaded(steps: int, count: int, front_load: float) -> tuple[int, ...]:
    """Steps at ``END * (steps - 1) * (i / (count - 1)) ** front_load``.

    Those that fall together with others move to the first steps that are free.

    Args:
        steps: how many there are.
        count: how many are listed, 1 to ``steps``.
        front_load: 1 for equal distances; the higher, the closer the first ones are.

    Returns:
        ``count`` different steps, from 0, in order.
    """
    last = max(1, count - 1)
    listed = {round(END * (steps - 1) * (i / last) ** front_load) for i in range(count)}
    free = (step for step in range(steps) if step not in listed)
    return tuple(sorted([*listed, *(next(free) for _ in range(count - len(listed)))]))


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
