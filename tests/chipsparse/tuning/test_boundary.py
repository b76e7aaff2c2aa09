"""Where a condition begins to hold, and how often it is looked at."""

import pytest

from chipsparse.tuning.boundary import largest, smallest


@pytest.mark.parametrize(("most", "expected"), [(1, None), (2, 2), (5, 5), (9, 7)])
def test_the_largest_that_fits(most, expected):
    assert largest(2, 7, lambda number: number <= most) == expected


@pytest.mark.parametrize("start", [2, 5, 11, 30])
@pytest.mark.parametrize("boundary", [2, 3, 10, 18, 19, 25])
def test_the_smallest_that_passes(start, boundary):
    asked = []

    def passes(number):
        asked.append(number)
        return number >= boundary

    expected = boundary if boundary <= 19 else None
    assert smallest(2, 19, start, passes, lambda: True) == expected
    assert len(asked) == len(set(asked)) <= 9


def test_without_budget_the_smallest_known_one_counts():
    left = iter([True, True, True, False])
    assert smallest(2, 19, 10, lambda number: number >= 3, lambda: next(left)) == 7
