"""`batch --drafts`: drafts of several seeds, the choice of some, and what finishes them."""

import base64
import hashlib
import html
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from PIL import Image

from chipsparse.cli.batch import entries, job
from chipsparse.cli.batch.options import BatchOptions
from chipsparse.cli.batch.record import read_manifest
from chipsparse.cli.errors import UserError
from chipsparse.cli.media.read import read_clip
from chipsparse.cli.request import Request
from tests.cli.conftest import command, names, nothing_written
from tests.cli.html_reader import PageReader

QUALITIES = """
sparsity: {attention: {density: 0.5}}
qualities:
  faithful: {schedule: {listed: {full: [0, 1, 2]}}}
  balanced: {schedule: {listed: {full: [0, 1]}}}
  draft: {schedule: {listed: {full: [0]}}}
"""
SMALL = ("--height", "32", "--width", "48", "--frames", "1", "--steps", "4", "--format", "png")
GIVEN = (*SMALL, "--config", "mine.yaml", "--json")
BRIGHTEST = """
def brightness(frames, prompt):
    assert frames.dtype.name == "uint8" and frames.shape == (1, 4, 4, 3)
    return frames.mean()
def wrong(frames, prompt):
    return {} if "red" in prompt else float("nan")
"""


@pytest.fixture
def two_prompts(workdir):
    (workdir / "mine.yaml").write_text(QUALITIES)
    (workdir / "prompts.csv").write_text("prompt,seed,quality\na red circle,5,\na ball,,faithful\n")
    (workdir / "mine.py").write_text(BRIGHTEST)


@pytest.fixture
def made(two_prompts, monkeypatch):
    """Files are made in no time, seed 6 is the brightest; the names of all of them, in order."""
    files = []

    def make(maker, entry, folder):
        files.append(entry.name)
        if entry.prompt == "a failure":
            raise ValueError("no such token")
        entry.thumbnail(folder).parent.mkdir(parents=True, exist_ok=True)
        shade = 200 if entry.seed == 6 else 10 * entry.seed
        for file in (folder / entry.name, entry.thumbnail(folder)):
            Image.new("RGB", (4, 4), (shade, shade, shade)).save(file)
        return entry.clip("made", seconds=0.5)

    monkeypatch.setattr(entries.Maker, "make", make)
    monkeypatch.setattr(Request, "load", lambda _: None)
    return files


def not_cached(*_, **__):
    raise LocalEntryNotFoundError("no network")


def by_stage(result):
    """The clips that are drafts, and those that are finished."""
    clips = result["clips"]
    return [[clip for clip in clips if clip["stage"] == kind] for kind in ("draft", "finished")]


def test_drafts_are_made_and_shown_and_nothing_else(batch, workdir, made):
    result = batch(*GIVEN, "--drafts", "3").json()
    drafts, finished = by_stage(result)
    assert (len(drafts), finished, made) == (6, [], [clip["file"] for clip in drafts])
    seeds = [(clip["request"]["prompt"], clip["request"]["seed"]) for clip in drafts]
    assert seeds == [("a red circle", n) for n in (5, 6, 7)] + [("a ball", n) for n in range(3)]
    assert {clip["request"]["quality"] for clip in drafts} == {"draft"}
    known = read_manifest(workdir / "out")
    assert {clip.stage for clip in known.values()} == {"draft"}
    # Drafts are the files that a batch in that quality makes.
    (workdir / "plain.csv").write_text("prompt,seed,num\na red circle,5,3\n")
    plain = batch(*GIVEN, "--quality", "draft", file="plain.csv").json()
    assert [clip["file"] for clip in plain["clips"]] == made[:3]
    assert plain["counts"]["already there"] == 3
    assert batch(*GIVEN, "--drafts", "3").json()["counts"]["already there"] == 6


def test_the_page_has_a_checkbox_for_each_draft_and_the_command(batch, workdir, made):
    result = batch(*GIVEN, "--drafts", "2").json()
    keys = [clip["file"].removesuffix(".png") for clip in result["clips"]]
    source = (workdir / "out/index.html").read_text()
    page = PageReader(source)
    assert page.problems == []
    assert page.headings[1:] == ["Drafts", "a red circle", "a ball"]
    boxes = page.all("input", type="checkbox")
    assert [box["value"] for box in boxes] == keys
    assert all("hidden" in box for box in boxes)  # the script shows them
    for key in keys:
        assert key in page.sections["Drafts"]
    # What the page says without its script can be copied and typed.
    words = "".join(re.findall(r"<pre><code>(.*?)</code></pre>", source))
    line = html.unescape(re.sub(r"<[^>]*>", "", words))
    assert line.startswith("chipsparse batch prompts.csv --model ")
    line = line.replace("KEY,KEY", f"{keys[1]},{keys[2]}")
    finished = by_stage(command(*shlex.split(line)[1:], "--json").json())[1]
    assert [clip["draft"] for clip in finished] == [f"{keys[1]}.png", f"{keys[2]}.png"]
    page = PageReader((workdir / "out/index.html").read_text())
    links = [given["href"] for given in page.all("a")]
    order = [f"{keys[0]}.png", f"{keys[1]}.png", finished[0]["file"], f"#{keys[1]}.png"]
    order += [f"{keys[2]}.png", finished[1]["file"], f"#{keys[2]}.png", f"{keys[3]}.png"]
    assert links == order
    assert page.sections["Drafts"].count("finished\n") == 2


def test_only_the_script_of_the_page_may_run(batch, workdir, made):
    batch(*GIVEN, "--drafts", "1").fine()
    source = (workdir / "out/index.html").read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", source, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'\"" in source
    (workdir / "plain.csv").write_text("prompt\na\n")
    batch(*GIVEN, "-o", "plain", file="plain.csv").fine()
    plain = (workdir / "plain/index.html").read_text()
    assert "<script" not in plain
    assert "script-src" not in plain


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_runs_the_script(batch, workdir, made):
    batch(*GIVEN, "--drafts", "2").fine()
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    address = (workdir / "out/index.html").as_uri()
    ran = subprocess.run(
        [*words, address],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    page = PageReader(ran.stdout)
    assert "Choose drafts; this command then finishes them:" in page.texts
    assert not any("hidden" in given for tag, given in page.elements if tag in ("input", "button"))


def test_a_line_finishes_its_own_drafts_alone(batch, workdir, made):
    (workdir / "prompts.csv").write_text("prompt,seed,quality\na ball,7,faithful\na ball,0,\n")
    drafts, _ = by_stage(batch(*GIVEN, "--drafts", "1").json())
    key = next(Path(clip["file"]).stem for clip in drafts if clip["request"]["seed"] == 0)
    (finished,) = by_stage(batch(*GIVEN, "--finish", key).json())[1]
    assert (finished["lines"], finished["request"]["quality"]) == ([3], "balanced")


def test_keys_can_follow_the_command_whatever_the_file_is_called(workdir):
    options = BatchOptions(prompts=Path("-q.csv"), output=Path("out"))
    words = options.finish_words
    assert words[:3] == ["chipsparse", "batch", "./-q.csv"]
    assert "--" not in words


def test_chosen_drafts_are_finished_and_deleted_ones_stay_away(batch, workdir, made):
    drafts = by_stage(batch(*GIVEN, "--drafts", "3").json())[0]
    (workdir / "out" / drafts[0]["file"]).unlink()
    made.clear()
    key = drafts[5]["file"].removesuffix(".png")
    result = batch(*GIVEN, "--finish", f"{key},").json()
    (finished,) = by_stage(result)[1]
    asked = finished["request"]
    assert (asked["prompt"], asked["seed"], asked["quality"]) == ("a ball", 2, "faithful")
    assert finished["draft"] == drafts[5]["file"]
    assert made == [finished["file"]]
    assert [clip["file"] for clip in by_stage(result)[0]] == [clip["file"] for clip in drafts[1:]]
    known = read_manifest(workdir / "out")[finished["file"]]
    assert (known.stage, known.draft) == ("finished", drafts[5]["file"])
    # It stays on the page without its draft.
    (workdir / "out" / finished["draft"]).unlink()
    counts = batch(*GIVEN, "--finish", key).json()["counts"]
    assert counts == {"made": 0, "already there": 5, "failed": 0, "missing": 0}
    page = PageReader((workdir / "out/index.html").read_text())
    assert finished["file"] in [given["href"] for given in page.all("a")]
    # Both are there from now on, and drafts that are asked for are made again.
    counts = batch(*GIVEN, "--drafts", "3").json()["counts"]
    assert (counts["made"], counts["already there"]) == (2, 5)


def test_the_best_draft_of_each_prompt_is_finished_in_the_same_run(batch, workdir, made):
    given = (*GIVEN, "--drafts", "3", "--best", "mine.py:brightness")
    result = batch(*given).json()
    drafts, finished = by_stage(result)
    assert [(clip["request"]["seed"], clip["request"]["quality"]) for clip in finished] == [
        (6, "balanced"),
        (2, "faithful"),
    ]
    assert [clip["score"] for clip in drafts] == [50, 200, 70, 0, 10, 20]
    known = read_manifest(workdir / "out")
    assert [known[clip["file"]].score for clip in drafts] == [clip["score"] for clip in drafts]
    assert {known[clip["file"]].scored_by for clip in drafts} == {"mine.py:brightness"}
    assert len(made) == 8
    page = PageReader((workdir / "out/index.html").read_text())
    assert "seed 6, 0.50 s, mine.py:brightness 200" in page.texts
    before = (workdir / "out/manifest.jsonl").read_bytes()
    assert batch(*given).json()["counts"]["already there"] == 8
    assert (workdir / "out/manifest.jsonl").read_bytes() == before
    # More drafts change the choice, and files that were finished stay.
    again = batch(*GIVEN, "--drafts", "7", "--best", "mine.py:brightness").json()
    assert [clip["request"]["seed"] for clip in by_stage(again)[1]] == [6, 2, 6]


def test_fixed_scores_are_not_computed_again(batch, made, monkeypatch):
    given = (*GIVEN, "--drafts", "2", "--best", "sharpness")
    batch(*given).fine()
    monkeypatch.setattr(job, "read_clip", lambda _: pytest.fail("read"))
    assert batch(*given).json()["counts"]["already there"] == 6


def test_failed_drafts_are_told_and_the_others_finished(batch, workdir, made):
    (workdir / "prompts.csv").write_text("prompt\na failure\na ball\n")
    ran = batch(*GIVEN, "--drafts", "2", "--best", "mine.py:brightness")
    result = json.loads(ran.stdout)
    assert (ran.exit_code, result["counts"]["failed"], result["counts"]["made"]) == (1, 2, 3)
    (finished,) = by_stage(result)[1]
    assert (finished["request"]["prompt"], finished["request"]["seed"]) == ("a ball", 1)


def test_two_qualities_of_a_prompt_share_its_drafts(batch, workdir, made):
    rows = "prompt,quality\na ball,balanced\na ball,faithful\n"
    (workdir / "prompts.csv").write_text(rows)
    result = batch(*GIVEN, "--drafts", "2", "--best", "mine.py:brightness").json()
    drafts, finished = by_stage(result)
    assert [clip["lines"] for clip in drafts] == [[2, 3], [2, 3]]
    assert [clip["request"]["quality"] for clip in finished] == ["balanced", "faithful"]
    assert {clip["draft"] for clip in finished} == {drafts[1]["file"]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--best clip", "--best clip chooses among drafts; add --drafts N"),
        ("--drafts 2 --best clip --finish a", "--best and --finish exclude each other: both choos"),
        ("--drafts 2 --num 2", "--num makes finished files of all seeds; --drafts N finishes only"),
        ("--drafts 2 --quality draft", "--quality draft is that of the drafts; name another to f"),
        ("--drafts 0", "--drafts 0 must be greater than or equal to 1"),
        ("--finish ,", "--finish is empty; name drafts by the keys that index.html shows"),
        (
            "--finish abc",
            "--finish abc: out has no such draft of these prompts and settings; index",
        ),
        ("--drafts 2 --best nice", "--best nice is no score; use clip, sharpness, FILE.py:FUNCTIO"),
        ("--drafts 2 --best clip:", "--best clip: names no model; write clip:OWNER/NAME or a fold"),
        ("--drafts 2 --best no.py:f", "--best no.py:f: there is no file no.py"),
        ("--drafts 2 --best mine.py:", "--best mine.py: is no score; use clip, sharpness, FILE.p"),
        ("--drafts 2 --best mine.py:f", "--best mine.py:f: mine.py has no function f"),
        ("--drafts 2 --best no.such:f", "--best no.such:f could not be imported: No module named"),
        ("--drafts 2 --best clip:nothing", "--best clip:nothing: there is no folder nothing, nor "),
        ("--drafts 2 --best clip:empty", "--best clip: the model empty could not be loaded: "),
        (
            "--drafts 2 --best clip",
            "openai/clip-vit-base-patch32 is neither a folder here nor a mo",
        ),
    ],
)
def test_mistakes_are_told_before_loading(batch, workdir, made, monkeypatch, words, said):
    monkeypatch.setattr("chipsparse.pipelines.model_files.hub_answers", lambda: False)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", not_cached)
    (workdir / "empty").mkdir()
    with nothing_written(workdir):
        assert batch(*GIVEN, *words.split()).sentence().startswith(said)
    assert made == []


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("a,draft,", "line 2: its quality is that of the drafts; name another to finish in"),
        ("a,,2", "line 2: num makes finished files of all seeds; --drafts N finishes only"),
    ],
)
def test_lines_that_have_no_drafts_are_named(batch, workdir, made, row, said):
    (workdir / "prompts.csv").write_text(f"prompt,quality,num\n{row}\nb,,\n")
    assert said in batch(*GIVEN, "--drafts", "2").sentence()
    assert made == []


@pytest.mark.parametrize("prompt", ["a red circle", "a ball"])
def test_a_function_that_gives_no_number(batch, workdir, made, prompt):
    (workdir / "prompts.csv").write_text(f"prompt\n{prompt}\n")
    ran = batch(*GIVEN, "--drafts", "2", "--best", "mine.py:wrong")
    assert (ran.exit_code, len(made)) == (2, 2)
    said = "mine.py:wrong failed for out/" if "red" in prompt else "wrong gave nan for out/"
    assert said in ran.stderr
    assert names("out", "index.html")


def test_a_finished_file_is_what_the_command_makes_of_the_draft(batch, workdir, two_prompts):
    """With the real pipeline, and once more with `generate --from`."""
    (workdir / "prompts.csv").write_text("prompt,seed\na red circle,5\n")
    drafts, finished = by_stage(batch(*GIVEN, "--drafts", "1", "--best", "sharpness").json())
    (draft,) = drafts
    (finished,) = finished
    assert draft["request"]["seed"] == finished["request"]["seed"] == 5
    words = ("--from", f"out/{draft['file']}", "--quality", "balanced", "-o", "again.png")
    command("generate", *words).fine()
    again = read_clip(workdir / "again.png").frames
    assert np.array_equal(again, read_clip(workdir / "out" / finished["file"]).frames)
    assert not np.array_equal(again, read_clip(workdir / "out" / draft["file"]).frames)
    plain = batch(*GIVEN, "--quality", "balanced").json()
    assert [clip["state"] for clip in plain["clips"]] == ["already there"]


@pytest.mark.slow
def test_actors_make_drafts_and_what_finishes_them(batch, workdir, two_prompts):
    pytest.importorskip("ray")
    given = (*GIVEN, "--drafts", "2", "--best", "sharpness")
    one = batch(*given, "-o", "one").json()
    two = batch(*given, "-o", "two", "--gpus", "2").json()
    assert len(one["clips"]) == 6
    assert [clip["file"] for clip in one["clips"]] == [clip["file"] for clip in two["clips"]]
    assert [clip["score"] for clip in one["clips"]] == [clip["score"] for clip in two["clips"]]
    for clip in one["clips"]:
        files = [workdir / folder / clip["file"] for folder in ("one", "two")]
        assert np.array_equal(*(read_clip(file).frames for file in files))


def test_unknown_keys_are_refused_with_those_that_are_known(batch, made):
    (draft, *_), _ = by_stage(batch(*GIVEN, "--drafts", "1").json())
    said = batch(*GIVEN, "--finish", f"{draft['file']},abc,def").sentence()
    assert said.startswith("--finish abc, def: out has no such draft")
    with pytest.raises(UserError, match=r"no such draft"):
        entries.Jobs([], []).chosen(["abc"], "out")
