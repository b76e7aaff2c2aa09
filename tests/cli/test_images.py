"""`chipsparse generate` with a model of images."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel
from PIL import Image

import chipsparse
from chipsparse.profiles.profile import ASSETS
from tests.cli.conftest import names
from tests.tiny_models import PROMPT, tiny_flux_pipeline
from tests.variants import slow


def test_an_image_is_written_and_described(generate, flux_folder, workdir):
    content = generate("-o", "out.png", "--json", model=flux_folder).json()
    assert content["pipeline_class"] == "FluxPipeline"
    assert content["settings"]["num_frames"] is None
    assert content["settings"]["true_cfg_scale"] == 3.0
    sparse = content["sparse"]
    assert [step["action"] for step in sparse["steps"]] == ["dense", "refresh", "sparse", "sparse"]
    assert sparse["steps"][-1]["mlp_kept"] == pytest.approx(38 / 128)
    assert (sparse["frames"], sparse["height"], sparse["width"]) == (1, 32, 48)
    assert names(workdir) == ["out.png"]


@pytest.mark.parametrize("mode", [slow([]), ["--dense"]])
def test_it_is_what_the_pipeline_makes_with_an_empty_negative_prompt(generate, flux_folder, mode):
    generate("-o", "out.png", "--seed", "3", *mode, model=flux_folder).fine()
    pipe = tiny_flux_pipeline()
    settings = {
        "height": 32,
        "width": 48,
        "num_inference_steps": 4,
        "negative_prompt": "",
        "true_cfg_scale": 3.0,
        "max_sequence_length": 16,
        "generator": torch.Generator().manual_seed(3),
        "output_type": "np",
    }
    if mode:
        (expected,) = pipe(PROMPT, **settings).images
    else:
        with chipsparse.enable(pipe, flux_folder / "chipsparse.yaml"):
            (expected,) = pipe(PROMPT, **settings).images
    written = np.asarray(Image.open("out.png"))
    np.testing.assert_array_equal(written, np.rint(expected * 255).astype(np.uint8))


def test_the_bundled_profile_serves_a_folder_without_one(generate, flux_folder, workdir):
    profile = Path(chipsparse.__file__).parent / "assets/profiles/FluxTransformer2DModel.yaml"
    generate(
        *("-o", "out.png", "--config", str(profile), "--steps", "6"),
        *("--height", "16", "--width", "16"),
        model=flux_folder,
    ).fine()


def test_the_bundled_image_model_runs_with_its_own_profile_and_guidance(
    generate, workdir, monkeypatch
):
    calls = []
    forward = FluxTransformer2DModel.forward

    def counted(*args, **kwargs):
        calls.append(kwargs["hidden_states"].shape[1])
        return forward(*args, **kwargs)

    monkeypatch.setattr(FluxTransformer2DModel, "forward", counted)
    folder = ASSETS / "tiny-flux"
    content = generate("-o", "out.png", "--json", "--steps", "2", model=folder).json()
    assert content["profile"] == str(folder / "chipsparse.yaml")
    assert content["settings"]["true_cfg_scale"] == 4.0
    assert calls == [1024] * 4  # with the prompt and with the empty one, at each step
    assert Image.open("out.png").size == (256, 256)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--frames", "9", "-o", "out.png"], "FluxPipeline has no num_frames; leave --frames out"),
        (["-o", "out.mp4"], "this model makes images, not videos; use out.png"),
        (["-o", "out.gif"], "this model makes images, not videos; use out.png"),
        (["-o", "out.png", "--height", "20"], "--height 20 does not fit this model"),
    ],
)
def test_what_images_do_not_have_is_refused_in_a_sentence(
    generate, flux_folder, workdir, arguments, sentence
):
    ran = generate(*arguments, model=flux_folder)
    assert sentence in ran.sentence()
    assert ran.stderr.count("\n") == 1
    assert names(workdir) == []
