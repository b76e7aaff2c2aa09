"""The quality metrics against independent naive formulas and values known by hand."""

import math

import numpy as np
import pytest
import torch

from chipsparse.experiments import quality
from chipsparse.experiments.quality import compare_clips


def naive_ssim(a, b):
    """The definition, window by window."""
    line = np.exp(-(np.arange(-5, 6) ** 2) / (2 * 1.5**2))
    window = np.outer(line, line) / np.outer(line, line).sum()
    values = []
    frames, height, width, channels = a.shape
    for f, c, top, left in np.ndindex(frames, channels, height - 10, width - 10):
        x, y = (clip[f, top : top + 11, left : left + 11, c] for clip in (a, b))
        mx = (window * x).sum()
        my = (window * y).sum()
        vx = (window * (x - mx) ** 2).sum()
        vy = (window * (y - my) ** 2).sum()
        vxy = (window * (x - mx) * (y - my)).sum()
        likeness = (2 * mx * my + 1e-4) * (2 * vxy + 9e-4)
        values.append(likeness / ((mx * mx + my * my + 1e-4) * (vx + vy + 9e-4)))
    return float(np.mean(values))


def test_matches_the_naive_formulas_in_any_float_type():
    generator = np.random.default_rng(0)
    a = generator.random((3, 13, 17, 3))
    b = np.clip(a + 0.1 * generator.standard_normal(a.shape), 0, 1)
    psnr = 10 * math.log10(1 / np.mean((a - b) ** 2))
    similarity = naive_ssim(a, b)
    assert quality.psnr(a, b) == pytest.approx(psnr, rel=1e-12)
    assert quality.psnr(torch.tensor(a).float(), b.astype("f4")) == pytest.approx(psnr, rel=1e-5)
    assert quality.ssim(a, b) == pytest.approx(similarity, rel=1e-9)
    assert quality.ssim(torch.tensor(b), a) == pytest.approx(similarity, rel=1e-9)


def test_known_values():
    black = torch.zeros(2, 12, 12, 3)
    white = torch.ones(2, 12, 12, 3)
    assert quality.psnr(black, white) == 0.0
    assert quality.psnr(black, black + 0.1) == pytest.approx(20.0, abs=1e-5)
    assert quality.psnr(white, white) == math.inf
    assert quality.ssim(white, white) == pytest.approx(1.0, abs=1e-12)
    assert quality.ssim(black, white) == pytest.approx(1e-4 / (1 + 1e-4), rel=1e-9)
    half = black.double()  # the mean error, not the mean of decibels
    half[1] += 0.1
    assert quality.psnr(black, half) == pytest.approx(20.0 + 10 * math.log10(2))
    ramp = torch.linspace(0, 1, 5).view(5, 1, 1, 1).expand(5, 4, 4, 3)
    assert quality.flicker(ramp) == pytest.approx(0.0, abs=1e-7)
    blink = torch.tensor([0.0, 1.0, 0.0, 1.0]).view(4, 1, 1, 1).expand(4, 4, 4, 3)
    assert quality.flicker(blink) == 2.0


VIDEO = torch.zeros(2, 12, 12, 3)


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        (lambda: quality.psnr(VIDEO, VIDEO[:1]), "differ in shape"),
        (lambda: quality.psnr(VIDEO.to(torch.uint8), VIDEO), "divide 8-bit values by 255"),
        (lambda: quality.ssim(VIDEO[:, :10], VIDEO[:, :10]), "at least 11x11 pixels, got 10x12"),
        (lambda: quality.flicker(VIDEO), "at least 3 frames, got 2"),
        (lambda: compare_clips(VIDEO.byte().numpy(), VIDEO.numpy()), "got uint8 and float32"),
    ],
)
def test_refuses(measure, message):
    with pytest.raises(ValueError, match=message):
        measure()


def clips(frames=5, height=16, width=20):
    generator = np.random.default_rng(0)
    a = generator.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    noise = generator.integers(-20, 21, a.shape)
    return a, np.clip(a + noise, 0, 255).astype(np.uint8)


def test_a_comparison_is_what_the_metrics_say_of_the_whole_and_of_each_frame():
    a, b = clips()
    made = compare_clips(a, b, perceptual=lambda x, y: float((x - y).abs().sum()))
    floats = a / 255, b / 255
    frames = [[clip[n : n + 1] for clip in floats] for n in range(5)]
    assert made.psnr_db == pytest.approx(quality.psnr(*floats), rel=1e-12)
    assert made.psnrs == pytest.approx([quality.psnr(*pair) for pair in frames], rel=1e-12)
    assert made.ssim == pytest.approx(quality.ssim(*floats), rel=1e-12)
    assert made.per_frame["ssim"] == pytest.approx([quality.ssim(*pair) for pair in frames])
    before, after = map(quality.flicker, floats)
    assert made.flicker == pytest.approx(after, rel=1e-12)
    assert made.flicker_change == pytest.approx(after - before, rel=1e-9)
    distances = [np.abs(x - y).sum() for x, y in frames]
    assert made.per_frame["lpips"] == pytest.approx(distances)
    assert made.lpips == pytest.approx(np.mean(distances))
    assert (made.largest_difference, made.identical) == (np.abs(a.astype(int) - b).max(), False)


def test_small_short_equal_and_opposite_clips():
    made = compare_clips(*clips(frames=2, height=10, width=40))
    assert (made.ssim, made.lpips, made.flicker, made.flicker_change) == (None,) * 4
    assert (list(made.per_frame), len(made.psnrs)) == (["psnr_db", "largest_difference"], 2)
    a, _ = clips()
    same = compare_clips(a, a.copy())
    assert (same.psnr_db, same.psnrs, same.largest_difference) == (None, [math.inf] * 5, 0)
    assert same.identical
    black = np.zeros((1, 11, 11, 3), np.uint8)
    white = np.full((1, 11, 11, 3), 255, np.uint8)
    for pair in ((black, white), (white, black)):  # differences are not wrapped around
        assert (compare_clips(*pair).largest_difference, compare_clips(*pair).psnr_db) == (255, 0.0)
