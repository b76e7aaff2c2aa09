"""Lists of full steps, and of the sparse ones between them."""

import itertools
import math

import pytest

from chipsparse.config import ScheduleConfig
from chipsparse.skip.timetable import Action, Schedule, spread


def cost(steps, full):
    """What the steps of each gap count together, squared."""
    counts = [
        math.exp(4.1 * math.exp(-step / (steps - 1) / 0.2) + 1.7 * (step / (steps - 1)) ** 9)
        for step in range(steps)
    ]
    ends = zip(full, [*full[1:], steps], strict=True)
    return sum(sum(counts[step] for step in range(a + 1, b)) ** 2 for a, b in ends)


@pytest.mark.parametrize("count", range(1, 10))
def test_no_list_of_the_same_length_costs_less(count):
    lists = [(0, *rest) for rest in itertools.combinations(range(1, 10), count - 1)]
    steps = spread(10, count)
    assert steps in lists
    assert cost(10, steps) == pytest.approx(min(cost(10, other) for other in lists))


def test_lists_are_close_at_the_start_and_somewhat_closer_at_the_end():
    assert spread(50, 15) == (0, 1, 2, 3, 4, 5, 7, 9, 12, 16, 22, 29, 37, 44, 48)
    assert [spread(steps, steps) for steps in (1, 2, 12)] == [(0,), (0, 1), tuple(range(12))]


@pytest.mark.parametrize(
    ("least", "share", "steps", "count"),
    [
        *((2, share, 50, count) for share, count in ((0.001, 2), (0.26, 13), (1.0, 50))),
        *((2, 0.1, steps, count) for steps, count in ((1, 1), (2, 2), (3, 2), (40, 4))),
        *((8, 0.1, steps, count) for steps, count in ((1, 1), (8, 8), (9, 8), (80, 8), (100, 10))),
    ],
)
def test_shares_of_the_steps(least, share, steps, count):
    config = ScheduleConfig(full_share=share, least_full=least)
    assert len(Schedule(config, steps).full_steps) == count


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"refresh_every": 1}, False),
        ({"full_share": 0.3}, False),
        ({"full_share": 0.3, "sparse_steps": 0.2}, True),
        ({"full_share": 1.0, "sparse_steps": 0.2}, False),
        ({"full_steps": [0, 5], "sparse_steps": [7]}, True),
        ({"full_steps": [0, 5], "sparse_steps": 0}, False),
        ({"actions": ["dense", "skip"]}, False),
        ({"actions": ["dense", "refresh", "sparse"]}, True),
    ],
    ids=str,
)
def test_whether_a_schedule_names_sparse_steps_is_known_without_its_list(fields, expected):
    config = ScheduleConfig(**fields)
    assert config.names_sparse is expected
    assert (Action.SPARSE in Schedule(config, 60).actions) is expected
