"""A tiny model folder, and ways to run the command on it."""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from chipsparse.cli.main import app
from chipsparse.cli.model import weights
from chipsparse.experiments import clips
from tests.pipelines.families.wan import image_to_video
from tests.tiny_models import PROMPT, tiny_flux_pipeline, tiny_wan_pipeline

PROFILE = """\
model_class: WanTransformer3DModel
description: for tests
generation: {height: 32, width: 48, num_inference_steps: 4, max_sequence_length: 16,
  num_frames: 5, guidance_scale: 3.0}
sparsity:
  mlp: {density: 0.3}
  schedule: {periodic: {warmup: 2, refresh_every: 10}}
"""
# The arguments of a pipeline's call that both profiles have in common.
CALL = {"height": 32, "width": 48, "num_inference_steps": 4, "max_sequence_length": 16}
IMAGE_PROFILE = """\
model_class: FluxTransformer2DModel
description: for tests
generation: {height: 32, width: 48, num_inference_steps: 4, max_sequence_length: 16,
  true_cfg_scale: 3.0}
sparsity:
  mlp: {density: 0.3}
  schedule: {periodic: {warmup: 2, refresh_every: 10}}
  tile: [1, 4, 4]
"""


@dataclass(frozen=True)
class Ran:
    exit_code: int
    stdout: str
    stderr: str

    def fine(self):
        """The same, which succeeded."""
        assert self.exit_code == 0, self.stderr
        return self

    def sentence(self):
        """The sentence with which it ended, having printed nothing else."""
        assert (self.exit_code, self.stdout) == (2, ""), (self.stdout, self.stderr)
        assert "Traceback" not in self.stderr
        assert self.stderr.count("chipsparse: error: ") == 1, self.stderr
        return self.stderr.splitlines()[-1].removeprefix("chipsparse: error: ")

    def json(self):
        return json.loads(self.fine().stdout)


def command(*words):
    """Runs `chipsparse` with these words in this process."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    return Ran(result.exit_code, result.stdout, result.stderr)


def names(folder, pattern="*"):
    """Those of the files in a folder, in order."""
    return sorted(path.name for path in Path(folder).glob(pattern))


def by_hand(pipe, *, seed, **call):
    """Return what a pipeline makes without the command, uint8 ``[F, H, W, 3]``; see `CALL`."""
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator("cpu").manual_seed(seed)
    made = pipe(prompt=PROMPT, generator=generator, output_type="np", **{**CALL, **call})
    frames = made.frames[0] if hasattr(made, "frames") else made.images
    return np.rint(np.clip(frames, 0, 1) * 255).astype(np.uint8)


def pictures(pattern):
    """The images of the current folder that a pattern names, ``[F, H, W, 3]``."""
    return np.stack([np.asarray(Image.open(name)) for name in names(".", pattern)])


def change_json(path, **entries):
    """Other entries for a JSON file; None takes one away."""
    content = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({k: value for k, value in content.items() if value is not None}))


def saved(pipe, folder, profile=PROFILE, **options):
    """The folder, with the pipeline and a profile in it."""
    pipe.save_pretrained(str(folder), **options)
    (folder / "chipsparse.yaml").write_text(profile)
    return folder


@contextmanager
def nothing_written(folder):
    """The block leaves every file of a folder as it was, and adds none."""

    def times():
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}

    before = times()
    yield
    assert times() == before


@pytest.fixture(scope="session", autouse=True)
def modules_without_memory():
    """Models are made on the meta device once for each config, as nothing but shapes is read."""
    made_from = weights.made_from
    made = {}

    def once(kind, config):
        key = kind, json.dumps(config, sort_keys=True)
        if key not in made:
            made[key] = made_from(kind, config)
            assert {weight.device.type for weight in made[key].parameters()} <= {"meta"}
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "made_from", once)
        yield


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return saved(tiny_wan_pipeline(), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def flux_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-flux"
    return saved(tiny_flux_pipeline(), folder, IMAGE_PROFILE)


def modular_flux():
    """The tiny FLUX as a modular pipeline."""
    pipe = diffusers.FluxAutoBlocks().init_pipeline()
    parts = tiny_flux_pipeline().components
    pipe.update_components(**{k: v for k, v in parts.items() if k in pipe._component_specs})
    return pipe


@pytest.fixture(scope="session")
def modular_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modular") / "tiny-flux"
    return saved(modular_flux(), folder, IMAGE_PROFILE, overwrite_modular_index=True)


@pytest.fixture(scope="session")
def image_to_video_folder(tmp_path_factory):
    pipe = image_to_video(expand_timesteps=True)
    return saved(pipe, tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def broken_model(model_folder, tmp_path_factory):
    return Path(shutil.copytree(model_folder, tmp_path_factory.mktemp("broken") / "tiny"))


@pytest.fixture
def workdir(tmp_path, tmp_path_factory, monkeypatch):
    """The current folder, empty; wide enough a terminal that no line of a table is folded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path


@pytest.fixture
def loads_nothing(monkeypatch):
    """`chipsparse generate` must end before it loads a model."""
    place = "chipsparse.cli.request.load_pipeline"
    monkeypatch.setattr(place, lambda *_, **__: pytest.fail("loaded"))


@pytest.fixture
def breaks_at(monkeypatch):
    """Lets the generation of one seed fail with an error."""
    make = clips.generate

    def arrange(seed, error):
        def generate(*arguments, **options):
            if options["seed"] == seed:
                raise error
            return make(*arguments, **options)

        monkeypatch.setattr(clips, "generate", generate)

    return arrange


@pytest.fixture
def generate(model_folder, workdir):
    """Runs `chipsparse generate` on the tiny model in this process."""

    def run(*arguments, model=model_folder, prompt=PROMPT):
        given = ["generate", *([] if prompt is None else [prompt]), *arguments]
        if model is not None:
            given += ["--model", str(model)]
        if "-o" not in arguments and "--output" not in arguments:
            given += ["-o", "out.gif"]
        return command(*given)

    return run


@pytest.fixture
def batch(model_folder, workdir):
    """Runs `chipsparse batch`; what it is given is in ``prompts.csv`` or named."""

    def run(*arguments, file="prompts.csv", model=model_folder):
        usual = {"-o": "out", "--device": "cpu", "--model": str(model)}
        given = [word for name in usual if name not in arguments for word in (name, usual[name])]
        return command("batch", file, *given, *arguments)

    return run
