"""The quality metrics against independent naive formulas and values known by hand."""

import math

import numpy as np
import pytest
import torch

from chipsparse.experiments import quality
from chipsparse.experiments.quality import compare_clips


def random_pair(shape, seed=0, noise=0.1):
    generator = np.random.default_rng(seed)
    a = generator.random(shape)
    return a, np.clip(a + noise * generator.standard_normal(shape), 0, 1)


def naive_psnr(a, b):
    total = 0.0
    for x, y in zip(a.reshape(-1), b.reshape(-1), strict=True):
        total += (float(x) - float(y)) ** 2
    return 10 * math.log10(1.0 / (total / a.size))


def naive_ssim(a, b):
    """The definition, window by window."""
    window = np.array(
        [[math.exp(-(i * i + j * j) / (2 * 1.5**2)) for j in range(-5, 6)] for i in range(-5, 6)]
    )
    window /= window.sum()
    values = []
    frames, height, width, channels = a.shape
    for f in range(frames):
        for c in range(channels):
            for top in range(height - 10):
                for left in range(width - 10):
                    x = a[f, top : top + 11, left : left + 11, c]
                    y = b[f, top : top + 11, left : left + 11, c]
                    mx, my = (window * x).sum(), (window * y).sum()
                    vx = (window * (x - mx) ** 2).sum()
                    vy = (window * (y - my) ** 2).sum()
                    vxy = (window * (x - mx) * (y - my)).sum()
                    values.append(
                        (2 * mx * my + 1e-4)
                        * (2 * vxy + 9e-4)
                        / ((mx * mx + my * my + 1e-4) * (vx + vy + 9e-4))
                    )
    return float(np.mean(values))


@pytest.mark.parametrize("shape", [(1, 11, 11, 1), (3, 13, 17, 3), (2, 16, 12, 2)])
def test_matches_the_naive_formulas(shape):
    a, b = random_pair(shape)
    assert quality.psnr(a, b) == pytest.approx(naive_psnr(a, b), rel=1e-12)
    assert quality.ssim(a, b) == pytest.approx(naive_ssim(a, b), rel=1e-9)


def test_torch_and_numpy_agree_in_any_float_type():
    a, b = random_pair((2, 16, 16, 3))
    expected = quality.psnr(a, b), quality.ssim(a, b)
    assert quality.psnr(torch.tensor(a), torch.tensor(b)) == expected[0]
    assert quality.ssim(torch.tensor(a), b) == expected[1]
    single = torch.tensor(a, dtype=torch.float32), torch.tensor(b, dtype=torch.float32)
    assert quality.psnr(*single) == pytest.approx(expected[0], rel=1e-5)
    assert quality.ssim(*single) == pytest.approx(expected[1], rel=1e-5)


def test_known_values():
    black, white = torch.zeros(2, 12, 12, 3), torch.ones(2, 12, 12, 3)
    assert quality.psnr(black, white) == 0.0
    assert quality.psnr(black, black + 0.1) == pytest.approx(20.0, abs=1e-5)
    assert quality.psnr(white, white) == math.inf
    assert quality.ssim(white, white) == pytest.approx(1.0, abs=1e-12)
    assert quality.ssim(black, white) == pytest.approx(1e-4 / (1 + 1e-4), rel=1e-9)


def test_the_clip_value_comes_from_the_mean_error_not_from_the_mean_of_decibels():
    a = torch.zeros(2, 11, 11, 1, dtype=torch.float64)
    b = a.clone()
    b[1] += 0.1
    assert quality.psnr_per_frame(a, b) == [math.inf, pytest.approx(20.0)]
    assert quality.psnr(a, b) == pytest.approx(20.0 + 10 * math.log10(2))


def test_ssim_is_the_mean_of_its_frames_and_symmetric():
    a, b = random_pair((3, 15, 15, 3))
    frames = quality.ssim_per_frame(a, b)
    assert quality.ssim(a, b) == pytest.approx(sum(frames) / 3)
    assert quality.ssim(a, b) == pytest.approx(quality.ssim(b, a))
    assert quality.ssim_per_frame(a[1:2], b[1:2]) == [frames[1]]


def test_flicker():
    ramp = torch.linspace(0, 1, 5).view(5, 1, 1, 1).expand(5, 4, 4, 3)
    assert quality.flicker(ramp) == pytest.approx(0.0, abs=1e-7)
    blink = torch.tensor([0.0, 1.0, 0.0, 1.0]).view(4, 1, 1, 1).expand(4, 4, 4, 3)
    assert quality.flicker(blink) == 2.0
    with pytest.raises(ValueError, match="at least 3 frames, got 2"):
        quality.flicker(ramp[:2])


@pytest.mark.parametrize("metric", [quality.psnr, quality.ssim])
def test_refuses_what_is_not_a_pair_of_videos(metric):
    video = torch.zeros(2, 12, 12, 3)
    with pytest.raises(ValueError, match="differ in shape"):
        metric(video, video[:1])
    with pytest.raises(ValueError, match="frames, height, width, channels"):
        metric(video[0], video[0])
    with pytest.raises(ValueError, match="divide 8-bit values by 255"):
        metric(video.to(torch.uint8), video)
    with pytest.raises(ValueError, match="got the shape"):
        metric(video[:0], video[:0])


def test_ssim_refuses_small_frames():
    video = torch.zeros(1, 10, 32, 3)
    with pytest.raises(ValueError, match="at least 11x11 pixels, got 10x32"):
        quality.ssim(video, video)
    assert quality.psnr(video, video) == math.inf


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
    assert found.psnrs == pytest.approx(quality.psnr_per_frame(*floats), rel=1e-12)
    assert found.ssim == pytest.approx(quality.ssim(*floats), rel=1e-12)
    per_frame = quality.ssim_per_frame(*floats)
    assert found.per_frame["ssim"] == pytest.approx(per_frame, rel=1e-12)
    before, after = map(quality.flicker, floats)
    assert found.flicker == pytest.approx(after, rel=1e-12)
    assert found.flicker_change == pytest.approx(after - before, rel=1e-9)
    assert found.largest_difference == np.abs(a.astype(int) - b).max()
    assert (found.lpips, "lpips" in found.per_frame, found.identical) == (None, False, False)


def test_flicker_of_a_frame_is_that_of_it_and_its_neighbours():
    a = np.zeros((4, 12, 12, 3), np.uint8)
    b = a.copy()
    b[1] = 51  # second differences: -2 * 0.2 around frame 1, 0.2 around frame 2
    found = compare_clips(a, b)
    assert found.per_frame["flicker_dense"] == [None, 0.0, 0.0, None]
    assert found.per_frame["flicker"] == [None, pytest.approx(0.4), pytest.approx(0.2), None]
    assert found.flicker == pytest.approx(0.3)


def test_what_small_and_short_clips_have_not():
    a, b = clips(frames=2, height=10, width=40)
    found = compare_clips(a, b)
    assert (found.ssim, found.flicker, found.flicker_change) == (None, None, None)
    assert (list(found.per_frame), len(found.psnrs)) == (["psnr_db"], 2)


def test_the_same_pixels():
    a, _ = clips()
    found = compare_clips(a, a.copy())
    assert found.identical
    assert (found.psnr_db, found.psnrs, found.largest_difference) == (None, [math.inf] * 5, 0)
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
    assert found.per_frame["lpips"] == pytest.approx(expected)
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
