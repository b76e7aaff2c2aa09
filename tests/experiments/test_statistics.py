"""Bootstrap intervals against counts by hand and the exact distribution of all resamples."""

import itertools
import math

import numpy as np
import pytest

from chipsparse.experiments.statistics import Estimate, draws, interval


def test_by_hand():
    drawn = np.array([[0, 0, 0], [0, 1, 2], [1, 1, 2], [2, 2, 2]])
    # Means 3, 3, 4, 0 and medians 3, 3, 6, 0: in order 0 3 3 4 and 0 3 3 6.
    for statistic, level, high in (
        ("median", 0.5, 3.0),
        ("mean", 0.95, 4.0),
        ("median", 0.95, 6.0),
    ):
        made = interval([3.0, 6.0, 0.0], statistic, drawn, level=level)
        assert made == Estimate(value=3.0, low=0.0, high=high)
        assert made.includes_zero is True


@pytest.mark.parametrize("statistic", ["mean", "median"])
def test_many_draws_come_to_the_interval_of_all_possible_ones(statistic):
    values = [1.0, 2.0, 4.0, 8.0, 16.0]
    every = np.array(list(itertools.product(range(5), repeat=5)))
    assert interval(values, statistic, draws(5)) == interval(values, statistic, every)
    np.testing.assert_array_equal(draws(5), draws(5))


def test_identical_clips_have_an_infinite_psnr():
    made = interval([math.inf, 30.0, 40.0], "median", draws(3))
    assert made == Estimate(value=40.0, low=30.0, high=None)
    assert interval([math.inf] * 2, "mean", draws(2)) == Estimate()
    assert Estimate(value=1.0, low=-1.0).includes_zero
    assert not Estimate().includes_zero


def test_refuses():
    for values in ([1.0, math.nan], [1.0, -math.inf]):
        with pytest.raises(ValueError, match="that can be added up"):
            interval(values, "mean", draws(2))
    with pytest.raises(ValueError, match=r"values \(3,\) and draws \(10000, 2\) do not fit"):
        interval([1.0, 2.0, 3.0], "mean", draws(2))
    with pytest.raises(ValueError, match="at least 2 values, got 1"):
        draws(1)
