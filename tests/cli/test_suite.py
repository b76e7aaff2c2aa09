"""`chipsparse compare --suite MODEL`."""

import dataclasses
import json
import shlex
import shutil
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest
from markupsafe import Markup

from chipsparse.cli.compare.record import Comparison
from chipsparse.cli.views import charts
from chipsparse.cli.views import page as views_page
from chipsparse.cli.views.sections import Alert
from chipsparse.experiments import clips, quality, rivals
from tests.cli.conftest import PROFILE, command, names
from tests.tiny_models import PROMPT

PROMPTS = [PROMPT, "a blue square moves up", "a white triangle grows"]
CACHES = ["MagCache slow", "MagCache fast", "SeaCache slow", "SeaCache fast"]
OURS = ["chipsparse faithful", "chipsparse balanced", "chipsparse fast"]
QUALITIES = """\
qualities:
  faithful: {schedule: {periodic: {warmup: 3, refresh_every: 10}}}
  balanced: {schedule: {periodic: {warmup: 2, refresh_every: 10}}}
  fast: {schedule: {actions: [dense, refresh, skip, sparse]}}
"""


def with_qualities(profile):
    return profile.partition("sparsity:")[0] + QUALITIES


def content(folder):
    return json.loads((folder / "suite.json").read_text())


def rows(folder):
    return {row["name"]: row for row in content(folder)["rows"]}


def psnrs(folder):
    made = rows(folder).items()
    return {name: [clip["psnr_db"] for clip in row["clips"]] for name, row in made}


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
    ran = command("compare", *given, "-o", folder / "made").fine()
    return folder / "made", ran


@pytest.fixture
def quick(monkeypatch):
    """No clip is encoded or decoded, and no chart drawn: what they show is not looked at."""
    monkeypatch.setattr("chipsparse.cli.media.write.write_media", lambda *_, **__: None)
    monkeypatch.setattr(views_page, "named_samples", lambda *_: "")
    nothing = charts.Drawn([], Markup(), Markup())
    monkeypatch.setattr(charts, "draw_chart", lambda *_: nothing)


@pytest.fixture
def again(finished, model, workdir, quick):
    """Runs the command on a copy of that suite, which lies in ``made``."""
    shutil.copytree(finished[0], "made")
    (workdir / "prompts.txt").write_text("\n".join(PROMPTS))

    def run_again(*arguments, suite=model):
        given = ("--suite", suite, "--prompts", "prompts.txt", "--seed", 7, "-o", "made")
        return command("compare", *given, *(arguments or ("--num", 2)))

    return run_again


@pytest.fixture
def counted(monkeypatch, quick):
    """Counts generations; the one of the number that is put into ``stop`` is broken off."""
    generate = clips.generate
    made = {"count": 0, "stop": None}

    def counting(*arguments, **options):
        if made["count"] == made["stop"]:
            raise KeyboardInterrupt
        made["count"] += 1
        return generate(*arguments, **options)

    monkeypatch.setattr(clips, "generate", counting)
    return made


def test_every_row_has_every_clip_of_generate(finished, model, workdir):
    folder, ran = finished
    result = content(folder)
    assert list(rows(folder)) == ["dense", "floor", *CACHES, *OURS]
    assert (result["asked"], result["seed"] in (7, 8)) == (2, True)
    for row in result["rows"]:
        assert row["refused"] is None
        assert [(clip["seed"], clip["prompt"]) for clip in row["clips"]] == [(7, ""), (8, "")]
        assert row["name"] in ran.stdout
    assert result["settings"]["num_inference_steps"] == 4
    assert result["versions"]["chipsparse"]
    assert len(list((folder / "clips").glob("*.mp4"))) == 2 * 9
    # Whether the two kernels round alike in a clip is up to the CPU.
    assert rows(folder)["floor"]["remarks"][0] == "math attention instead of flash"
    given = ["generate", PROMPTS[1], "--model", str(model), "--seed", "8"]
    made = {}
    for name, options in (("dense", ["--dense"]), ("fast", ["--quality", "fast"])):
        command(*given, *options, "-o", f"{name}.png").fine()
        made[name] = np.stack([iio.imread(f"{name}-00{n}.png") for n in range(5)])
    (kept,) = (folder / "dense").glob("8-*.npy")
    assert np.array_equal(np.load(kept), made["dense"])
    expected = quality.psnr(made["dense"] / 255, made["fast"] / 255)
    assert psnrs(folder)["chipsparse fast"][1] == pytest.approx(expected)


def test_bounds_decide_on_the_qualities_alone(again):
    ran = again("--num", 2, "--max-pixel", 0)
    assert ran.exit_code == 1
    result = content(Path("made"))
    assert (result["passed"], result["identical"]) == (False, False)
    assert [sentence.partition(":")[0] for sentence in result["broken"]] == OURS[1:]
    assert all(clip["identical"] for clip in rows(Path("made"))[OURS[0]]["clips"])
    assert result["broken"][1] in ran.stderr
    shown = " ".join(ran.stdout.split())
    assert "largest pixel difference <= 0 is broken" in shown
    again("--num", 2, "--max-pixel", 255).fine()
    assert content(Path("made"))["passed"] is True


def test_what_is_sent_has_neither_prompts_nor_folders_and_report_shows_it(finished, workdir):
    folder, _ = finished
    page = (folder / "suite.html").read_text()
    for text in ((folder / "suite.json").read_text(), page):
        assert all(prompt not in text for prompt in PROMPTS)
        assert str(folder.parent) not in text
    assert content(folder)["model"] == "tiny"
    for text in ("Quality and speed", "asked for", *OURS, *CACHES):
        assert text in page
    assert page.count("<img") == 9 * 5
    (workdir / "clips").mkdir()  # of another suite
    for clip in (folder / "clips").iterdir():
        (workdir / "clips" / clip.name).touch()
    command("report", folder / "suite.json", "-o", "other.html").fine()
    assert (workdir / "other.html").read_text() == page


def test_an_interrupted_suite_goes_on(counted, finished, model, workdir):
    (workdir / "prompts.txt").write_text("\n".join(PROMPTS))
    counted["stop"] = 0
    given = ("--prompts", "prompts.txt", "--num", 1, "--seed", 7, "-o", "made", "--with-prompts")
    ran = command("compare", "--suite", model, *given)
    assert ran.stderr.splitlines()[-1] == "chipsparse: interrupted, nothing was measured"
    assert names(workdir) == ["prompts.txt"]
    counted["stop"] = 1
    ran = command("compare", "--suite", model, *given)
    assert ran.exit_code == 130
    head, _, words = ran.stderr.splitlines()[-1].partition("; go on with: ")
    assert head == "chipsparse: interrupted, all finished clips are in made"
    counted["stop"] = None
    command(*shlex.split(words)[1:]).fine()
    # A dense clip and eight others, and MagCache's calibration, none of them twice.
    assert counted["count"] == 9 + 1
    made = workdir / "made"
    assert psnrs(made) == {name: kept[:1] for name, kept in psnrs(finished[0]).items()}
    assert all(clip["prompt"] == PROMPTS[0] for row in rows(made).values() for clip in row["clips"])
    assert PROMPTS[0] in (made / "suite.html").read_text()


def test_what_is_there_is_not_made_again_nor_mixed_with_others(again, counted, loads_nothing):
    file = Path("made") / "suite.json"
    before = content(Path("made"))
    again().fine()
    assert content(Path("made")) == before
    kept = file.read_bytes()
    assert "was measured with num_inference_steps" in again("--steps", "6").sentence()
    assert (file.read_bytes(), counted["count"]) == (kept, 0)


def test_a_changed_profile_makes_its_own_clips_anew(again, counted, model, tmp_path):
    other = shutil.copytree(model, tmp_path / "other" / "tiny")
    text = with_qualities(PROFILE).replace("skip, sparse", "skip, skip")
    (other / "chipsparse.yaml").write_text(text)
    before = content(Path("made"))["files"]
    again(suite=other).fine()
    assert counted["count"] == 2
    # The clips of both have names of their own, so that each stays beside its numbers.
    after = content(Path("made"))["files"]
    assert [name for name in before if before[name] != after[name]] == ["chipsparse fast"]


@pytest.mark.slow
def test_a_row_that_cannot_run_says_why_and_is_retried(model_folder, workdir, counted, monkeypatch):
    """With a profile that has no qualities, which is one row."""

    def fails(_):
        raise ValueError(f"no such block in {workdir}/model.py")

    cache, cost = rivals.CACHES["SeaCache slow"]
    with monkeypatch.context() as here:
        broken = dataclasses.replace(cache, make=fails), cost
        here.setitem(rivals.CACHES, "SeaCache slow", broken)
        here.setattr(rivals, "calibrated_ratios", lambda *_: 1 / 0)
        ran = command("compare", "--suite", model_folder, "--num", 1).fine()
    made = workdir / "suite-tiny"
    assert list(rows(made)) == ["dense", "floor", *CACHES, "chipsparse profile"]
    assert rows(made)["SeaCache slow"]["refused"] == "ValueError: no such block in model.py"
    for speed in ("slow", "fast"):
        assert rows(made)[f"MagCache {speed}"]["refused"] == "ZeroDivisionError: division by zero"
    for shown in (ran.stdout, (made / "suite.html").read_text()):
        assert "did not run: ValueError: no such block" in shown
        assert "3 of 6 rows did not run; the same command tries them again" in shown
    # What ran is kept, and what did not is made: three clips, and a calibration.
    before = counted["count"]
    command("compare", "--suite", model_folder, "--num", 1).fine()
    assert counted["count"] == before + 4
    assert all(len(row["clips"]) == 1 for row in content(made)["rows"])


@pytest.mark.parametrize("seconds", [1.2, 1.3])
def test_a_machine_that_was_not_quiet_is_noted(finished, seconds):
    kept = content(finished[0])
    for clip, took in zip(kept["rows"][0]["clips"], (1.0, seconds), strict=True):
        clip["seconds"] = took
    note = "the machine was not quiet: dense clips took 1.00 s to 1.30 s, so speeds mean little"
    alerts = [part.text for part in Comparison(**kept).sections()[0].parts if type(part) is Alert]
    assert alerts == ([note] if seconds == 1.3 else [])
