"""Targets, and the pairs that reach them."""

import math

import pytest

from chipsparse.profiles.tuned_range import TunedTarget
from chipsparse.tuning import targets


def pair(psnr_db=30.0, ssim=0.9, lpips=0.1, seconds=1.0, dense_seconds=3.0):
    return targets.Pair(psnr_db, ssim, lpips, seconds, dense_seconds)


def test_the_bound_that_is_missed_most_decides():
    target = TunedTarget(min_psnr_db=28.0, min_ssim=0.95, max_lpips=0.2)
    # SSIM: twice as far from 1.
    assert targets.quality(target, pair()) == pytest.approx(-3.01, abs=0.01)
    assert targets.quality(target, pair(ssim=0.95)) == pytest.approx(0)
    assert targets.quality(target, pair(ssim=0.99, lpips=0.01)) == pytest.approx(2.0)
    assert not targets.meets_quality(target, [pair(ssim=0.99), pair()])
    assert targets.meets_quality(target, [pair(ssim=0.99), pair(ssim=0.96)])
    assert targets.wants_quality(target)
    without = TunedTarget(min_speedup=2.0)  # where the PSNR counts
    assert not targets.wants_quality(without)
    assert targets.quality(without, pair()) == 30
    assert targets.meets_quality(without, [pair(psnr_db=1.0)])


@pytest.mark.parametrize(
    ("target", "enough", "limit"),
    [
        ({}, True, math.inf),
        ({"min_psnr_db": 2.0}, True, math.inf),
        ({"min_speedup": 2.5}, True, 1.2),
        ({"min_speedup": 2.6}, False, 3 / 2.6),
        ({"max_seconds": 1.2}, True, 1.2),
        ({"max_seconds": 1.1}, False, 1.1),
        ({"min_speedup": 2.0, "max_seconds": 5.0}, True, 1.5),
    ],
)
def test_limits_of_time_hold_for_the_median(target, enough, limit):
    pairs = [pair(seconds=1.0), pair(seconds=1.2), pair(seconds=9.0)]
    assert targets.fast_enough(TunedTarget(**target), pairs) is enough
    assert targets.limit_seconds(TunedTarget(**target), 3.0) == pytest.approx(limit)


def test_the_numbers_of_a_profile():
    equal = pair(psnr_db=targets.SAME_DB, ssim=None, lpips=None, seconds=2.0)
    result = targets.measurement([pair(), equal])
    assert list(vars(result).values()) == [2, 30.0, 65.0, 0.9, 0.1, 1.5, 3.0]
    assert result.speedup == 2.0
    same = targets.measurement([pair(psnr_db=targets.SAME_DB, ssim=1.0, lpips=None)])
    assert (same.psnr_db_worst, same.psnr_db_median, same.lpips_worst) == (None, None, None)
