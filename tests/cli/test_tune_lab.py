"""What the measurements of `chipsparse tune` are made of."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from chipsparse.cli import tune_lab
from chipsparse.cli.denoise import Generation
from chipsparse.cli.tune_lab import Prompt, TuneLab
from chipsparse.config import SparsityConfig
from chipsparse.tuning.results_file import ResultsFile


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A lab whose dense clip is black, and whose frame i of the sparse one is all 51 i."""
    sparse = np.stack([np.full((16, 16, 3), 51 * i, np.uint8) for i in range(3)])
    made = Generation(sparse, [], 1.0, 2.0, None, 0, 0, {}, [], [], [])

    def no_patch(pipe, config):
        return contextlib.nullcontext()

    monkeypatch.setattr(tune_lab, "patched", no_patch)
    monkeypatch.setattr(TuneLab, "_generate", lambda *_: made)
    monkeypatch.setattr(TuneLab, "_dense_frames", lambda *_: np.zeros_like(sparse))

    class Settings:
        num_inference_steps = 6

    return TuneLab(
        lambda: None,
        Settings(),
        None,
        SparsityConfig(),
        ResultsFile(tmp_path / "p.tune.json", {}),
        None,
        lambda a, b: float((a - b).abs().mean()),
    )


def test_every_frame_counts_in_the_perceptual_distance(lab):
    pair = lab._pair(SparsityConfig(), Prompt("a red circle", 0))
    assert pair["lpips"] == pytest.approx((0 + 0.2 + 0.4) / 3)
    assert pair["psnr_db"] == pytest.approx(-10 * np.log10((0.2**2 + 0.4**2) / 3))
