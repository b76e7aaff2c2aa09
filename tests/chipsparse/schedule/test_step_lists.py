"""Lists of full steps, and of the sparse ones between them."""

import pytest

from chipsparse.schedule.step_lists import front_loaded, full_count, sparse_between


@pytest.mark.parametrize(
    ("steps", "count", "front_load", "expected"),
    [
        (50, 11, 2.0, [0, 1, 2, 4, 8, 12, 17, 23, 30, 38, 47]),  # 0.47, 1.88, 4.23, ...; 0 twice
        (50, 13, 2.5, [0, 1, 2, 3, 4, 5, 8, 12, 17, 23, 30, 38, 47]),  # 2 and 4 were free
        (50, 6, 1.0, [0, 9, 19, 28, 38, 47]),
        (50, 2, 2.0, [0, 47]),
        (12, 12, 3.0, range(12)),
        (12, 5, 9.0, [0, 1, 2, 3, 11]),
        (1, 1, 2.0, [0]),
        (2, 2, 2.0, [0, 1]),
    ],
)
def test_front_loaded_lists(steps, count, front_load, expected):
    assert list(front_loaded(steps, count, front_load)) == list(expected)


@pytest.mark.parametrize("front_load", [1.0, 1.7, 2.5, 6.0])
@pytest.mark.parametrize("steps", [3, 30, 50])
def test_lists_have_their_length_and_are_in_order(steps, front_load):
    for count in range(2, steps + 1):
        found = front_loaded(steps, count, front_load)
        assert len(found) == count
        assert list(found) == sorted(set(found))
        assert found[0] == 0
        assert found[-1] == max(count - 1, round(0.96 * (steps - 1)))


def test_shares_of_the_steps():
    assert [full_count(50, share, 2) for share in (0.001, 0.26, 1.0)] == [2, 13, 50]
    assert [full_count(steps, 0.1, 2) for steps in (1, 2, 3, 40)] == [1, 2, 2, 4]
    assert [full_count(steps, 0.1, 8) for steps in (1, 8, 9, 80, 100)] == [1, 8, 8, 8, 10]


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        ("none", [[], [], [], []]),
        ("middle", [[], [], [], [8]]),
        ("every_other", [[], [], [7], [7, 9]]),
        ("all", [[], [6], [6, 7], [6, 7, 8, 9, 10]]),
    ],
)
def test_sparse_steps_of_gaps_of_several_lengths(between, expected):
    assert [list(sparse_between(5, end, between)) for end in (6, 7, 8, 11)] == expected
