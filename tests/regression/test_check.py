"""The check itself, and the golden files."""

from dataclasses import replace

import pytest
import torch
from PIL import Image

from tests.regression.cases import CASES
from tests.regression.check import Closeness, violations
from tests.regression.golden import FOLDER, paths, read, shown

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
    expected = {path for case in CASES.values() for path in paths(case)}
    assert set(FOLDER.iterdir()) == expected
    assert sum(path.stat().st_size for path in expected) <= 5e5


def test_golden_files_are_lossless(tmp_path, monkeypatch):
    frames = torch.rand(17, 96, 96, 3, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("tests.regression.golden.FOLDER", tmp_path)
    strip = torch.cat(list(shown(frames)), dim=1)
    for path in paths(CLIP):
        Image.fromarray((strip * 255).round().byte().numpy()).save(path, lossless=True)
    assert torch.equal(read(CLIP).sparse, shown(frames))
    assert torch.equal(shown(frames)[1], shown(frames[8:9])[0])  # evenly spaced: 0, 8, 16
