"""The bundled image model with its own profile: what is in the folder, and what it shows."""

import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline

import chipsparse
from chipsparse.experiments.quality import psnr
from chipsparse.profiles.profile import ASSETS
from tests.regression.cases import CASES
from tests.regression.measures import centre, computed_share

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


@pytest.fixture
def workload(runs):
    return runs.workload("tiny-flux")


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


@pytest.mark.slow
def test_the_profile_shows_the_prompt_and_saves_work(runs, workload):
    case = CASES["flux-skips"]
    dense, sparse = runs.dense(case), runs.sparse(case)
    own = runs.generate(case, workload.profile.sparsity)
    assert case.prompt == "a yellow heart below a red triangle over gray stripes"
    for result in (dense, sparse, own):
        down, right = (centre(result.frames[0], YELLOW) - centre(result.frames[0], RED)).tolist()
        assert down > 40
        assert abs(right) < 40
    assert computed_share(sparse.report) < 0.4
    assert dict(own.report.actions()) == {"dense": 15, "skip": 35}
    assert psnr(dense.frames, own.frames) > 45


@pytest.mark.slow
def test_two_objects_stand_where_the_prompt_puts_them(runs):
    case = CASES["flux-difference"]
    assert case.prompt.startswith("a cyan star in the upper right and a red ring in the lower left")
    for result in (runs.dense(case), runs.sparse(case)):
        down, right = (centre(result.frames[0], CYAN) - centre(result.frames[0], RED)).tolist()
        assert down < -40
        assert right > 40
