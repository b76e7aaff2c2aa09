"""Every mistake gives one sentence, exit code 2, no traceback and no file."""

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from chipsparse.cli.errors import UserError
from chipsparse.cli.generation import denoise
from chipsparse.cli.media import write as media
from tests.cli.conftest import change_index, nothing_written
from tests.pipelines.test_families import FAMILIES
from tests.tiny_models import PROMPT
from tests.variants import slow


@pytest.fixture
def fails(generate, workdir):
    """Runs the command, checks how it fails, and returns the sentence."""

    def run(*arguments, code=2, **options):
        with nothing_written(workdir):
            ran = generate(*arguments, **options)
        assert ran.exit_code == code, (ran.stdout, ran.stderr)
        assert ran.stdout == ""
        assert "Traceback" not in ran.stderr
        line = ran.stderr.splitlines()[-1]
        assert line.startswith("chipsparse: ")
        return line.removeprefix("chipsparse: ").removeprefix("error: ")

    return run


@pytest.fixture
def fails_early(fails, loads_nothing):
    """Like `fails`, and the model must not have been loaded."""
    return fails


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["-o", "out.avi"],
            r"--output out.avi has the suffix .avi; use one of .mp4, .webm, .gif, .png",
        ),
        (["-o", "out"], r"--output out has no suffix; use one of .mp4, .webm, .gif, .png"),
        (["-o", "no/out.mp4"], r"the folder no of --output no/out.mp4 does not exist; create it"),
        (["--dense", "--compare"], r"--dense and --compare exclude each other"),
        (["--steps", "0"], r"--steps 0 is too small; it must be at least 1"),
        (["--frames", "-3"], r"--frames -3 is too small; it must be at least 1"),
        (["--fps", "0"], r"--fps 0 is too small; it must be at least 1"),
        (["--fps", "60"], r"--fps 60 is too fast for a GIF; use 50 or less, or .mp4"),
        (["--seed", "-1"], r"--seed -1 is out of range; it must be from 0 to 2\^64 - 1"),
        (["--guidance-scale", "nan"], r"--guidance-scale nan must be a finite number"),
        (["--height", "40"], r"--height 40 does not fit .* a multiple of 16; use 32 or 48"),
        (["--width", "5"], r"--width 5 does not fit .* a multiple of 16; use 16"),
        (["--height", "1040"], r"--height 1040 is too large for this model; .* is 1024"),
        (["--frames", "6"], r"--frames 6 does not fit .* a multiple of 4 plus 1; use 5 or 9"),
        (["--frames", "260"], r"--frames 260 is too large for this model; .* is 253"),
        (["--device", "tpu9"], r"--device tpu9 is no device; use auto, cpu, cuda or cuda:N"),
        (["--device", "cuda:" + "9" * 20], r"--device cuda:9* is no device; use auto, cpu, cuda"),
        (["--device", "meta"], r"--device meta is not supported; use auto, cpu, cuda or cuda:N"),
        (["--device", "cpu:7"], r"--device cpu:7 is not supported; use auto, cpu, cuda or cuda:N"),
        (["--steps", "1000000"], r"--steps 1000000 is too large; it must be at most 1000"),
        (["--steps", "9" * 20], r"--steps 99999999999999999999 is too large"),
        (["--fps", "1000000000"], r"--fps 1000000000 is too large; it must be at most 1000"),
        (["--guidance-scale", "-1"], r"--guidance-scale -1 is out of range; .* from 0 to 1000"),
        (["--guidance-scale", "1e308"], r"--guidance-scale 1e\+308 is out of range"),
        (["--seed", str(2**64 - 1), "--num", "2"], r"--seed .*: 2 seeds .* go beyond 2\^64 - 1"),
        (["--num", "0"], r"--num 0 is too small; it must be at least 1"),
        (["--strength", "0.5"], r"--strength is about the image of --image, and there is none"),
        (["--ram", "lots"], r"--ram: expected an amount of memory such as 24G or 512M, got 'lots'"),
        (["--vram", "-1G"], r"--vram: expected an amount of memory such as 24G or 512M, got '-1G'"),
        (["--vram", "8G", "--device", "cpu"], r"--vram 8G has no effect on a CPU; use --ram"),
        (["--dtype", "int4"], r"--dtype int4 is not known; use one of auto, float32, bfloat16"),
    ],
)
def test_bad_options(fails_early, arguments, sentence):
    assert re.match(sentence, fails_early(*arguments))


def test_output_folder_cannot_be_written_to(fails_early, workdir, monkeypatch):
    (workdir / "locked").mkdir()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    sentence = fails_early("-o", "locked/out.mp4")
    assert "the folder locked of --output locked/out.mp4 cannot be written to" in sentence


def test_cuda_without_a_gpu(fails_early, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    sentence = fails_early("--device", "cuda")
    assert sentence.startswith("--device cuda needs a CUDA GPU")
    assert sentence.endswith("use --device cpu")


def test_no_ffmpeg(fails_early, monkeypatch):
    def missing():
        raise RuntimeError("No ffmpeg exe could be found")

    monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", missing)
    assert "no ffmpeg was found" in fails_early("-o", "out.mp4")


# Model folders


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("", "--model is empty; leave it out for the bundled tiny model"),
        ("/nowhere/at/all", "the model folder /nowhere/at/all does not exist"),
    ],
)
def test_no_such_model(fails_early, name, sentence):
    assert fails_early(model=name) == sentence


def test_a_pipeline_that_wants_more_than_a_prompt(fails_early, tmp_path_factory):
    folder = tmp_path_factory.mktemp("i2v")
    FAMILIES["wan 2.1 image to video"].make().save_pretrained(folder)
    assert fails_early(model=folder) == (
        "WanImageToVideoPipeline starts from an image; give one with --image"
    )


def test_hub_name_without_network(fails_early, monkeypatch):
    def offline(*_, **__):
        raise ConnectionError("no route to host\nand a long explanation")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    assert fails_early(model="some-owner/some-model") == (
        "some-owner/some-model is neither a folder here nor a model that could be fetched from "
        "the Hugging Face hub: no route to host"
    )


def test_folder_without_model_index(fails_early, broken_model):
    (broken_model / "model_index.json").unlink()
    sentence = fails_early(model=broken_model)
    assert sentence.endswith("is not a diffusers model folder: it has no model_index.json")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"_class_name": "Wan', "model_index.json is not valid JSON"),
        ("[1, 2]", "model_index.json must hold a JSON object, not a list"),
        ("{}", "does not name a pipeline"),
        ('{"_class_name": "NoSuchPipeline"}', "needs the pipeline class NoSuchPipeline, which"),
        ('{"_class_name": "WanTransformer3DModel"}', "needs the pipeline class WanTransformer3D"),
        ('{"_class_name": "WanPipeline"}', "has no diffusion transformer"),
    ],
)
def test_bad_model_index(fails_early, broken_model, text, sentence):
    (broken_model / "model_index.json").write_text(text)
    assert sentence in fails_early(model=broken_model)


def test_unknown_transformer_class(fails_early, broken_model):
    change_index(broken_model, transformer=["diffusers", "NoSuchTransformer"])
    assert "the class diffusers.NoSuchTransformer, which" in fails_early(model=broken_model)


def test_transformer_class_without_profile(fails_early, broken_model):
    change_index(broken_model, transformer=["diffusers", "AllegroTransformer3DModel"])
    (broken_model / "chipsparse.yaml").unlink()
    sentence = fails_early(model=broken_model)
    assert "AllegroTransformer3DModel" in sentence
    assert "WanTransformer3DModel" in sentence  # what is known


def test_missing_component_folder(fails_early, broken_model):
    (broken_model / "vae").rename(broken_model / "elsewhere")
    sentence = fails_early(model=broken_model)
    assert "is incomplete: model_index.json names vae, but there is no folder" in sentence


def test_malformed_component_config(fails_early, broken_model):
    (broken_model / "transformer" / "config.json").write_text("{,}")
    assert "config.json is not valid JSON" in fails_early(model=broken_model)


# Profiles


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sparsity: {attention: {density: 2}}", "density"),
        ("sparsity: {attention: {keepfraction: 0.1}}", "keepfraction"),
        ("{", "not valid YAML"),
        ("model_class: FluxTransformer2DModel", "is for FluxTransformer2DModel, but the model"),
    ],
)
def test_bad_profile(fails_early, workdir, text, sentence):
    if not text.startswith("model_class"):
        text = f"model_class: WanTransformer3DModel\n{text}"
    (workdir / "bad.yaml").write_text(text)
    found = fails_early("--config", "bad.yaml")
    assert "bad.yaml" in found
    assert sentence in found


# Failures on the way


def test_debug_shows_the_traceback(generate):
    ran = generate("--steps", "0", "--debug")
    assert ran.exit_code == 2
    assert "Traceback" in ran.stderr
    assert ran.stderr.splitlines()[-1].endswith("it must be at least 1")


@pytest.mark.parametrize("suffix", [".mp4", slow(".webm"), slow(".gif"), ".png"])
def test_a_failure_while_writing_leaves_nothing(fails, workdir, temporary, monkeypatch, suffix):
    write = media.WRITERS[suffix]

    def breaks(path, frames, style):
        files = write(path, frames, style)
        if "compare" in path.name:
            raise OSError("no space left on device")
        return files

    (workdir / f"out-dense{suffix}").write_bytes(b"older")
    monkeypatch.setitem(media.WRITERS, suffix, breaks)
    sentence = fails("-o", f"out{suffix}", "--compare", "--frames", "1")
    (kept,) = temporary.iterdir()
    assert sentence.endswith(
        f"could not be written: no space left on device; all is kept as PNG in {kept}"
    )
    assert {path.name for path in kept.iterdir()} == {"out.png", "out-dense.png", "out-compare.png"}
    assert (workdir / f"out-dense{suffix}").read_bytes() == b"older"


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (
            ZeroDivisionError("division by zero\nsecond line"),
            1,
            r"ZeroDivisionError: division by zero \(--debug shows the traceback\)$",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
            1,
            "the GPU ran out of memory; ask for fewer --frames",
        ),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            1,
            "the machine ran out of memory; ask for fewer --frames or a smaller --height and "
            "--width$",
        ),
    ],
)
def test_errors_of_a_generation(fails, monkeypatch, error, code, sentence):
    def breaks(*_, **__):
        raise error

    monkeypatch.setattr(denoise, "generate", breaks)
    assert re.match(sentence, fails(code=code))


def test_more_memory_than_is_free_is_refused_before_loading(fails_early, monkeypatch):
    monkeypatch.setattr("chipsparse.cli.planning.room.host_free_bytes", lambda: 1 << 20)
    sentence = fails_early()
    assert re.match(r"48x32 pixels and 5 frames need about .* and 1\.0 MiB are free", sentence)


def test_a_scheduler_that_calls_the_model_twice_per_step(fails_early, broken_model):
    change_index(broken_model, scheduler=["diffusers", "FlowMatchHeunDiscreteScheduler"])
    assert fails_early(model=broken_model).startswith(
        "FlowMatchHeunDiscreteScheduler calls the transformer 2 times per denoising step"
    )


def test_a_budget_that_holds_no_cache_ends_with_the_numbers(fails):
    sentence = fails("--ram", "1K")
    assert re.match(r"not one layer's caches fit: all of them need \d", sentence)
    assert "there are 1.0 KiB on the device and 0 B of host memory" in sentence


def test_a_layer_that_the_model_does_not_have(fails_early, workdir):
    (workdir / "mine.yaml").write_text(
        "model_class: WanTransformer3DModel\nsparsity: {layers: [{layers: 1-9, mlp: dense}]}\n"
    )
    size = ("--frames", "5", "--height", "32", "--width", "48")
    assert fails_early("--config", "mine.yaml", *size) == (
        "mine.yaml: layers[0].layers: names layer 9, but this model has 3 layers, 0 to 2"
    )


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [
        (torch.float16, "use --dtype bfloat16 or float32"),
        (torch.bfloat16, "use --dtype float32"),
        (torch.float32, "a lower --guidance-scale may help"),
    ],
)
def test_values_that_are_not_finite(dtype, advice):
    class Output:
        frames = np.full((1, 1, 16, 16, 3), np.nan)

    with pytest.raises(UserError, match=f"not finite; {advice}"):
        denoise._as_frames(Output(), dtype)


# The command, whose second denoising step does not end.
ENDLESS = """
import sys, time
from chipsparse.cli.generation import denoise
from chipsparse.cli.main import main

action_of = denoise._action_of
calls = []


def slower(records):
    time.sleep(600 * len(calls))
    calls.append(records)
    return action_of(records)


denoise._action_of = slower
main()
"""


@pytest.mark.slow
def test_ctrl_c_during_generation_leaves_nothing(model_folder, workdir):
    running = subprocess.Popen(
        [
            *(sys.executable, "-c", ENDLESS, "generate", PROMPT, "-o", "out.mp4"),
            *("--model", str(model_folder), "--steps", "5"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell script in the background ignores SIGINT, and so would everything it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        # Libraries may have said something while they were imported.
        assert "loading the model\n" in iter(running.stderr.readline, "")
        assert running.stderr.readline().startswith("sparse run: step 1 of 5 (dense), ")
        running.send_signal(signal.SIGINT)
        stdout, stderr = running.communicate(timeout=600)
    finally:
        running.kill()
    assert running.returncode == 130, stderr
    assert stdout == ""
    assert stderr == "chipsparse: interrupted, nothing was written\n"
    assert list(workdir.iterdir()) == []
