"""The search for the first place at which a target holds."""

import pytest

from chipsparse.tuning.search import search

PREDICTED = [20 + 0.2 * i for i in range(101)]  # 20 to 40


def true_psnr(place, offset, slope):
    return 30 + offset + slope * (PREDICTED[place] - 30)


@pytest.mark.parametrize("offset", [-6.0, 0.0, 4.0])
@pytest.mark.parametrize("slope", [0.5, 1.0, 1.6])
@pytest.mark.parametrize("goal", [27.0, 30.0, 32.0])
def test_it_finds_the_first_place_in_a_few_rounds(offset, slope, goal):
    asked = []

    def measure(place):
        asked.append(place)
        return true_psnr(place, offset, slope)

    holds = [i for i in range(101) if true_psnr(i, offset, slope) >= goal]
    found = search(PREDICTED, goal, measure, tolerance=0.3, rounds=8)
    if not holds:
        assert found.place is None
        assert found.best == 100
        return
    assert found.place is not None
    assert true_psnr(found.place, offset, slope) >= goal
    assert found.place == holds[0] or true_psnr(found.place, offset, slope) <= goal + 0.3
    assert len(asked) == len(set(asked)) <= 8


def test_what_is_known_is_not_measured_again():
    known = {i: true_psnr(i, 1.0, 1.0) for i in range(101)}

    def never(place):
        raise AssertionError(place)

    found = search(PREDICTED, 31.0, never, known=known, tolerance=0.0, rounds=8)
    assert found.place == 50


def test_an_unreachable_target_is_told_with_the_best():
    found = search(PREDICTED, 60.0, lambda i: true_psnr(i, 0, 0.5), tolerance=0.3, rounds=3)
    assert found.place is None
    assert found.best == 100
    assert found.measured[100] == pytest.approx(35.0)


def test_without_rounds_left_the_most_accurate_place_still_answers():
    found = search(PREDICTED, 31.0, lambda i: true_psnr(i, -8, 1.0), tolerance=0.0, rounds=1)
    assert found.place == 100
    assert found.measured[100] == pytest.approx(32.0)


def test_a_measurement_that_falls_does_not_end_in_a_wrong_place():
    def measure(place):
        return 29.0 if place % 2 else true_psnr(place, 0, 1.0)

    found = search(PREDICTED, 30.0, measure, tolerance=0.1, rounds=20)
    assert found.place is not None
    assert found.measured[found.place] >= 30.0
