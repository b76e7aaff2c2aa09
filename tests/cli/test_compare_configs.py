"""`chipsparse compare` of two configs."""

import functools
import json
import math
import re

import imageio.v3 as iio
import numpy as np
import pytest

from chipsparse.cli.compare import text as compare_text
from chipsparse.cli.compare.statistics import METRICS, Summary
from chipsparse.cli.generation import denoise
from chipsparse.cli.media.panels import GAP_PIXELS
from chipsparse.experiments import quality
from chipsparse.experiments.statistics import Interval, draws, interval
from chipsparse.profiles.profile import ASSETS
from tests.cli.conftest import PROFILE, command
from tests.pipelines.test_families import FAMILIES
from tests.tiny_models import PROMPT
from tests.variants import slow

PROMPTS = [PROMPT, "a blue square moves up", "a white triangle grows and a black circle shrinks"]


def write_files(folder):
    (folder / "prompts.txt").write_text("# shapes\n" + "\n".join(PROMPTS) + "\n\n")
    (folder / "skips.yaml").write_text(
        re.sub("schedule: .*", "schedule: {actions: [dense, refresh, sparse, skip]}", PROFILE)
    )


@pytest.fixture
def compare(model_folder, workdir):
    write_files(workdir)

    def run(*arguments, model=model_folder, prompts="prompts.txt"):
        given = ["compare", *map(str, arguments), "--model", str(model)]
        return command(*given + (["--prompts", prompts] if prompts else []))

    return run


@pytest.fixture
def fails_early(compare, workdir, monkeypatch):
    """Runs the command and returns its one sentence; the model must not have been loaded."""

    monkeypatch.setattr(
        "chipsparse.cli.compare.configs.load_pipeline", lambda *_, **__: pytest.fail("loaded")
    )

    def run(*arguments, **options):
        return compare(*arguments, **options).sentence()

    return run


@pytest.fixture(scope="module")
def compared(model_folder, tmp_path_factory):
    """The JSON and the folder of a comparison of two configs, and of one with dense."""

    @functools.cache
    def make(*arguments):
        folder = tmp_path_factory.mktemp("compared")
        with pytest.MonkeyPatch.context() as here:
            here.chdir(folder)
            write_files(folder)
            given = ["compare", *arguments, "--model", str(model_folder), "--prompts"]
            ran = command(*given, "prompts.txt", "-o", "worst.png", "--json")
        return ran.json(), folder

    return make


def test_it_compares_what_generate_makes_with_the_same_seeds(compare, generate, workdir):
    (workdir / "twice.txt").write_text(f"a blue square\n{PROMPT}\n")
    content = compare("profile", "skips.yaml", "--seed", "5", "--json", prompts="twice.txt").json()
    assert [(each["prompt"], each["seed"]) for each in content["prompts"]] == [
        ("a blue square", 5),
        (PROMPT, 6),
    ]
    for name, arguments in (
        ("dense", ["--dense"]),
        ("A", []),
        ("B", ["--config", "skips.yaml"]),
    ):
        generate("-o", f"{name}.png", "--seed", "6", *arguments).fine()
    clips = {
        name: np.stack([iio.imread(f"{name}-00{n}.png") for n in range(5)]) / 255
        for name in ("dense", "A", "B")
    }
    for side in "AB":
        run = content["prompts"][1][side]
        dense, sparse = clips["dense"], clips[side]
        assert run["psnr_db"] == pytest.approx(quality.psnr(dense, sparse))
        assert run["ssim"] == pytest.approx(quality.ssim(dense, sparse))
        assert run["flicker_dense"] == pytest.approx(quality.flicker(dense))
        assert run["flicker_change"] == pytest.approx(
            quality.flicker(sparse) - quality.flicker(dense)
        )
        assert [frame["psnr_db"] for frame in run["per_frame"]] == pytest.approx(
            quality.psnr_per_frame(dense, sparse)
        )
    a, b = (content["prompts"][1][side]["psnr_db"] for side in "AB")
    assert a != b


def test_intervals_are_those_of_the_prompts(compared):
    content, _ = compared("profile", "skips.yaml")
    assert content["interval"] == {
        "level": 0.95,
        "resamples": 10_000,
        "method": "bootstrap percentile",
    }
    drawn = draws(3)
    for name in ("psnr_db", "ssim", "flicker_change", "seconds", "speedup"):
        values = {
            side: np.array([prompt[side][name] for prompt in content["prompts"]]) for side in "AB"
        }
        for key, series in (*values.items(), ("B - A", values["B"] - values["A"])):
            for statistic in ("mean", "median"):
                found = content[key][name][statistic]
                expected = interval(series, statistic, drawn)
                assert found["value"] == pytest.approx(expected.value)
                assert (found["low"], found["high"]) == pytest.approx((expected.low, expected.high))
                assert found["includes_zero"] is (found["low"] <= 0 <= found["high"])
    for prompt in content["prompts"]:
        for side in "AB":
            run = prompt[side]
            assert run["speedup"] == pytest.approx(prompt["dense_seconds"] / run["seconds"])
    assert content["A"]["lpips"] is None
    assert content["lpips_missing"]


def test_two_prompts_by_hand(compared):
    """Of two values, a quarter of the resamples is twice the one and a quarter twice the other."""
    content, _ = compared("dense", "profile", "--count", "2")
    psnrs = sorted(prompt["B"]["psnr_db"] for prompt in content["prompts"])
    found = content["B"]["psnr_db"]["mean"]
    assert (found["low"], found["high"]) == (psnrs[0], psnrs[1])
    assert found["value"] == pytest.approx(sum(psnrs) / 2)


def test_dense_as_a_side_is_the_reference_itself(compare, compared):
    content, _ = compared("dense", "profile", "--count", "2")
    for prompt in content["prompts"]:
        a = prompt["A"]
        assert (a["identical"], a["psnr_db"], a["ssim"], a["speedup"]) == (True, None, 1.0, 1.0)
        assert a["seconds"] == prompt["dense_seconds"]
    assert content["configs"]["A"] == {"name": "dense", "profile": None}
    assert content["B - A"]["psnr_db"] is None
    ran = compare("dense", "profile", "--count", "2")
    assert "B: profile" in ran.stdout
    assert "A: dense" not in ran.stdout
    assert ran.stdout.count("PSNR") == 1
    # Each line of progress has the clock of the whole.
    lines = [line for line in ran.stderr.splitlines() if ": step " in line]
    assert len(lines) == 4 * 4
    assert all(" s elapsed, about " in line and line.endswith(" left") for line in lines), lines


def test_tables(compare):
    ran = compare("profile", "skips.yaml").fine()
    shown = ran.stdout
    for title in ("A: profile", "B: skips.yaml", "B - A"):
        assert re.search(rf"^ {title} +mean +95% interval +median +95% interval", shown, re.M)
    between = r"\S+(?: to \S+)?"  # one figure where both bounds round to it, as timings may
    speedup = rf"^ speed-up +\S+ +{between} +\S+ +{between} *$"
    assert len(re.findall(speedup, shown, re.M)) == 3
    assert len(re.findall(r"^ PSNR \(dB\) +\S+ +\S+ to \S+ +\S+ +\S+ to \S+", shown, re.M)) == 3
    assert "compared" in shown
    assert "with dense, 3 prompts, seeds 0 to 2" in shown
    assert re.search(r"LPIPS +not available: \w", shown)
    assert "intervals from 3 prompts are rough" in shown
    assert max(len(line.rstrip()) for line in shown.splitlines()[:20]) <= 80


def test_what_may_be_nothing_but_the_choice_of_prompts():
    above, around = Interval(1.0, 0.5, 2.0), Interval(0.1, -1.0, 1.0)
    difference = dict.fromkeys(METRICS) | {
        "psnr_db": Summary(above, above),
        "ssim": Summary(around, around),
        "seconds": Summary(above, around),
        "speedup": Summary(around, above),
    }
    assert compare_text._zero_facts(difference) == [
        (
            "B - A",
            "may be zero, as the interval includes it: SSIM, seconds (median), speed-up (mean)",
        )
    ]
    certain = dict.fromkeys(METRICS) | {"psnr_db": Summary(above, above)}
    assert compare_text._zero_facts(certain) == [("B - A", "no interval includes zero")]


@pytest.mark.parametrize(
    ("name", "value", "sign", "text"),
    [
        ("psnr_db", 34.567, False, "34.57"),
        ("psnr_db", math.inf, False, "the same"),
        ("ssim", -0.00002, True, "-2.0e-05"),
        ("ssim", 0.0, True, "+0.0000"),
        ("flicker_change", 0.01, True, "+2.550"),
    ],
)
def test_numbers(name, value, sign, text):
    assert METRICS[name].text(value, sign=sign) == text


def test_the_picture_is_that_of_the_worst_prompt(compared):
    content, folder = compared("profile", "skips.yaml")
    psnrs = [min(prompt[side]["psnr_db"] for side in "AB") for prompt in content["prompts"]]
    worst = content["clip"]["prompt"]
    assert worst == int(np.argmin(psnrs))
    shown = np.stack([iio.imread(folder / file) for file in content["clip"]["files"]])
    assert shown.shape[2] == 3 * 48 + 2 * GAP_PIXELS
    strip = (shown.shape[1] - 2 * 32 - GAP_PIXELS) // 2
    dense, a, b = (
        shown[:, strip : strip + 32, left : left + 48] / 255
        for left in (0, 48 + GAP_PIXELS, 2 * (48 + GAP_PIXELS))
    )
    assert quality.psnr(dense, a) == pytest.approx(content["prompts"][worst]["A"]["psnr_db"])
    assert quality.psnr(dense, b) == pytest.approx(content["prompts"][worst]["B"]["psnr_db"])
    assert not shown[:, -32:, :48].any()
    assert shown[:, -32:, -48:].any()


@pytest.mark.slow
def test_which_goes_first_changes_and_each_is_warmed_up_once(compare, monkeypatch):
    order, warmed = [], []

    def watch(name, seen):
        original = getattr(denoise, name)

        def call(pipe, arguments, *, report, **rest):
            if report is None:
                seen.append("dense")
            else:
                seen.append("A" if report.config.schedule.actions is None else "B")
            return original(pipe, arguments, report=report, **rest)

        monkeypatch.setattr(denoise, name, call)

    watch("generate", order)
    watch("warm_up", warmed)
    compare("profile", "skips.yaml").fine()
    assert [order[i : i + 3] for i in (0, 3, 6)] == [
        ["dense", "A", "B"],
        ["A", "B", "dense"],
        ["B", "dense", "A"],
    ]
    assert sorted(warmed) == ["A", "B", "dense"]


@pytest.mark.slow
def test_caches_in_host_memory_are_warmed_up_each_time(compare, monkeypatch):
    """They are taken and pinned anew whenever the pipeline is patched."""
    import dataclasses

    generate, warmed = denoise.generate, []

    def with_host_memory(pipe, arguments, *, report, **rest):
        made = generate(pipe, arguments, report=report, **rest)
        return dataclasses.replace(made, host_bytes=0 if report is None else 1)

    monkeypatch.setattr(denoise, "generate", with_host_memory)
    monkeypatch.setattr(
        denoise,
        "warm_up",
        lambda *_, report, **__: warmed.append(report is not None),
    )
    compare("profile", "skips.yaml").fine()
    assert sorted(warmed) == [False] + [True] * 6


@pytest.mark.parametrize("complete", [1, slow(2)])
def test_an_interrupt_keeps_what_gives_intervals(compare, workdir, monkeypatch, complete):
    generate, calls = denoise.generate, []

    def interrupted(*arguments, **rest):
        calls.append(1)
        if len(calls) > 2 * complete:
            raise KeyboardInterrupt
        return generate(*arguments, **rest)

    monkeypatch.setattr(denoise, "generate", interrupted)
    ran = compare("dense", "profile", "--json", "-o", "worst.png")
    assert ran.exit_code == 130
    if complete == 1:
        assert ran.stdout == ""
        assert ran.stderr.splitlines()[-1] == "chipsparse: interrupted, nothing was written"
        assert not list(workdir.glob("*.png"))
    else:
        content = json.loads(ran.stdout)
        assert (len(content["prompts"]), content["interrupted"]) == (2, True)
        assert "interrupted: of 3 prompts, the first 2 are compared" in content["notes"]
        assert len(list(workdir.glob("*.png"))) == 5


@pytest.mark.slow
def test_images(flux_folder, workdir):
    arguments = ["compare", "dense", "profile", "--model", str(flux_folder), "--count", "2"]
    content = command(*arguments, "-o", "worst.png", "--json").json()
    lines = (ASSETS / "prompts" / "images.txt").read_text().splitlines()
    assert [each["prompt"] for each in content["prompts"]] == lines[:2]
    assert content["B"]["flicker_change"] is None
    assert content["B"]["psnr_db"]["mean"]["value"] > 10
    assert content["clip"]["files"] == ["worst.png"]
    shown = command(*arguments).stdout
    assert "flicker" not in shown
    error = command(*arguments, "-o", "worst.mp4").refused()
    assert "this model makes images, not videos; use worst.png" in error


@pytest.mark.slow
def test_bundled_prompts_and_profiles(compare):
    content = compare("dense", "profile", "--count", "2", "--json", prompts=None).json()
    lines = (ASSETS / "prompts" / "shapes.txt").read_text().splitlines()
    assert [each["prompt"] for each in content["prompts"]] == lines[:2]
    sizes = ["--height", "32", "--width", "32", "--frames", "5", "--steps", "4"]
    content = compare(
        "dense", "WanTransformer3DModel", "--count", "2", "--json", *sizes, prompts=None
    ).json()
    assert content["configs"]["B"]["profile"].endswith("profiles/WanTransformer3DModel.yaml")


# Mistakes


def test_configs_that_ask_for_other_settings(fails_early, workdir):
    (workdir / "long.yaml").write_text(
        PROFILE.replace("num_inference_steps: 4", "num_inference_steps: 6")
    )
    sentence = fails_early("profile", "long.yaml")
    assert sentence == (
        "A generates with num_inference_steps 4 and B with 6; clips of other settings do not "
        "compare: give --steps"
    )
    (workdir / "text.yaml").write_text(PROFILE.replace("max_sequence_length: 16", ""))
    assert fails_early("profile", "text.yaml").endswith("make them the same in both files")


def test_settings_given_on_the_command_line_hold_for_both(compare, workdir):
    (workdir / "long.yaml").write_text(
        PROFILE.replace("num_inference_steps: 4", "num_inference_steps: 6")
    )
    content = compare("profile", "long.yaml", "--steps", "3", "--count", "2", "--json").json()
    assert content["settings"]["num_inference_steps"] == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--count", "1"], "--count 1: intervals need at least 2 prompts"),
        (["--count", "4"], "prompts.txt has 3 prompts; --count 4 asks for more"),
        (["--seed", "-1"], "--seed -1 is out of range; it must be from 0 to 2^64 - 1"),
        (["--steps", "0"], "--steps 0 is too small; it must be at least 1"),
        (["--height", "40"], "--height 40 does not fit this model"),
        (["-o", "out.avi"], "--output out.avi has the suffix .avi"),
        (["--device", "tpu9"], "--device tpu9 is no device"),
        (["--dtype", "int4"], "--dtype int4 is not known"),
    ],
)
def test_bad_options(fails_early, arguments, sentence):
    assert fails_early("dense", "profile", *arguments).startswith(sentence)


def test_bad_prompts(fails_early, workdir):
    (workdir / "one.txt").write_text("a red circle\n\n")
    assert fails_early("dense", "profile", prompts="one.txt") == (
        "one.txt has 1 prompt; intervals need at least 2, one a line"
    )
    assert fails_early("dense", "profile", prompts="no.txt").startswith(
        "--prompts no.txt could not be read: "
    )


def test_a_pipeline_that_wants_more_than_a_prompt(fails_early, tmp_path):
    FAMILIES["wan 2.1 image to video"].make().save_pretrained(tmp_path / "i2v")
    assert fails_early("dense", "WanTransformer3DModel", model=tmp_path / "i2v") == (
        "WanImageToVideoPipeline also needs image; configs are compared on prompts alone"
    )


def test_bad_configs(fails_early, workdir):
    assert (
        fails_early("dense", "no.yaml")
        == "no.yaml: cannot read the profile (No such file or directory)"
    )
    (workdir / "bad.yaml").write_text(PROFILE + "  colour: red\n")
    assert "colour" in fails_early("dense", "bad.yaml")
    sentence = fails_early("dense", "FluxTransformer2DModel")
    assert "is for FluxTransformer2DModel, but the model" in sentence
