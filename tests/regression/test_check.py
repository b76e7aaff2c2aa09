"""The check itself, and the golden files."""

from dataclasses import replace

import pytest
import torch

from tests.regression.cases import CASES
from tests.regression.check import Closeness, violations
from tests.regression.golden import FOLDER, paths, strip

CLIP = CASES["wan"]
BOUNDS = CLIP.bounds
GOOD = Closeness(psnr=40.0, ssim=0.99, flicker=1.0, golden=80.0, golden_dense=80.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("psnr", BOUNDS.psnr - 0.1),
        ("psnr", float("nan")),
        ("ssim", BOUNDS.ssim - 0.01),
        ("flicker", BOUNDS.flicker * 1.01),
        ("flicker", 0.99 / BOUNDS.flicker),
        ("flicker", float("nan")),
        ("golden", BOUNDS.golden - 0.1),
        ("golden_dense", BOUNDS.golden - 0.1),
    ],
)
def test_each_bound_is_looked_at(name, value):
    assert violations(CLIP, GOOD) == []
    (sentence,) = violations(CLIP, replace(GOOD, **{name: value}))
    assert f"{value:.4g}" in sentence


def test_half_precision_has_a_golden_bound_of_its_own():
    between = (BOUNDS.golden + BOUNDS.golden_half) / 2
    assert violations(CLIP, replace(GOOD, golden=between, golden_dense=between), half=True) == []
    assert violations(CLIP, replace(GOOD, golden=BOUNDS.golden_half - 0.1), half=True)


def test_the_golden_folder_holds_both_results_of_every_case_and_is_small():
    pictures = {path for case in CASES.values() for path in paths(case)}
    records = {path.with_name(f"{path.name}.json") for path in pictures}
    assert set(FOLDER.iterdir()) == pictures | records
    assert sum(path.stat().st_size for path in pictures) <= 6e5


def test_a_strip_has_frames_that_are_evenly_spaced():
    frames = torch.rand(17, 96, 64, 3, generator=torch.Generator().manual_seed(0))
    parts = strip(frames).float().div(255).split(64, dim=2)
    for part, number in zip(parts, (0, 8, 16), strict=True):
        assert (part[0] - frames[number]).abs().max() <= 0.5 / 255 + 1e-6
    assert strip(frames[:1]).shape == (1, 96, 64, 3)
