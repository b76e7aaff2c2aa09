"""Two clips of 8-bit pixels: every number against the metrics of whole float videos."""

import math

import numpy as np
import pytest

from chipsparse.measure import quality
from chipsparse.measure.clip_comparison import compare_clips


def clips(frames=5, height=16, width=20, seed=0):
    generator = np.random.default_rng(seed)
    a = generator.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    noise = generator.integers(-20, 21, a.shape)
    return a, np.clip(a + noise, 0, 255).astype(np.uint8)


def test_is_what_the_metrics_say_of_the_whole_videos():
    a, b = clips()
    found = compare_clips(a, b)
    floats = a / 255, b / 255
    assert found.psnr_db == pytest.approx(quality.psnr(*floats), rel=1e-12)
    assert found.psnr_per_frame == pytest.approx(quality.psnr_per_frame(*floats), rel=1e-12)
    assert found.ssim == pytest.approx(quality.ssim(*floats), rel=1e-12)
    assert found.ssim_per_frame == pytest.approx(quality.ssim_per_frame(*floats), rel=1e-12)
    assert found.flicker_a == pytest.approx(quality.flicker(floats[0]), rel=1e-12)
    assert found.flicker_b == pytest.approx(quality.flicker(floats[1]), rel=1e-12)
    assert found.flicker_change == found.flicker_b - found.flicker_a
    assert found.largest_difference == np.abs(a.astype(int) - b).max()
    assert (found.lpips, found.lpips_per_frame, found.identical) == (None, None, False)


def test_flicker_of_a_frame_is_that_of_it_and_its_neighbours():
    a = np.zeros((4, 12, 12, 3), np.uint8)
    b = a.copy()
    b[1] = 51  # second differences: -2 * 0.2 around frame 1, 0.2 around frame 2
    found = compare_clips(a, b)
    assert found.flicker_a_per_frame == [0.0, 0.0]
    assert found.flicker_b_per_frame == pytest.approx([0.4, 0.2])
    assert found.flicker_b == pytest.approx(0.3)


def test_what_small_and_short_clips_have_not():
    a, b = clips(frames=2, height=10, width=40)
    found = compare_clips(a, b)
    assert (found.ssim, found.ssim_per_frame) == (None, None)
    assert (found.flicker_a, found.flicker_b, found.flicker_change) == (None, None, None)
    assert (found.flicker_a_per_frame, len(found.psnr_per_frame)) == ([], 2)


def test_the_same_pixels():
    a, _ = clips()
    found = compare_clips(a, a.copy())
    assert found.identical
    assert (found.psnr_db, found.largest_difference) == (math.inf, 0)
    assert found.ssim == pytest.approx(1.0)


def test_a_difference_is_not_wrapped_around():
    black, white = np.zeros((1, 11, 11, 3), np.uint8), np.full((1, 11, 11, 3), 255, np.uint8)
    assert compare_clips(black, white).largest_difference == 255
    assert compare_clips(white, black).largest_difference == 255
    assert compare_clips(black, white).psnr_db == 0.0


def test_the_perceptual_distance_sees_each_pair_of_frames_as_floats():
    a, b = clips(frames=3)
    seen = []

    def distance(x, y):
        seen.append((tuple(x.shape), float(x.max()) <= 1))
        return float((x - y).abs().sum())

    found = compare_clips(a, b, perceptual=distance)
    expected = [np.abs(x / 255 - y / 255).sum() for x, y in zip(a, b, strict=True)]
    assert found.lpips_per_frame == pytest.approx(expected)
    assert found.lpips == pytest.approx(np.mean(expected))
    assert seen == [((1, 16, 20, 3), True)] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a[:-1], r"got \(5, 16, 20, 3\) and \(4, 16, 20, 3\)"),
        (lambda a: a / 255, "got uint8 and float64"),
    ],
)
def test_refuses(change, message):
    a, _ = clips()
    with pytest.raises(ValueError, match=message):
        compare_clips(a, change(a))
    with pytest.raises(ValueError, match="one shape"):
        compare_clips(a[:0], a[:0])
