"""Bootstrap intervals against counts by hand and the exact distribution of all resamples."""

import itertools
import math

import numpy as np
import pytest

from chipsparse.experiments.statistics import Estimate, draws, interval


@pytest.mark.parametrize(
    ("statistic", "level", "low", "high"),
    [
        # Means 3, 3, 4, 0 and medians 3, 3, 6, 0: in order 0 3 3 4 and 0 3 3 6.
        ("mean", 0.5, 0.0, 3.0),
        ("median", 0.5, 0.0, 3.0),
        ("mean", 0.4, 3.0, 3.0),
        ("mean", 0.95, 0.0, 4.0),
        ("median", 0.95, 0.0, 6.0),
    ],
)
def test_by_hand(statistic, level, low, high):
    drawn = np.array([[0, 0, 0], [0, 1, 2], [1, 1, 2], [2, 2, 2]])
    made = interval([3.0, 6.0, 0.0], statistic, drawn, level=level)
    assert made == Estimate(value=3.0, low=low, high=high)
    assert made.includes_zero is (low == 0)


@pytest.mark.parametrize("statistic", ["mean", "median"])
def test_many_draws_come_to_the_interval_of_all_possible_ones(statistic):
    values = [1.0, 2.0, 4.0, 8.0, 16.0]
    every = np.array(list(itertools.product(range(5), repeat=5)))
    assert interval(values, statistic, draws(5)) == interval(values, statistic, every)


def test_draws_are_the_same_each_time_and_hit_every_value_equally():
    np.testing.assert_array_equal(draws(7), draws(7))
    assert draws(7).shape == (10_000, 7)
    np.testing.assert_allclose(np.bincount(draws(7).ravel()) / 10_000, 1.0, atol=0.05)


def test_identical_clips_have_an_infinite_psnr():
    made = interval([math.inf, 30.0, 40.0], "median", draws(3))
    assert made == Estimate(value=40.0, low=30.0, high=None)
    assert interval([math.inf] * 2, "mean", draws(2)) == Estimate()
    assert Estimate(value=1.0, low=-1.0).includes_zero
    assert not Estimate().includes_zero


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, math.nan], "that can be added up"),
        ([1.0, -math.inf], "that can be added up"),
        ([1.0, 2.0, 3.0], r"values \(3,\) and draws \(10000, 2\) do not fit"),
    ],
)
def test_refuses(values, message):
    with pytest.raises(ValueError, match=message):
        interval(values, "mean", draws(2))
    with pytest.raises(ValueError, match="at least 2 values, got 1"):
        draws(1)
