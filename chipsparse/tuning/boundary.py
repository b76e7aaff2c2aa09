"""Where along a row of numbers a condition begins or ceases to hold, with few looks at it."""

from __future__ import annotations

from collections.abc import Callable


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number that fits, where what is smaller fits, too; None where none does."""
    found = None
    while low <= high:
        middle = (low + high) // 2
        if fits(middle):
            found, low = middle, middle + 1
        else:
            high = middle - 1
    return found


def smallest(
    low: int, high: int, start: int, passes: Callable[[int], bool], may_go_on: Callable[[], bool]
) -> int | None:
    """The smallest number that passes, where all above it pass, too.

    From the start on in growing strides, then by bisection.

    Returns:
        None where none is known to pass.
    """
    failed, passed = low - 1, high + 1
    place, stride = min(high, max(low, start)), 1
    while failed + 1 < passed and may_go_on():
        if passes(place):
            passed = place
        else:
            failed = place
        if failed >= low and passed <= high:
            place = (failed + passed) // 2
        else:
            place = max(low, passed - stride) if passed <= high else min(high, failed + stride)
            stride *= 2
    return passed if passed <= high else None
