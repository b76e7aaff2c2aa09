"""The bundled models with their own profiles: what is in their folders, and what they show."""

import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline, WanPipeline

from chipsparse.experiments.quality import psnr
from chipsparse.profiles.profile import ASSETS, bundled_model
from tests.regression.cases import CASES

TINY_FLUX = ASSETS / "tiny-flux"
RED = (1, 0, 0)
GREEN = (0, 1, 0)
YELLOW = (1, 1, 0)


def centre(frame, colour):
    """Mean row and column of the pixels ``[H, W, 3]`` with that saturated colour (0 or 1 each)."""
    bright = torch.tensor(colour, dtype=torch.bool)
    mask = (frame[..., bright] > 0.6).all(-1) & (frame[..., ~bright] < 0.45).all(-1)
    assert mask.float().mean() > 0.004, "nothing of the asked colour"
    return mask.nonzero().float().mean(0)


@pytest.mark.parametrize(
    ("folder", "pipeline_class"),
    [(TINY_FLUX, FluxPipeline), (bundled_model(), WanPipeline)],
)
def test_the_folder_is_complete_small_and_stock(folder, pipeline_class):
    pipe = DiffusionPipeline.from_pretrained(str(folder))
    assert type(pipe) is pipeline_class
    models = [each for each in pipe.components.values() if isinstance(each, torch.nn.Module)]
    assert {model.dtype for model in models} == {torch.float32}
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 40e6
    names = {path.name for path in folder.iterdir()}
    assert {"model_index.json", "README.md", "chipsparse.yaml"} <= names


def test_tiny_flux_knows_the_words_of_its_prompts_and_is_not_distilled():
    pipe = DiffusionPipeline.from_pretrained(str(TINY_FLUX))
    assert not pipe.transformer.config.guidance_embeds  # guidance is classifier-free
    prompts = (ASSETS / "prompts" / "images.txt").read_text(encoding="utf-8").splitlines()
    assert len(prompts) >= 16
    for tokenizer in (pipe.tokenizer, pipe.tokenizer_2):
        ids = tokenizer(prompts).input_ids
        assert all(tokenizer.unk_token_id not in words for words in ids)
        assert max(map(len, ids)) <= 64


OF_FLUX = {"dense": 15, "skip": 35}
OF_WAN = {"dense": 3, "refresh": 6, "sparse": 13, "skip": 28}
# Case, the frame and colour of two places, how far the second is below the first one at least, what
# the profile's own schedule does, and how close that comes to dense in dB.
SHOWN = [
    ("flux-skips", (0, RED), (0, YELLOW), 40, OF_FLUX, 45),  # a yellow heart below a red triangle
    ("wan-skips", (0, GREEN), (-1, GREEN), 15, OF_WAN, 36),  # a green square moves down
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "first", "second", "distance", "actions", "least_db"), SHOWN)
def test_the_prompt_is_shown_and_work_saved(name, first, second, distance, actions, least_db, runs):
    case = CASES[name]
    dense = runs.dense(case)
    sparse = runs.sparse(case)
    own = runs.generate(case, runs.model(case.model)[1].sparsity)
    for result in (dense, sparse, own):
        start, end = (centre(result.frames[frame], colour) for frame, colour in (first, second))
        down, right = (end - start).tolist()
        assert down > distance
        assert abs(right) < distance
    layers = [record.layers for record in sparse.report.steps]
    computed = sum(entry.kept for entries in layers for entry in entries)
    assert computed < 0.4 * max(map(len, layers)) * len(layers)  # of all columns and neurons
    assert dict(own.report.actions()) == actions
    assert psnr(dense.frames, own.frames) > least_db
