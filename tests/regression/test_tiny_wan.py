"""The bundled model with its own profile: what is in the folder, what it shows, how close to dense.

These are floors with a wide margin, for any CPU; measured figures are in `benchmarks/results`.
"""

import pytest
import torch
from diffusers import DiffusionPipeline, WanPipeline

import chipsparse
from benchmarks.clips import Workload
from chipsparse.profiles import ASSETS, bundled_model
from chipsparse.quality import psnr, ssim
from tests.regression.measures import centre, processor_seconds

PROMPTS = {  # what moves: its colour (RGB, 0 or 1 each) and the sign of its motion in x and y
    "a red circle moves left over a blue gradient": ((1, 0, 0), -1, 0),
    "a green square moves down over a purple background": ((0, 1, 0), 0, 1),
    "a yellow star moves right over a gray checkerboard": ((1, 1, 0), 1, 0),
}


@pytest.fixture(scope="module")
def workload():
    return Workload(bundled_model(), list(PROMPTS), torch.device("cpu"), torch.float32)


def test_the_folder_is_complete_small_and_stock():
    pipe = DiffusionPipeline.from_pretrained(str(bundled_model()))
    assert type(pipe) is WanPipeline
    assert pipe.transformer.dtype == pipe.vae.dtype == pipe.text_encoder.dtype == torch.float32
    total = sum(path.stat().st_size for path in bundled_model().rglob("*") if path.is_file())
    assert total <= 40e6
    text = (bundled_model() / "README.md").read_text(encoding="utf-8")
    assert "not" in text
    assert (ASSETS / "prompts" / "shapes.txt").read_text(encoding="utf-8").count("\n") >= 16


def test_a_clip_has_at_least_2000_tokens(workload):
    settings = workload.settings()
    config, vae = workload.pipe.transformer.config, workload.pipe.vae.config
    frames = (settings["num_frames"] - 1) // vae.scale_factor_temporal + 1
    rows, columns = (
        settings[side] // vae.scale_factor_spatial // patch
        for side, patch in zip(("height", "width"), config.patch_size[1:], strict=True)
    )
    assert settings["num_frames"] >= 33
    assert settings["height"] == settings["width"] == 128
    assert frames * rows * columns >= 2000


def test_a_short_run_stays_close_to_dense(workload):
    """Quick: few steps, few frames; finds a broken delta rule, not a small loss of quality."""
    changes = {"num_frames": 9, "num_inference_steps": 12}
    config = workload.profile.sparsity.override(
        {
            "schedule.warmup_steps": 4,
            "schedule.refresh_steps": [6],
            "schedule.skip_steps": [],
            "schedule.final_dense_steps": 0,
        }
    )
    dense = workload.generate(None, **changes)
    sparse = workload.generate(config, **changes)
    assert sparse.report.actions() == {"dense": 3, "refresh": 2, "sparse": 7}
    for a, b in zip(dense.frames, sparse.frames, strict=True):
        assert 20 < psnr(a, b) < 80


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_profile_shows_the_prompt_and_stays_close_to_dense(workload, prompt):
    config, prompts = workload.profile.sparsity, [prompt]
    dense, dense_seconds = processor_seconds(lambda: workload.generate(None, prompts=prompts))
    sparse, sparse_seconds = processor_seconds(lambda: workload.generate(config, prompts=prompts))
    colour, right, down = PROMPTS[prompt]
    for clips in (dense, sparse):
        first, last = (centre(clips.frames[0, index], colour) for index in (0, -1))
        for moved, sign in zip((last - first).tolist(), (down, right), strict=True):
            assert sign * moved > 15 if sign else abs(moved) < 15
    assert psnr(dense.frames[0], sparse.frames[0]) > 23
    assert ssim(dense.frames[0], sparse.frames[0]) > 0.85
    assert dense_seconds / sparse_seconds > 1.2
    assert {"dense", "refresh", "sparse"} <= set(sparse.report.actions())


def test_the_bundled_profile_is_found(workload):
    assert workload.profile.source.startswith(str(bundled_model()))
    assert chipsparse.find_profile(None, "WanTransformer3DModel") != workload.profile
