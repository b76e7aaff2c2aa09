"""`chipsparse compare --suite MODEL`."""

import contextlib
import dataclasses
import json
import re
import shlex
import shutil
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest
from markupsafe import Markup

from chipsparse.cli.generation import denoise
from chipsparse.cli.pages import part
from chipsparse.cli.pages.charts import Drawn, Renderer
from chipsparse.cli.pages.records import read_record
from chipsparse.cli.pages.suite_record import Suite
from chipsparse.cli.suite import lab as suite_lab
from chipsparse.cli.suite import rows as suite_rows
from chipsparse.cli.suite.record import passes
from chipsparse.experiments import quality
from chipsparse.profiles.profile import ASSETS
from tests.cli.conftest import IMAGE_PROFILE, PROFILE, command, names
from tests.tiny_models import PROMPT

PROMPTS = [PROMPT, "a blue square moves up", "a white triangle grows"]
CACHES = ["MagCache slow", "MagCache fast", "SeaCache slow", "SeaCache fast"]
OURS = ["chipsparse faithful", "chipsparse balanced", "chipsparse fast"]
QUALITIES = """\
qualities:
  faithful: {schedule: {warmup_steps: 3, refresh_every: 10}}
  balanced: {schedule: {warmup_steps: 2, refresh_every: 10}}
  fast: {schedule: {actions: [dense, refresh, sparse, skip]}}
"""


def with_qualities(profile):
    return profile.partition("sparsity:")[0] + QUALITIES


def run(*arguments):
    return command("compare", *arguments)


@pytest.fixture(scope="module")
def model(model_folder, tmp_path_factory):
    folder = shutil.copytree(model_folder, tmp_path_factory.mktemp("suites") / "tiny")
    (folder / "chipsparse.yaml").write_text(with_qualities(PROFILE))
    return folder


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """The folder of a suite of two prompts, and what the command printed."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "prompts.txt").write_text("# for tests\n" + "\n".join(PROMPTS) + "\n")
    given = ("--suite", model, "--prompts", folder / "prompts.txt", "--num", 2, "--seed", 7)
    ran = run(*given, "-o", folder / "made").fine()
    return folder / "made", ran


@pytest.fixture
def quick(monkeypatch):
    """No clip is encoded or decoded, and no chart drawn: what they show is not looked at."""
    monkeypatch.setattr(suite_lab.media, "write_media", lambda *_, **__: None)
    monkeypatch.setattr(part, "named_samples", lambda *_: "")
    monkeypatch.setattr(Renderer, "__call__", lambda *_: Drawn([], Markup(), Markup()))


@pytest.fixture
def again(finished, model, workdir, quick):
    """Runs the command on a copy of that suite, which lies in ``made``."""
    shutil.copytree(finished[0], "made")
    (workdir / "prompts.txt").write_text("\n".join(PROMPTS))

    def run_again(*arguments, suite=model):
        given = ("--suite", suite, "--prompts", "prompts.txt", "--seed", 7, "-o", "made")
        return run(*given, *(arguments or ("--num", 2)))

    return run_again


@pytest.fixture
def counted(monkeypatch, quick):
    """Counts generations; the one of the number that is put into ``stop`` is broken off."""
    generate, made = denoise.generate, {"count": 0, "stop": None}

    def counting(*arguments, **options):
        if made["count"] == made["stop"]:
            raise KeyboardInterrupt
        made["count"] += 1
        return generate(*arguments, **options)

    monkeypatch.setattr(denoise, "generate", counting)
    return made


def content(folder):
    return json.loads((folder / "suite.json").read_text())


@contextlib.contextmanager
def measured():
    """The records of the suite that lies in ``made``, to be changed."""
    file = Path("made/measured.json")
    kept = json.loads(file.read_text())
    yield kept["measured"]
    file.write_text(json.dumps(kept))


def rows(found):
    return {row["name"]: row for row in found["rows"]}


def psnrs(found):
    return {name: [clip["psnr_db"] for clip in row["clips"]] for name, row in rows(found).items()}


# A whole suite.


def test_every_row_has_every_clip(finished):
    folder, ran = finished
    found = content(folder)
    assert list(rows(found)) == ["floor", *CACHES, *OURS]
    assert found["prompts"] == {"asked": 2, "made": 2, "seeds": [7, 8], "texts": None}
    for row in found["rows"]:
        assert row["refused"] is None
        assert [clip["seed"] for clip in row["clips"]] == [7, 8]
        summary, clips = row["summary"], row["clips"]
        assert summary["passed"] == sum(clip["passes"] for clip in clips)
        ssims = [clip["ssim"] for clip in clips]
        assert summary["ssim"] == {"mean": pytest.approx(np.mean(ssims)), "worst": min(ssims)}
        speedups = [clip["speedup"] for clip in clips]
        assert summary["speedup"] == pytest.approx(np.median(speedups))
        assert row["name"] in ran.stdout
    assert found["settings"]["num_inference_steps"] == 4
    assert found["versions"]["chipsparse"]
    assert len(list((folder / "clips").glob("*.mp4"))) == 2 * 9


def test_clips_are_those_of_generate_with_the_same_seed(finished, model, workdir):
    given = ["generate", PROMPTS[1], "--model", str(model), "--seed", "8"]
    clips = {}
    for name, options in (("dense", ["--dense"]), ("fast", ["--quality", "fast"])):
        command(*given, *options, "-o", f"{name}.png").fine()
        clips[name] = np.stack([iio.imread(f"{name}-00{n}.png") for n in range(5)])
    (kept,) = (finished[0] / "dense").glob("8-*.npy")
    assert np.array_equal(np.load(kept), clips["dense"])
    fast = rows(content(finished[0]))["chipsparse fast"]["clips"][1]
    expected = quality.psnr(clips["dense"] / 255, clips["fast"] / 255)
    assert fast["psnr_db"] == pytest.approx(expected)


def test_the_floor_is_dense_with_another_kernel(finished):
    floor = rows(content(finished[0]))["floor"]
    # Whether the two kernels round alike in a clip is up to the CPU.
    assert floor["remarks"][0] == "math attention instead of flash"
    assert all("bit for bit as dense" in remark for remark in floor["remarks"][1:])
    ours = [psnr for name in OURS for psnr in psnrs(content(finished[0]))[name]]
    for clip in floor["clips"]:
        assert clip["psnr_db"] is None or clip["psnr_db"] > max(ours)


def test_how_long_it_takes_is_said_behind_the_first_dense_clip(finished):
    lines = [line for line in finished[1].stderr.splitlines() if "warming up" not in line]
    first = next(index for index, line in enumerate(lines) if "1 of 2, dense: step 4" in line)
    assert lines[first + 1].startswith("17 clips to make, about ")


def test_what_is_sent_has_neither_prompts_nor_folders(finished):
    folder, _ = finished
    assert all(prompt not in (folder / "measured.json").read_text() for prompt in PROMPTS)
    for text in ((folder / name).read_text() for name in ("suite.json", "suite.html")):
        assert all(prompt not in text for prompt in PROMPTS)
        assert str(folder.parent) not in text
    assert content(folder)["model"] == "tiny"


def test_the_page_shows_all_rows_and_frames(finished, workdir):
    page = (finished[0] / "suite.html").read_text()
    for text in ("Quality and speed", "asked for", *OURS, *CACHES):
        assert text in page
    assert page.count("<img") == 9 * 5
    (workdir / "clips").mkdir()  # of another suite
    for clip in (finished[0] / "clips").iterdir():
        (workdir / "clips" / clip.name).touch()
    command("report", finished[0] / "suite.json", "-o", "other.html").fine()
    assert (workdir / "other.html").read_text() == page


def test_the_sample_of_an_older_file_is_read(finished):
    found = content(finished[0])
    sample = found.pop("sample")
    for name in ("sample", "pictured"):
        suite = read_record(Suite, finished[0] / "suite.json", {**found, name: sample})
        assert (suite.sample_seed, suite.sample_files) == (sample["seed"], sample["files"])
    assert list(sample["files"]) == ["dense", "floor", *CACHES, *OURS]


@pytest.mark.slow
def test_images(workdir, flux_folder, tmp_path):
    model = shutil.copytree(flux_folder, tmp_path / "models" / "flux")
    (model / "chipsparse.yaml").write_text(with_qualities(IMAGE_PROFILE))
    found = run("--suite", model, "--num", 1, "--json", "--with-prompts").json()
    assert found == content(workdir / "suite-flux")
    (text,) = found["prompts"]["texts"]
    assert text in (ASSETS / "prompts" / "suite.txt").read_text()
    assert text in (workdir / "suite-flux" / "suite.html").read_text()
    assert all(row["summary"]["clips"] == 1 for row in found["rows"])
    assert len(list((workdir / "suite-flux" / "clips").glob("*.png"))) == 9


# Going on.


def gone_on(interrupted, counted):
    """The command that goes on with an interrupted suite, run."""
    assert interrupted.exit_code == 130
    last = interrupted.stderr.splitlines()[-1]
    head, _, words = last.partition("; go on with: ")
    assert head == "chipsparse: interrupted, all finished clips are in made"
    counted["stop"] = None
    return command(*shlex.split(words)[1:]).fine()


def test_an_interrupted_suite_goes_on(counted, finished, model, workdir):
    (workdir / "prompts.txt").write_text("\n".join(PROMPTS))
    counted["stop"] = 1
    given = ("--prompts", "prompts.txt", "--num", 1, "--seed", 7, "-o", "made")
    gone_on(run("--suite", model, *given), counted)
    # A dense clip and eight others, and MagCache's calibration, none of them twice.
    assert counted["count"] == 9 + 1
    expected = psnrs(content(finished[0]))
    assert psnrs(content(workdir / "made")) == {name: each[:1] for name, each in expected.items()}


def test_an_interrupt_before_the_first_clip_leaves_nothing(counted, model, workdir):
    counted["stop"] = 0
    ran = run("--suite", model, "--num", 1)
    assert ran.stderr.splitlines()[-1] == "chipsparse: interrupted, nothing was measured"
    assert not list(workdir.iterdir())


def test_what_is_there_is_not_made_again(again, counted, workdir, monkeypatch):
    monkeypatch.setattr("chipsparse.cli.suite.job.load_pipeline", None)
    before = content(workdir / "made")
    again().fine()
    assert counted["count"] == 0
    assert content(workdir / "made") == before


def test_the_folder_may_be_the_one_where_the_command_runs(again, counted, model, monkeypatch):
    monkeypatch.chdir("made")
    given = ("--prompts", "../prompts.txt", "--num", 2, "--seed", 7)
    ran = run("--suite", model, *given, "-o", ".")
    assert (ran.exit_code, counted["count"]) == (0, 0), ran.stderr


@pytest.mark.slow
def test_more_prompts_and_lost_frames(again, counted, workdir):
    counted["stop"] = 4
    ran = again("--num", 3)
    assert "\n8 clips to make, about " in ran.stderr
    gone_on(ran, counted)
    assert counted["count"] == 9
    before = psnrs(content(workdir / "made"))
    assert all(len(each) == 3 for each in before.values())
    shutil.rmtree(workdir / "made" / "dense")
    with measured() as records:
        (lost,) = [name for name in records if "chipsparse fast" in name and "seed 9" in name]
        del records[lost]
    again("--num", 3).fine()
    assert counted["count"] == 9 + 2
    assert psnrs(content(workdir / "made")) == before


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("--steps", "6"), "was measured with num_inference_steps 4, not 6"),
        (("--width", "32"), "was measured with width 48, not 32"),
        (("--flow-shift", "6"), "was measured with flow_shift null, not 6.0"),
    ],
)
def test_a_suite_of_other_settings_is_refused(change, why, again, counted, workdir):
    before = (workdir / "made" / "suite.json").read_bytes()
    said = again(*change).sentence()
    assert why in said
    assert said.endswith("name another folder with --output")
    assert counted["count"] == 0
    assert (workdir / "made" / "suite.json").read_bytes() == before


def test_other_weights_of_the_same_name_are_refused(again, model, tmp_path):
    other = shutil.copytree(model, tmp_path / "other" / "tiny")
    again(suite=other).fine()
    (file,) = (other / "transformer").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "was measured with weights" in again(suite=other).sentence()


def test_a_changed_profile_makes_its_own_clips_anew(again, counted, model, tmp_path):
    other = shutil.copytree(model, tmp_path / "other" / "tiny")
    text = with_qualities(PROFILE).replace("sparse, skip]", "sparse, dense]")
    (other / "chipsparse.yaml").write_text(text)
    before = content(Path("made"))["sample"]["files"]
    again(suite=other).fine()
    assert counted["count"] == 2
    # The clips of both have names of their own, so that each stays beside its numbers.
    after = content(Path("made"))["sample"]["files"]
    assert [name for name in before if before[name] != after[name]] == ["chipsparse fast"]
    again().fine()
    assert content(Path("made"))["sample"]["files"] == before


# What cannot run.


@pytest.mark.slow
def test_a_cache_that_fails_is_a_row_that_says_why(model, workdir, counted, monkeypatch):
    def fails(_):
        raise ValueError(f"no such block in {workdir}/model.py")

    broken = dataclasses.replace(suite_rows.CACHES["SeaCache", "slow"], make=fails)
    with monkeypatch.context() as here:
        here.setitem(suite_rows.CACHES, ("SeaCache", "slow"), broken)
        here.setattr(suite_lab, "calibrated_ratios", lambda *_: 1 / 0)
        ran = run("--suite", model, "--num", 1).fine()
    assert content(workdir / "suite-tiny")["refused"] == 3
    found = rows(content(workdir / "suite-tiny"))
    assert found["SeaCache slow"]["refused"] == "ValueError: no such block in model.py"
    for speed in ("slow", "fast"):
        row = found[f"MagCache {speed}"]
        assert row["refused"] == "ZeroDivisionError: division by zero"
        assert (row["clips"], row["summary"]) == ([], None)
    for name in ("floor", "SeaCache fast", *OURS):
        assert found[name]["summary"]["clips"] == 1
    page = (workdir / "suite-tiny" / "suite.html").read_text()
    for shown in (ran.stdout, page):
        assert "did not run: ValueError: no such block" in shown
        assert "3 of 8 rows did not run; the same command tries them again" in shown
    # What ran is kept, and what did not is made: three clips, and a calibration.
    before = counted["count"]
    ran = run("--suite", model, "--num", 1)
    assert counted["count"] == before + 4
    found = content(workdir / "suite-tiny")
    assert found["refused"] == 0
    assert all(row["summary"]["clips"] == 1 for row in found["rows"])
    page = (workdir / "suite-tiny" / "suite.html").read_text()
    assert all("did not run" not in shown for shown in (ran.stdout, page))


@pytest.mark.slow
def test_attention_of_another_library_has_no_floor(model, workdir, quick, monkeypatch):
    monkeypatch.setattr("chipsparse.pipelines.other_attention.scaled_dot_product_attention", None)
    run("--suite", model, "--num", 1).fine()
    found = rows(content(workdir / "suite-tiny"))
    assert "does not go through PyTorch's" in found["floor"]["refused"]
    assert found["chipsparse fast"]["summary"]["clips"] == 1


@pytest.mark.slow
def test_a_profile_without_qualities_is_one_row(model_folder, workdir, quick):
    run("--suite", model_folder, "--num", 1).fine()
    found = rows(content(workdir / "suite-tiny"))
    assert list(found) == ["floor", *CACHES, "chipsparse profile"]
    assert found["chipsparse profile"]["setting"] == "chipsparse.yaml"


# Marks.


@pytest.mark.parametrize(
    ("psnr_db", "ssim", "lpips", "expected"),
    [
        (20.0, 0.82, 0.2, True),
        (19.99, 0.9, 0.1, False),
        (30.0, 0.8199, 0.1, False),
        (30.0, 0.9, 0.2001, False),
        (30.0, 0.9, None, True),
        (None, 1.0, 0.0, True),
    ],
)
def test_marks(psnr_db, ssim, lpips, expected):
    assert passes({"psnr_db": psnr_db, "ssim": ssim, "lpips": lpips}) is expected


def test_a_row_is_marked_where_every_clip_passes(again, workdir):
    with measured() as records:
        for name, record in records.items():
            if name.startswith("chipsparse"):
                record |= {"psnr_db": 30.0, "ssim": 0.9}
                if name.startswith("chipsparse fast") and "seed 8" in name:
                    record["ssim"] = 0.5
    ran = again().fine()
    found = rows(content(workdir / "made"))
    assert [found[name]["summary"]["passed"] for name in OURS] == [2, 2, 1]
    page = (workdir / "made" / "suite.html").read_text()
    assert "PSNR 30.00 dB, 2 of 2 pass ✓" in page
    assert "PSNR 30.00 dB, 1 of 2 pass<" in page
    passed = [re.search(rf"^ {name} .* (./2) *$", ran.stdout, re.M)[1] for name in OURS]
    assert passed == ["2/2", "2/2", "1/2"]


def test_clips_that_equal_dense_are_noted(again, workdir):
    with measured() as records:
        for name, record in records.items():
            if name.startswith("SeaCache slow"):
                record["psnr_db"] = None
            if name.startswith("MagCache slow"):
                record["psnr_db"] = 30.0 if "seed 7" in name else None
    again().fine()
    found = rows(content(workdir / "made"))
    for name, note in (
        ("SeaCache slow", "every clip is bit for bit as dense"),
        ("MagCache slow", "1 of 2 clips are bit for bit as dense; the PSNR is the others'"),
    ):
        assert note in found[name]["remarks"]
    assert found["SeaCache slow"]["summary"]["psnr_db"] is None


def test_a_machine_that_was_not_quiet_is_noted(again, workdir):
    for seconds in (1.2, 1.3):
        with measured() as records:
            for name, record in records.items():
                if name.startswith("dense"):
                    record["seconds"] = seconds if "seed 8" in name else 1.0
        ran = again().fine()
        note = "the machine was not quiet: dense clips took 1.00 s to 1.30 s"
        shown = (ran.stdout, (workdir / "made" / "suite.html").read_text())
        assert all((note in text) is (seconds == 1.3) for text in shown)


def test_bundled_prompts_are_twelve_different_ones():
    lines = (ASSETS / "prompts" / "suite.txt").read_text().splitlines()
    assert len({line for line in lines if line and not line.startswith("#")}) == 12


# Mistakes.


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--suite", "{}/nowhere"), "the model folder .*nowhere does not exist"),
        (("--suite", "{}", "--prompts", "three.txt", "--num", 4), "three.txt has 3 prompts; "),
        (("--suite", "{}", "--num", 13), "suite.txt has 12 prompts; --count 13 asks for more"),
        (("--suite", "{}", "--num", 0), "--count 0 is too small"),
        (("--suite", "{}", "--prompts", "none.txt"), "none.txt could not be read"),
        (("--suite", "{}", "-o", "three.txt"), "three.txt is a file; a suite fills a folder"),
        (("--suite", "{}", "-o", "no/where"), "the folder no of .* does not exist"),
        (("--suite", "{}", "--steps", 0), "--steps 0 is too small"),
        (("--suite", "{}", "--height", 33), "--height 33 does not fit this model"),
        (("dense", "--suite", "{}"), "compares what it compares; leave A out"),
        (("--suite", "{}", "--model", "{}"), "leave --model out"),
        (("--suite", "{}", "--amplify", 2), "leave --amplify out"),
        (("dense", "profile", "--with-prompts"), "--with-prompts is about a suite"),
        ((), "give two files or two configs to compare, or a model with --suite"),
        (("dense",), "give two files or two configs to compare, or a model with --suite"),
    ],
)
def test_mistakes_are_found_before_anything_is_made(arguments, error, model, workdir, monkeypatch):
    monkeypatch.setattr("chipsparse.cli.suite.job.load_pipeline", None)
    (workdir / "three.txt").write_text("\n".join(PROMPTS))
    ran = run(*(str(each).replace("{}", str(model)) for each in arguments))
    assert ran.stderr.count("\n") == 1
    assert re.search(error, ran.sentence())
    assert names(workdir) == ["three.txt"]
