"""`chipsparse generate`: what it writes and what it tells."""

import json
import os
import re
import subprocess
import sys

import imageio.v3 as iio
import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from PIL import Image

from chipsparse.cli.generate import summary
from chipsparse.cli.media.panels import GAP_PIXELS
from tests.cli.conftest import command, names
from tests.tiny_models import PROMPT

FRAME_SHAPE = (32, 48, 3)


def test_mp4_has_the_frames_and_the_rate(generate, workdir):
    generate("-o", "out.mp4", "--fps", "8", "--frames", "9").fine()
    assert iio.imread("out.mp4").shape == (9, *FRAME_SHAPE)
    properties = iio.immeta("out.mp4")
    assert (properties["codec"], properties["fps"]) == ("h264", 8.0)
    assert properties["pix_fmt"].startswith("yuv420p")
    assert names(workdir) == ["out.mp4"]


def test_one_frame_gives_one_png_of_ordinary_permissions(generate, workdir):
    assert generate("-o", "out.png", "--frames", "1", "--height", "48").exit_code == 0
    assert names(workdir) == ["out.png"]
    assert iio.imread("out.png").shape == (48, 48, 3)
    (workdir / "reference").touch()
    assert os.stat("out.png").st_mode == os.stat("reference").st_mode


def test_dense_is_what_the_pipeline_alone_makes(generate, workdir, model_folder):
    generate("-o", "out.png", "--dense", "--seed", "7", "--negative-prompt", "blue").fine()
    assert names(workdir) == [f"out-00{index}.png" for index in range(5)]
    pipe = WanPipeline.from_pretrained(model_folder)
    pipe.set_progress_bar_config(disable=True)
    frames = pipe(
        PROMPT,
        negative_prompt="blue",
        height=32,
        width=48,
        num_frames=5,
        num_inference_steps=4,
        guidance_scale=3.0,
        max_sequence_length=16,
        generator=torch.Generator("cpu").manual_seed(7),
    ).frames[0]
    written = np.stack([iio.imread(f"out-00{index}.png") for index in range(5)])
    np.testing.assert_array_equal(written, np.rint(frames * 255).astype(np.uint8))


def test_table(generate):
    ran = generate("-o", "out.png", "--steps", "5").fine()
    lines = [line.split() for line in ran.stdout.splitlines() if line.strip()]
    counts = {line[0]: line[1] for line in lines if len(line) > 1}
    assert (counts["dense"], counts["refresh"], counts["sparse"]) == ("1", "1", "3")
    assert counts["all"] == "5"
    assert ["written", "out-000.png", "to", "out-004.png"] in lines
    assert lines[lines.index(["steps", "DRSSS"]) + 1] == summary.LETTERS.split()
    assert "for 5 steps" in ran.stdout
    assert "caches" in ran.stdout


def facts_of(ran):
    """Names and texts of the facts of a summary, in their order."""
    lines = [line.split(maxsplit=1) for line in ran.stdout.splitlines() if line.strip()]
    return [(words[0], words[1].strip()) for words in lines if len(words) > 1]


def test_the_summary_leads_with_model_gain_time_and_file(generate, model_folder):
    ran = generate("-o", "out.png", "--frames", "1", "--seed", "7")
    facts = facts_of(ran)
    assert [name for name, _ in facts[:6]] == [
        "model",
        "gain",
        "time",
        "written",
        "prompt",
        "seed",
    ]
    texts = dict(facts)
    assert texts["model"] == str(model_folder)
    assert re.match(
        r"about \d\d% fewer operations than dense \(estimated; --compare", texts["gain"]
    )
    assert re.match(r"[\d.]+ m?s for 4 steps, [\d.]+ m?s with text and decoding", texts["time"])
    assert (texts["written"], texts["prompt"], texts["seed"]) == ("out.png", PROMPT, "7")
    assert texts["profile"] == str(model_folder / "chipsparse.yaml")
    assert texts["settings"] == "48x32 pixels, 1 frame, 4 steps, guidance 3, float32, on cpu"
    assert not {"backends", "passed"} & texts.keys()


def test_compared_the_gain_is_measured_and_verbose_adds_the_backends(generate):
    texts = dict(facts_of(generate("-o", "out.png", "--frames", "1", "--compare", "--verbose")))
    gain = r"[\d.]+ times as fast as dense \([\d.]+ m?s\), PSNR [\d.]+ dB, SSIM"
    assert re.match(gain, texts["gain"])
    assert {"backends", "passed"} <= texts.keys()


def test_a_bundled_model_says_what_it_is(generate):
    size = ("--height", "32", "--width", "32", "--frames", "1", "--steps", "1")
    ran = generate("-o", "out.png", *size, model=None).fine()
    facts = dict(facts_of(ran))
    assert facts["model"] == "tiny-wan, bundled, draws simple shapes only"
    assert facts["profile"] == "balanced, from tiny-wan/chipsparse.yaml, bundled"
    assert " for 1 step, " in facts["time"]


def test_progress_off_a_terminal_is_a_few_plain_lines_on_stderr(generate):
    ran = generate("--steps", "10", "--frames", "1", "--dense")
    lines = ran.stderr.splitlines()
    assert lines[0] == "loading the model"
    assert lines[-1] == "writing out.gif"
    assert len(lines) == 7
    assert re.fullmatch(
        r"dense run: step 2 of 10 \(dense\), [\d.]+ m?s elapsed, about [\d.]+ s left", lines[1]
    )
    assert "\x1b" not in ran.stderr


def test_json_is_the_only_thing_on_stdout(generate):
    content = generate("--json", "--seed", "5").json()
    assert content["mode"] == "sparse"
    assert (content["prompt"], content["seed"], content["fps"]) == (PROMPT, 5, 16)
    assert (content["device"], content["dtype"]) == ("cpu", "float32")
    assert content["transformer_class"] == "WanTransformer3DModel"
    assert content["profile"].endswith("chipsparse.yaml")
    assert content["settings"] == {
        "height": 32,
        "width": 48,
        "num_frames": 5,
        "num_inference_steps": 4,
        "guidance_scale": 3.0,
        "true_cfg_scale": None,
        "max_sequence_length": 16,
    }
    assert content["files"] == {"output": ["out.gif"]}
    assert (content["dense"], content["comparison"]) == (None, None)
    assert content["peak_process_bytes"] > 1e7
    sparse = content["sparse"]
    assert (sparse["frames"], sparse["height"], sparse["width"]) == (5, 32, 48)
    actions = [step["action"] for step in sparse["steps"]]
    assert actions == ["dense", "refresh", "sparse", "sparse"]
    assert [step["step"] for step in sparse["steps"]] == [0, 1, 2, 3]
    assert sparse["steps"][0]["attention_kept"] is None
    assert 0 < sparse["steps"][2]["mlp_kept"] <= 1
    assert sum(step["seconds"] for step in sparse["steps"]) == pytest.approx(
        sparse["denoising_seconds"]
    )
    assert sparse["total_seconds"] > sparse["denoising_seconds"] > 0
    assert sparse["peak_gpu_bytes"] is None
    assert sparse["cache_bytes"] > 0
    assert sparse["backends"]


def test_compare_writes_three_clips_and_measures_them(generate, workdir):
    content = generate("-o", "out.png", "--compare", "--json").json()
    kinds = {kind: [file[:-8] for file in files] for kind, files in content["files"].items()}
    assert kinds == {
        "output": ["out"] * 5,
        "dense": ["out-dense"] * 5,
        "compare": ["out-compare"] * 5,
    }
    assert names(workdir) == sorted(file for files in content["files"].values() for file in files)
    dense, sparse, joined = (
        np.stack([iio.imread(file) for file in content["files"][kind]])
        for kind in ("dense", "output", "compare")
    )
    strip = joined.shape[1] - 32
    assert joined.shape[2] == 2 * 48 + GAP_PIXELS
    np.testing.assert_array_equal(joined[:, strip:, :48], dense)
    np.testing.assert_array_equal(joined[:, strip:, -48:], sparse)
    assert joined[:, :strip].max() > 200  # the labels

    comparison = content["comparison"]
    error = np.mean((dense / 255.0 - sparse / 255.0) ** 2)
    assert error > 0
    assert comparison["psnr_db"] == pytest.approx(-10 * np.log10(error))
    assert comparison["identical"] is False
    assert 0 < comparison["ssim"] < 1
    assert comparison["speedup"] == pytest.approx(
        content["dense"]["denoising_seconds"] / content["sparse"]["denoising_seconds"]
    )
    assert {step["action"] for step in content["dense"]["steps"]} == {"dense"}


def test_compare_gives_the_frames_of_separate_runs(generate):
    assert generate("-o", "both.png", "--compare", "--frames", "1").exit_code == 0
    assert generate("-o", "sparse.png", "--frames", "1").exit_code == 0
    assert generate("-o", "dense.png", "--frames", "1", "--dense").exit_code == 0
    assert generate("-o", "other.png", "--frames", "1", "--seed", "4").exit_code == 0
    np.testing.assert_array_equal(iio.imread("both.png"), iio.imread("sparse.png"))
    assert (iio.imread("other.png") != iio.imread("sparse.png")).any()
    np.testing.assert_array_equal(iio.imread("both-dense.png"), iio.imread("dense.png"))


@pytest.mark.slow
def test_compare_of_a_profile_that_is_always_dense_finds_no_difference(generate, tmp_path):
    profile = tmp_path / "dense.yaml"
    profile.write_text(
        "model_class: WanTransformer3DModel\n"
        "generation: {height: 32, width: 32, num_frames: 1, max_sequence_length: 16}\n"
        "sparsity: {attention: {enabled: false}, mlp: {enabled: false}}\n"
    )
    given = ("--config", str(profile), "--compare", "--steps", "3")
    comparison = generate(*given, "--json").json()["comparison"]
    assert comparison["identical"] is True
    assert comparison["psnr_db"] is None
    ran = generate(*given)
    assert "the same frames as dense" in ran.stdout


def test_config_overrides_the_profile_of_the_model(generate, tmp_path):
    profile = tmp_path / "mine.yaml"
    profile.write_text(
        "model_class: WanTransformer3DModel\n"
        "generation: {height: 48, width: 32, num_frames: 1, num_inference_steps: 3}\n"
        "sparsity: {schedule: {actions: [dense, refresh, skip]}}\n"
    )
    given = ("--json", "--guidance-scale", "1", "--dtype", "bfloat16")
    content = generate("--config", str(profile), *given).json()
    assert content["dtype"] == "bfloat16"
    assert content["profile"] == str(profile)
    assert content["settings"]["guidance_scale"] == 1.0
    assert content["settings"]["max_sequence_length"] == 512  # the pipeline's own
    steps = content["sparse"]["steps"]
    assert [step["action"] for step in steps] == ["dense", "dense", "skip"]


def test_ram_overrides_the_profile(generate):
    def sparse(*arguments):
        return generate("--json", *arguments).json()["sparse"]

    unlimited = sparse()
    assert (unlimited["fallbacks"], unlimited["host_bytes"]) == ([], 0)
    budget = unlimited["cache_bytes"] // 2
    half = sparse("--ram", str(budget))
    assert 0 < half["cache_bytes"] <= budget
    assert any("do not fit into the memory budgets" in line for line in half["fallbacks"])


@pytest.mark.slow
def test_as_a_program(model_folder, workdir):
    program = [sys.executable, "-m", "chipsparse.cli.main", "generate", PROMPT]
    ran = subprocess.run(
        [*program, "-o", "out.mp4", "--model", str(model_folder), "--json"],
        capture_output=True,
        text=True,
        timeout=600,  # only for what hangs
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["files"] == {"output": ["out.mp4"]}
    assert "Traceback" not in ran.stderr
    _, loading, said = ran.stderr.partition("loading the model\n")  # and libraries before it
    assert loading
    assert len(said.splitlines()) < 10
    assert iio.imread("out.mp4").shape == (5, *FRAME_SHAPE)


def test_help_and_version(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("", "generate", "explain", "compare", "bench"):
        shown = command(*name.split(), "--help").fine().stdout
        assert max(len(line) for line in shown.splitlines()) <= 80
        assert f"Example: chipsparse {name or 'generate'}" in shown
    assert command("--version").fine().stdout.startswith("chipsparse 0.")


QUALITIES = """
sparsity: {attention: {density: 0.5}}
qualities:
  balanced: {schedule: {full_steps: [0, 1]}}
  fast: {schedule: {full_steps: [0, 1], between: none}}
"""


def test_a_quality_of_the_profile_is_taken_and_named(generate, workdir):
    (workdir / "mine.yaml").write_text(QUALITIES)
    small = ("--config", "mine.yaml", "--frames", "1", "--height", "32", "--width", "48")
    small += ("--steps", "4")
    fast = (*small, "--quality", "fast", "-o", "a.png")
    request = generate(*fast, "--report", "a.json", "--json").json()
    report = json.loads((workdir / "a.json").read_text())
    assert request["quality"] == report["quality"] == "fast"
    assert report["totals"]["steps"] == {"dense": 2, "skip": 2}
    words = request["command"]
    assert words[words.index("--quality") + 1] == "fast"
    with Image.open("a.png") as picture:
        assert "Quality: fast" in picture.text["parameters"]
    assert "balanced, from mine.yaml" in generate(*small, "-o", "b.png").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--quality", "best"), "--quality: there is no quality 'best'; known are faithful, bal"),
        (("--quality", "fast"), "chipsparse.yaml does not say what fast is; it has no qualities"),
        (("--dense", "--quality", "fast"), "--quality is about the sparse run, which --dense leav"),
    ],
)
def test_a_quality_that_cannot_be_ends_before_anything_is_loaded(
    generate, workdir, arguments, said
):
    error = generate("-o", "out.png", *arguments).refused()
    assert said in error
    assert error.count("\n") == 1
    assert names(workdir) == []
