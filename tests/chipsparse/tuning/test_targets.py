"""What is asked for, and whether pairs reach it."""

import pytest

from chipsparse.profiles.tuned_range import TunedTarget
from chipsparse.tuning.targets import (
    SAME_DB,
    Pair,
    fast_enough,
    limit_seconds,
    measurement,
    meets_quality,
    quality,
    wants_quality,
)


def pair(psnr_db=30.0, ssim=0.9, lpips=0.1, seconds=1.0, dense_seconds=3.0):
    return Pair(psnr_db, ssim, lpips, seconds, dense_seconds)


def test_the_bound_that_is_missed_most_decides():
    target = TunedTarget(min_psnr_db=28.0, min_ssim=0.95, max_lpips=0.2)
    assert quality(target, pair()) == pytest.approx(-3.01, abs=0.01)  # SSIM: twice as far from 1
    assert quality(target, pair(ssim=0.95)) == pytest.approx(0)
    assert quality(target, pair(ssim=0.99, lpips=0.01)) == pytest.approx(2.0)
    assert not meets_quality(target, [pair(ssim=0.99), pair()])
    assert meets_quality(target, [pair(ssim=0.99), pair(ssim=0.96)])


def test_without_a_bound_of_quality_the_psnr_counts():
    target = TunedTarget(min_speedup=2.0)
    assert not wants_quality(target)
    assert quality(target, pair()) == 30
    assert meets_quality(target, [pair(psnr_db=1.0)])
    assert wants_quality(TunedTarget(min_speedup=2.0, min_ssim=0.5))


def test_limits_of_time_are_about_the_median():
    pairs = [pair(seconds=1.0), pair(seconds=1.2), pair(seconds=9.0)]
    assert fast_enough(TunedTarget(), pairs)
    assert fast_enough(TunedTarget(min_speedup=2.5), pairs)
    assert not fast_enough(TunedTarget(min_speedup=2.6), pairs)
    assert fast_enough(TunedTarget(max_seconds=1.2), pairs)
    assert not fast_enough(TunedTarget(max_seconds=1.1), pairs)
    assert limit_seconds(TunedTarget(min_speedup=2.0, max_seconds=5.0), 8.0) == 4.0
    assert limit_seconds(TunedTarget(min_speedup=2.0, max_seconds=3.0), 8.0) == 3.0
    assert limit_seconds(TunedTarget(min_psnr_db=2.0), 8.0) == float("inf")


def test_what_a_profile_says():
    found = measurement([pair(), pair(psnr_db=SAME_DB, ssim=None, lpips=None, seconds=2.0)])
    assert (found.prompts, found.psnr_db_worst, found.psnr_db_median) == (2, 30.0, 65.0)
    assert (found.ssim_worst, found.lpips_worst, found.seconds) == (0.9, 0.1, 1.5)
    same = measurement([pair(psnr_db=SAME_DB, ssim=1.0, lpips=None)])
    assert (same.psnr_db_worst, same.psnr_db_median, same.lpips_worst) == (None, None, None)
