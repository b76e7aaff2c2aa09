"""`chipsparse generate`: what it writes and what it tells, of a clip, an image and a series."""

import json
import os
import re
from types import SimpleNamespace
from unittest.mock import Mock

import imageio.v3 as iio
import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from PIL import Image

import chipsparse
from chipsparse.cli import request
from chipsparse.cli.errors import UserError
from chipsparse.cli.generate import job
from chipsparse.cli.generate.job import cut_text
from chipsparse.cli.media.panels import GAP_PIXELS
from chipsparse.common import machine
from chipsparse.config import Periodic
from chipsparse.profiles.profile import ASSETS
from tests.cli.conftest import CALL, by_hand, command, names, pictures
from tests.tiny_models import PROMPT, WORDS, tiny_tokenizer

ONE = ("-o", "o.png", "--frames", "1")
SMALL = ("--frames", "1", "--steps", "3")


def facts_of(ran):
    """Names and texts of the facts of a summary."""
    lines = [line.split(maxsplit=1) for line in ran.stdout.splitlines() if line.strip()]
    return {words[0]: words[1].strip() for words in lines if len(words) > 1}


def test_a_video_has_the_frames_the_rate_and_ordinary_permissions(generate, workdir):
    generate("-o", "out.mp4", "--fps", "8", "--frames", "9").fine()
    assert iio.imread("out.mp4").shape == (9, 32, 48, 3)
    properties = iio.immeta("out.mp4")
    assert (properties["codec"], properties["fps"]) == ("h264", 8.0)
    assert properties["pix_fmt"].startswith("yuv420p")
    assert names(workdir) == ["out.mp4"]
    (workdir / "reference").touch()
    assert os.stat("out.mp4").st_mode == os.stat("reference").st_mode


def test_dense_is_what_the_pipeline_alone_makes(generate, workdir, model_folder):
    generate("-o", "out.png", "--dense", "--seed", "7", "--negative-prompt", "blue").fine()
    assert names(workdir) == [f"out-00{index}.png" for index in range(5)]
    pipe = WanPipeline.from_pretrained(model_folder)
    call = {"negative_prompt": "blue", "num_frames": 5, "guidance_scale": 3.0}
    np.testing.assert_array_equal(pictures("out-*.png"), by_hand(pipe, seed=7, **call))


def test_compare_writes_three_clips_measures_them_and_reports(generate, workdir):
    result = generate("-o", "out.png", "--compare", "--report", "r.json", "--json").json()
    data = json.loads((workdir / "r.json").read_text())
    report = data.pop("report")
    assert result == {**data, "report": None}
    assert {kind: [file[:-8] for file in files] for kind, files in result["files"].items()} == {
        "output": ["out"] * 5,
        "dense": ["out-dense"] * 5,
        "compare": ["out-compare"] * 5,
        "report": [""],
    }
    assert names(workdir) == sorted(file for files in result["files"].values() for file in files)
    dense, sparse, both = map(pictures, ("out-dense-*", "out-0*", "out-compare-*"))
    strip = both.shape[1] - 32
    assert both.shape[2] == 2 * 48 + GAP_PIXELS
    np.testing.assert_array_equal(both[:, strip:, :48], dense)
    np.testing.assert_array_equal(both[:, strip:, -48:], sparse)
    assert both[:, :strip].max() > 200  # the labels
    comparison = result["comparison"]
    error = np.mean((dense / 255.0 - sparse / 255.0) ** 2)
    assert error > 0
    assert comparison["psnr_db"] == pytest.approx(-10 * np.log10(error))
    assert (comparison["identical"], 0 < comparison["ssim"] < 1) == (False, True)
    seconds = [result[side]["denoising_seconds"] for side in ("dense", "sparse")]
    assert comparison["speedup"] == pytest.approx(seconds[0] / seconds[1])
    assert {step["action"] for step in result["dense"]["steps"]} == {"dense"}
    assert report["pipeline"]["class_name"] == "WanPipeline"
    assert report["pipeline"]["location"] == data["request"]["model"]
    assert (report["error"], report["fallbacks"], report["notes"]) == (None, [], [])
    assert report["totals"]["steps"] == {"dense": 1, "refresh": 1, "sparse": 2}
    assert report["totals"]["attention_kept"] == result["sparse"]["steps"][3]["attention_kept"]
    assert len(report["steps"]) == 8  # guidance
    for step in report["steps"]:
        assert len(step["layers"]) == 6
        assert all(entry["seconds"] > 0 for entry in step["layers"])
    assert chipsparse.SparsityConfig(**report["config"]).schedule.form == Periodic()


def test_the_summary_leads_with_model_gain_time_and_file(generate, model_folder):
    ran = generate("-o", "out.png", "--seed", "7", "--steps", "5", "--verbose").fine()
    facts = facts_of(ran)
    assert list(facts)[:6] == ["model", "gain", "time", "written", "prompt", "seed"]
    assert facts["model"] == str(model_folder)
    assert re.match(r"about \d\d% fewer operations than dense \(estimated; --com", facts["gain"])
    assert re.match(r"[\d.]+ m?s for 5 steps, [\d.]+ m?s with text and decoding", facts["time"])
    written = "out-000.png to out-004.png"
    assert (facts["written"], facts["prompt"], facts["seed"]) == (written, PROMPT, "7")
    assert facts["profile"] == str(model_folder / "chipsparse.yaml")
    assert facts["settings"] == "48x32 pixels, 5 frames, 5 steps, guidance 3, float32, on cpu"
    assert "caches" in facts["memory"]
    assert {"backends", "passed"} <= facts.keys()
    assert facts["steps"] == "DRSSS"


def test_a_file_that_is_replaced_is_told(generate, workdir):
    words = ("-o", "o.png", "--frames", "1")
    assert "replaced" not in generate(*words).fine().stdout
    assert "o.png (replaced)" in generate(*words).fine().stdout
    assert generate(*words, "--json").json()["replaced"] == ["o.png"]


def test_progress_off_a_terminal_is_a_few_plain_lines_on_stderr(generate):
    lines = generate("--steps", "10", "--frames", "1", "--dense").stderr.splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("loading the model", "writing out.gif", 7)
    clock = r"dense: step 2 of 10 \(dense\), [\d.]+ m?s elapsed(, about [\d.]+ s left)?"
    assert re.fullmatch(clock, lines[1])  # a short time left is not said


def test_json_is_the_only_thing_on_stdout(generate):
    result = generate("--json", "--seed", str(2**64 - 1)).json()
    asked = result["request"]
    sparse = result["sparse"]
    assert asked["profile"].endswith("chipsparse.yaml")
    expected = {"prompt": PROMPT, "seed": 2**64 - 1, "fps": 16, "device": "cpu", "dtype": "float32"}
    expected |= {"mode": "sparse", "transformer_class": "WanTransformer3DModel"}
    assert expected.items() <= asked.items()
    own = {"num_frames": 5, "guidance_scale": 3.0, "true_cfg_scale": None}
    assert asked["settings"] == CALL | own
    assert (result["kind"], result["files"]) == ("generation", {"output": ["out.gif"]})
    assert (result["dense"], result["comparison"]) == (None, None)
    assert result["peak_process_bytes"] > 1e7
    assert (sparse["frames"], sparse["height"], sparse["width"]) == (5, 32, 48)
    steps = sparse["steps"]
    actions = ["dense", "refresh", "sparse", "sparse"]
    assert [(step["step"], step["action"]) for step in steps] == [*enumerate(actions)]
    assert steps[0]["attention_kept"] is None
    assert 0 < steps[2]["mlp_kept"] <= 1
    assert sum(step["seconds"] for step in steps) == pytest.approx(sparse["denoising_seconds"])
    assert sparse["total_seconds"] > sparse["denoising_seconds"] > 0
    assert sparse["peak_gpu_bytes"] is None
    assert sparse["cache_bytes"] > 0
    assert sparse["backends"]
    # The words of the command make it again, wherever they are run.
    again = command(*asked["command"][1:], "--json").json()["request"]
    assert again == {**asked, "command": again["command"]}


QUALITIES = """
sparsity: {attention: {density: 0.5}}
qualities:
  balanced: {schedule: {listed: {full: [0, 1]}}}
  fast: {schedule: {listed: {full: [0, 1]}}}
"""


def test_a_quality_of_a_profile_is_taken_and_named(generate, model_folder, workdir):
    (workdir / "mine.yaml").write_text(QUALITIES)
    small = ("--config", "mine.yaml", *ONE, "--height", "32", "--width", "48", "--steps", "4")
    given = ("--quality", "fast", "--report", "a.json", "--dtype", "bfloat16", "--json")
    asked = generate(*small, *given).json()["request"]
    report = json.loads((workdir / "a.json").read_text())
    assert asked["quality"] == report["report"]["quality"] == "fast"
    assert (asked["dtype"], asked["profile"]) == ("bfloat16", "mine.yaml")
    assert asked["settings"]["max_sequence_length"] == 512  # the pipeline's own
    assert report["report"]["totals"]["steps"] == {"dense": 2, "skip": 2}
    assert report["sparse"]["steps"][3]["action"] == "skip"
    words = asked["command"]
    assert words[words.index("--quality") + 1] == "fast"
    with Image.open("o.png") as picture:
        assert "Quality: fast" in picture.text["parameters"]
        facts = json.loads(picture.text["chipsparse"])
        assert str(model_folder.parent) not in str(picture.text)
    expected = {"model": model_folder.name, "size": "48x32", "seed": "0", "dtype": "bfloat16"}
    expected |= {"prompt": PROMPT, "profile": "mine.yaml", "mode": "sparse"}
    assert expected.items() <= facts.items()
    assert "balanced, from mine.yaml" in generate(*small).stdout


DENSE_MLP = "MLP runs dense in 1 of 3 layers (first: layer 1): its second linear is of class Other"


class Other(torch.nn.Linear):
    """A linear by which an MLP cannot run sparse."""


def test_a_strict_run_fails_with_the_sentence_of_the_fallback(generate, workdir, monkeypatch):
    load = request.load_pipeline

    def spoiled(*arguments, **options):
        pipe = load(*arguments, **options)
        pipe.transformer.blocks[1].ffn.net[2].__class__ = Other
        return pipe

    monkeypatch.setattr(request, "load_pipeline", spoiled)
    assert "fallback" in generate(*ONE).fine().stdout
    (workdir / "o.png").unlink()
    said = generate(*ONE, "--strict", "--report", "r.json").sentence()
    assert said == f"{DENSE_MLP} (an adapter, or quantized)"
    assert names(workdir) == ["r.json"]
    report = json.loads((workdir / "r.json").read_text())["report"]
    assert report["error"].startswith(f"FallbackError: {DENSE_MLP}")
    (step,) = report["steps"]
    assert (step["step"], step["finished"], step["seconds"]) == (0, False, None)


def test_the_bundled_image_model_runs_with_its_own_profile_and_guidance(generate, workdir):
    ran = generate("-o", "out.png", "--steps", "1", model=ASSETS / "tiny-flux").fine()
    facts = facts_of(ran)
    assert facts["model"] == "tiny-flux, bundled, draws simple shapes only"
    assert facts["profile"] == "balanced, from tiny-flux/chipsparse.yaml, bundled"
    assert " for 1 step, " in facts["time"]
    assert "guidance 4" in facts["settings"]
    assert Image.open("out.png").size == (256, 256)


def test_a_series_loads_the_model_once_and_patches_it_once(generate, workdir, monkeypatch):
    loads = Mock(side_effect=request.load_pipeline)
    patches = Mock(side_effect=job.patched)
    plans = Mock(side_effect=job.ProgressDisplay.plan)
    monkeypatch.setattr(request, "load_pipeline", loads)
    monkeypatch.setattr(job, "patched", patches)
    monkeypatch.setattr(job.ProgressDisplay, "plan", lambda *given: plans(*given))
    (workdir / "p.txt").write_text("a red circle\na blue square\n")
    given = ("--prompts", "p.txt", "--num", "2", "-o", "o.png", "--report", "r.json", "--json")
    series = generate(*SMALL, *given, "--seed", "7", prompt=None).json()
    assert (loads.call_count, patches.call_count) == (1, 1)
    ((_, planned),) = (given.args for given in plans.call_args_list)
    assert planned == {f"sparse, o-00{i}.png": 1.0 for i in range(4)}
    made = series["clips"]
    assert [(clip["request"]["prompt"], clip["request"]["seed"]) for clip in made] == [
        (prompt, seed) for prompt in ("a red circle", "a blue square") for seed in (7, 8)
    ]
    assert [clip["files"] for clip in made] == [
        {"output": [f"o-00{i}.png"], "report": [f"r-00{i}.json"]} for i in range(4)
    ]
    assert len(names(workdir)) == 9
    for index, clip in enumerate(made):
        report = json.loads((workdir / f"r-00{index}.json").read_text())
        assert report["request"]["seed"] == clip["request"]["seed"]
        actions = [step["action"] for step in clip["sparse"]["steps"]]
        assert actions == ["dense", "refresh", "sparse"]
    generate(*SMALL, "--seed", "8", "-o", "alone.png", prompt="a blue square").fine()
    assert (workdir / "o-003.png").read_bytes() == (workdir / "alone.png").read_bytes()
    assert (workdir / "o-002.png").read_bytes() != (workdir / "alone.png").read_bytes()


def test_neither_a_failure_nor_an_interruption_loses_the_others(generate, workdir, breaks_at):
    breaks_at(1, UserError("the model produced values that are not finite"))
    given = (*SMALL, "--num", "3", "-o", "o.png", "--report", "r.json")
    ran = generate(*given, "--json")
    assert ran.exit_code == 1
    errors = [clip["error"] for clip in json.loads(ran.stdout)["clips"]]
    assert errors == [None, "the model produced values that are not finite", None]
    expected = ["o-000.png", "o-002.png", "r-000.json", "r-001.json", "r-002.json"]
    assert names(workdir) == expected
    failed = json.loads((workdir / "r-001.json").read_text())
    assert failed["error"].startswith("the model produced values")
    assert failed["report"] is None  # not that of the picture before
    ran = generate(*SMALL, "--num", "3", "-o", "c.png", "--compare")
    assert "2 of 3 made, 1 failed" in ran.stdout
    assert "chipsparse: error: 2 of 3: the model produced" in ran.stderr
    assert ran.stderr.count("warming up") == 2  # each side once
    assert names(workdir, "c-*") == sorted(
        f"c-00{i}{kind}.png" for i in (0, 2) for kind in ("", "-dense", "-compare")
    )
    rows = [line.split() for line in ran.stdout.splitlines()]
    made = [row for row in rows if row[:1] in (["c-000.png"], ["c-002.png"])]
    assert [(row[1], "dB" in row) for row in made] == [("0", True), ("2", True)]
    breaks_at(1, KeyboardInterrupt())
    ran = generate(*SMALL, "--num", "3", "-o", "i.png")
    assert ran.exit_code == 130
    assert "1 of 3 made" in ran.stdout
    assert ran.stderr.splitlines()[-1] == "chipsparse: interrupted, 1 of the series was written"
    assert names(workdir, "i-*") == ["i-000.png"]


def words(count):
    return " ".join(WORDS[index % len(WORDS)] for index in range(count))


def test_prompts_that_are_warned_of(generate):
    for prompt, sentence in {
        "": "the prompt is empty: the result shows whatever the model likes",
        words(20): "the prompt is longer than the 16 tokens that the text encoder reads; cut: ",
    }.items():
        ran = generate(*ONE, "--steps", "3", "--json", prompt=prompt)
        (warning,) = ran.json()["request"]["warnings"]
        assert warning.startswith(sentence)
        assert f"chipsparse: warning: {warning}\n" in ran.stderr


def test_what_a_text_encoder_does_not_read():
    def cut(prompt, limit, *tokenizers):
        components = {f"tokenizer_{i}": tokenizer for i, tokenizer in enumerate(tokenizers)}
        pipe = SimpleNamespace(components={"vae": object(), "text_encoder": None, **components})
        return cut_text(pipe, prompt, limit)

    own = tiny_tokenizer()
    short = tiny_tokenizer(model_max_length=4)
    # Of 16 tokens the last one ends the prompt.
    assert cut(words(15), 16, own) is cut(words(5000), None, own) is None
    for count in (16, 20):
        lost = " ".join(words(count).split()[15:])
        assert cut(words(count), 16, own).endswith(f'the text encoder reads; cut: "{lost}"')
    assert cut(" ".join(["unheard"] * 17), 16, own).endswith('cut: "2 unknown words"')
    assert "the 4 tokens" in cut(words(8), 16, short)
    # Of several the one that reads most counts.
    assert cut(words(8), 16, short, own) is None
    assert "the 16 tokens" in cut(words(30), 16, short, own)
    assert cut(words(200), 16, own).endswith(' ..."')


@pytest.mark.parametrize(("load", "busy"), [(0.9, False), (6.35, True)])
def test_a_speed_up_that_a_busy_machine_measured_says_so(generate, monkeypatch, load, busy):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(machine, "core_count", lambda: 2)
    ran = generate("-o", "o.png", *SMALL, "--device", "cpu", "--compare")
    text = "a load of 6.3 on 2 cores: times differ from an idle machine's"
    assert (text in " ".join(ran.fine().stdout.split())) == busy
    alone = generate("-o", "p.png", *SMALL, "--device", "cpu", "--json").json()
    assert alone["busy"] is None
