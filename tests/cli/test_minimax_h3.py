"""The command with MiniMax-H3: known from its configs, without any of its weights."""

import json

import diffusers
import pytest

from tests.cli.conftest import command

CLASSES = {
    "transformer": "MiniMaxH3Transformer3DModel",
    "vae": "AutoencoderKLMiniMaxH3",
    "scheduler": "MiniMaxH3Scheduler",
    "audio_scheduler": "MiniMaxH3Scheduler",
}


@pytest.fixture
def folder(tmp_path):
    """Makes a model's folder from configs of its transformer and its VAE."""

    def make(transformer=None, vae=None):
        configs = {"transformer": transformer or {}, "vae": vae or {}}
        index = {
            "_class_name": "MiniMaxH3ModularPipeline",
            "_blocks_class_name": "MiniMaxH3Blocks",
            "_diffusers_version": diffusers.__version__,
        }
        for name, found in CLASSES.items():
            index[name] = ["diffusers", found, {"subfolder": name}]
            (tmp_path / name).mkdir()
            file = "config.json" if name in configs else "scheduler_config.json"
            config = {"_class_name": found, **configs.get(name, {})}
            (tmp_path / name / file).write_text(json.dumps(config))
        (tmp_path / "modular_model_index.json").write_text(json.dumps(index))
        return str(tmp_path)

    return make


def read(*arguments):
    return command(*arguments, "--json").json()


def explain(model, *arguments):
    budgets = ("--vram", "140G", "--ram", "200G", "--dtype", "bfloat16")
    return read("explain", "--model", model, *budgets, "--quality", "published", *arguments)


@pytest.mark.parametrize(
    ("frames", "latents", "sound"),
    [(124, 37, 414), pytest.param(345, 102, 1150, marks=pytest.mark.slow)],
)
def test_explain_knows_the_released_sizes(folder, frames, latents, sound):
    found = explain(folder(), "--frames", str(frames))
    assert found["tokens"]["grids"] == [[latents, 24, 42]]
    assert found["tokens"]["text"] == sound
    assert found["attention"]["query_blocks"] == -(-latents * 24 * 42 // 128)
    assert sum(found["schedule"]["counts"].values()) == 49  # the scheduler counts the end
    assert found["branches"] == 1
    assert found["weights"]["transformer"] == pytest.approx(2 * 33.1e9, rel=0.01)
    # With the rates that it names: attention of 10 % + 1 % of the columns, that of the sound in
    # full, 30 % of the neurons, and projections and elementwise work as they are.
    video, tokens = latents * 24 * 42, latents * 24 * 42 + sound
    attention = 4 * tokens * 7168 * (0.11 / 0.85 * video + sound) / 600e12
    mlp = 2 * 5376 * 3 * 14_336 * (0.3 / 0.75 * video + sound) / 700e12
    rest = tokens * (8 * 5376 * 7168 / 700e12 + 66 * 2 * 5376 / 4.26e12)
    sparse = [each for each in found["estimate"]["similar"] if each["time"]["mlp"] < 1.2 * mlp]
    for each in sparse:
        assert each["time"]["attention"] == pytest.approx(attention, rel=1e-3)
        assert each["time"]["mlp"] == pytest.approx(mlp, rel=1e-3)
        assert each["time"]["rest"] == pytest.approx(rest, rel=1e-3)
    assert sum(each["layers"] for each in sparse) > 25


def test_frames_that_its_vae_does_not_make_are_refused_with_those_that_it_does(folder):
    error = command("explain", "--model", folder(), "--frames", "121").refused()
    assert "needs a multiple of 17 plus 5; use 107 or 124" in " ".join(error.split())
