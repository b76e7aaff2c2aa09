"""Bootstrap intervals against counts by hand and the exact distribution of all resamples."""

import itertools
import math

import numpy as np
import pytest

from chipsparse.experiments.statistics import Interval, draws, interval


def test_by_hand():
    drawn = np.array([[0, 0, 0], [0, 1, 2], [1, 1, 2], [2, 2, 2]])
    values = [3.0, 6.0, 0.0]
    # Means 3, 3, 4, 0 and medians 3, 3, 6, 0: in order 0 3 3 4 and 0 3 3 6.
    assert interval(values, "mean", drawn, level=0.5) == Interval(3.0, 0.0, 3.0)
    assert interval(values, "median", drawn, level=0.5) == Interval(3.0, 0.0, 3.0)
    assert interval(values, "mean", drawn, level=0.4) == Interval(3.0, 3.0, 3.0)
    assert interval(values, "mean", drawn, level=0.95) == Interval(3.0, 0.0, 4.0)
    assert interval(values, "median", drawn, level=0.95) == Interval(3.0, 0.0, 6.0)


@pytest.mark.parametrize("statistic", ["mean", "median"])
def test_many_draws_come_to_the_interval_of_all_possible_ones(statistic):
    values = [1.0, 2.0, 4.0, 8.0, 16.0]
    every = np.array(list(itertools.product(range(5), repeat=5)))
    assert interval(values, statistic, draws(5)) == interval(values, statistic, every)


def test_it_covers_the_mean_about_as_often_as_it_says():
    generator = np.random.default_rng(1)
    drawn = draws(40, resamples=1000)
    covered = [
        interval(generator.normal(5.0, 2.0, 40).tolist(), "mean", drawn).contains(5.0)
        for _ in range(400)
    ]
    assert 0.91 < np.mean(covered) < 0.98


def test_draws_are_the_same_for_the_same_seed_and_hit_every_value_equally():
    np.testing.assert_array_equal(draws(7), draws(7))
    assert (draws(7) != draws(7, seed=1)).any()
    assert draws(7).shape == (10_000, 7)
    np.testing.assert_allclose(np.bincount(draws(7).ravel()) / 10_000, 1.0, atol=0.05)


def test_pairs_stay_together():
    """B is A plus one for every prompt, so B - A is one in every resample."""
    a = np.array([3.0, 1.0, 7.0, 5.0])
    drawn = draws(4)
    assert interval(a + 1 - a, "mean", drawn) == Interval(1.0, 1.0, 1.0)
    wide = interval(a, "mean", drawn)
    assert interval(a + 1, "mean", drawn) == Interval(wide.value + 1, wide.low + 1, wide.high + 1)


def test_identical_clips_have_an_infinite_psnr():
    found = interval([math.inf, 30.0, 40.0], "median", draws(3))
    assert found == Interval(40.0, 30.0, math.inf)
    assert interval([math.inf] * 2, "mean", draws(2)) == Interval(math.inf, math.inf, math.inf)


@pytest.mark.parametrize(
    ("values", "drawn", "message"),
    [
        ([1.0, math.nan], draws(2), "that can be added up"),
        ([math.inf, -math.inf], draws(2), "that can be added up"),
        ([1.0, 2.0, 3.0], draws(2), r"values \(3,\) and draws \(10000, 2\) do not fit"),
    ],
)
def test_refuses(values, drawn, message):
    with pytest.raises(ValueError, match=message):
        interval(values, "mean", drawn)
    with pytest.raises(ValueError, match="at least 2 values, got 1"):
        draws(1)


def test_bounds_belong_to_the_interval():
    assert Interval(1.0, 0.0, 2.0).contains(0.0)
    assert not Interval(1.0, 0.1, 2.0).contains(0.0)
