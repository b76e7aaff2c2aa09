"""The bundled model with its own profile: what is in the folder, and what it shows."""

import pytest
import torch
from diffusers import DiffusionPipeline, WanPipeline

import chipsparse
from chipsparse.experiments.quality import psnr
from chipsparse.profiles.profile import ASSETS, bundled_model
from tests.regression.cases import CASES
from tests.regression.measures import centre, computed_share

GREEN = (0, 1, 0)


@pytest.fixture
def workload(runs):
    return runs.workload("tiny-wan")


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


def test_the_bundled_profile_is_found(workload):
    assert workload.profile.source.startswith(str(bundled_model()))
    assert chipsparse.find_profile(None, "WanTransformer3DModel") != workload.profile


@pytest.mark.slow
def test_the_profile_shows_the_prompt_and_saves_work(runs, workload):
    case = CASES["wan-skips"]
    dense, sparse = runs.dense(case), runs.sparse(case)
    own = runs.generate(case, workload.profile.sparsity)
    assert case.prompt == "a green square moves down over a purple background"
    for result in (dense, sparse, own):
        first, last = (centre(result.frames[index], GREEN) for index in (0, -1))
        down, right = (last - first).tolist()
        assert down > 15
        assert abs(right) < 15
    assert computed_share(sparse.report) < 0.4
    assert dict(own.report.actions()) == {"dense": 8, "refresh": 4, "sparse": 4, "skip": 34}
    assert psnr(dense.frames, own.frames) > 40
