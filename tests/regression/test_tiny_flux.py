"""The bundled image model with its own profile: what is in the folder, what it shows, how close.

Floors with a wide margin, for any CPU, as in `test_tiny_wan.py`.
"""

import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline

import chipsparse
from benchmarks.clips import Workload
from chipsparse.profiles import ASSETS
from chipsparse.quality import psnr, ssim
from tests.regression.measures import centre, processor_seconds

FOLDER = ASSETS / "tiny-flux"
PARTS = (
    "scheduler",
    "text_encoder",
    "text_encoder_2",
    "tokenizer",
    "tokenizer_2",
    "transformer",
    "vae",
)
RED, YELLOW, CYAN = (1, 0, 0), (1, 1, 0), (0, 1, 1)
PROMPTS = {  # two colours (RGB, 0 or 1 each), and the first object's direction from the second
    "a red circle to the left of a yellow square over a blue gradient": (RED, YELLOW, -1, 0),
    "a yellow heart below a red triangle over gray stripes": (YELLOW, RED, 0, 1),
    "a cyan star in the upper right and a red ring in the lower left over purple dots": (
        CYAN,
        RED,
        1,
        -1,
    ),
}


@pytest.fixture(scope="module")
def workload():
    return Workload(FOLDER, list(PROMPTS)[:1], torch.device("cpu"), torch.float32)


def test_the_folder_is_complete_small_and_stock():
    pipe = DiffusionPipeline.from_pretrained(str(FOLDER))
    assert type(pipe) is FluxPipeline
    assert all(getattr(pipe, part) is not None for part in PARTS)
    models = (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2)
    assert {model.dtype for model in models} == {torch.float32}
    assert not pipe.transformer.config.guidance_embeds  # guidance is classifier-free
    names = {path.name for path in FOLDER.iterdir()}
    assert names == {*PARTS, "model_index.json", "README.md", "chipsparse.yaml"}
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= 40e6
    assert "not" in (FOLDER / "README.md").read_text(encoding="utf-8")
    prompts = (ASSETS / "prompts" / "images.txt").read_text(encoding="utf-8").splitlines()
    assert len(prompts) >= 16
    for tokenizer in (pipe.tokenizer, pipe.tokenizer_2):
        ids = tokenizer(prompts).input_ids
        assert all(tokenizer.unk_token_id not in words for words in ids)
        assert max(map(len, ids)) <= 64


def test_the_profile_is_found_and_an_image_has_at_least_1000_tokens(workload):
    assert workload.profile.source.startswith(str(FOLDER))
    assert chipsparse.find_profile(None, "FluxTransformer2DModel") != workload.profile
    settings = workload.settings()
    assert settings["true_cfg_scale"] > 1
    patch = 2 * workload.pipe.vae_scale_factor  # the pipeline packs 2x2 latent pixels
    assert settings["height"] == settings["width"] == 256
    assert (settings["height"] // patch) * (settings["width"] // patch) >= 1000


def test_a_short_run_stays_close_to_dense(workload):
    """Quick: few steps; finds a broken delta rule, not a small loss of quality."""
    changes = {"num_inference_steps": 8}
    config = workload.profile.sparsity.override(
        {
            "schedule.warmup_steps": 3,
            "schedule.refresh_steps": [5],
            "schedule.skip_steps": [],
            "schedule.final_dense_steps": 0,
        }
    )
    dense = workload.generate(None, **changes)
    sparse = workload.generate(config, **changes)
    assert sparse.report.actions() == {"dense": 2, "refresh": 2, "sparse": 4}
    assert sparse.report.fallbacks == []
    assert 20 < psnr(dense.frames[0], sparse.frames[0]) < 80


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_profile_shows_the_prompt_and_stays_close_to_dense(workload, prompt):
    config, prompts = workload.profile.sparsity, [prompt]
    dense, dense_seconds = processor_seconds(lambda: workload.generate(None, prompts=prompts))
    sparse, sparse_seconds = processor_seconds(lambda: workload.generate(config, prompts=prompts))
    first, second, right, down = PROMPTS[prompt]
    for image in (dense.frames[0, 0], sparse.frames[0, 0]):
        apart = (centre(image, first) - centre(image, second)).tolist()
        for distance, sign in zip(apart, (down, right), strict=True):
            assert sign * distance > 40 if sign else abs(distance) < 40
    assert psnr(dense.frames[0], sparse.frames[0]) > 23
    assert ssim(dense.frames[0], sparse.frames[0]) > 0.9
    assert dense_seconds / sparse_seconds > 1.2
    assert {"dense", "refresh", "sparse"} <= set(sparse.report.actions())
