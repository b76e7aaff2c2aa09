"""The command: what it makes, what it leaves alone, and what it says of what cannot be made."""

import json
import os
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from chipsparse.cli.batch import entries
from chipsparse.cli.batch.record import BatchClip, note, read_manifest
from chipsparse.cli.errors import UserError
from chipsparse.cli.generate.job import KeptPipeline
from chipsparse.cli.generate.record import RequestRecord
from chipsparse.cli.media.read import read_clip
from chipsparse.cli.request import Request
from tests.cli.conftest import names
from tests.cli.html_reader import PageReader

SMALL = ("--frames", "1", "--steps", "3")
GIF = (*SMALL, "--format", "gif", "--json")


@pytest.fixture
def loads(monkeypatch):
    """How often a pipeline is loaded, and how often it is patched for other settings."""
    load = Mock(side_effect=Request.load)
    patch = Mock(side_effect=KeptPipeline._patch)
    monkeypatch.setattr(Request, "load", lambda request: load(request))
    monkeypatch.setattr(KeptPipeline, "_patch", lambda kept: patch(kept))
    return lambda: (load.call_count, patch.call_count)


def states(result):
    return [clip["state"] for clip in result["clips"]]


def test_what_a_batch_makes_and_that_it_makes_it_once(batch, workdir, generate, loads, monkeypatch):
    rows = "prompt,seed,steps\na red circle,7,\na blue square,,2\na red circle,7,\n"
    (workdir / "prompts.csv").write_text(rows)
    result = batch(*GIF).json()
    assert result["counts"] == {"made": 2, "already there": 0, "failed": 0, "missing": 0}
    assert loads() == (1, 2)
    circle, square = result["clips"]
    assert (circle["lines"], circle["request"]["seed"]) == ([2, 4], 7)
    assert (square["lines"], square["request"]["seed"]) == ([3], 0)
    assert names("out", "*.gif") == sorted([circle["file"], square["file"]])
    assert names("out/thumbnails") == [Path(name).stem + ".jpg" for name in names("out", "*.gif")]
    # Each is what `generate` makes, and the manifest has the words for it.
    known = read_manifest(workdir / "out")
    assert set(known) == {circle["file"], square["file"]}
    clip = known[circle["file"]]
    steps = clip.request.settings.num_inference_steps
    assert (clip.state, clip.tries, steps) == ("made", 1, 3)
    command = [*clip.request.command[2:]]
    command[command.index("--output") + 1] = "alone.gif"
    generate(*command, prompt=None, model=None).fine()
    made = read_clip(workdir / "out" / circle["file"]).frames
    assert np.array_equal(made, read_clip(workdir / "alone.gif").frames)
    # Nothing is made again.
    monkeypatch.setattr(Request, "load", lambda _: pytest.fail("loaded"))
    before = (workdir / "out/manifest.jsonl").read_bytes()
    again = batch(*GIF).json()
    assert states(again) == ["already there"] * 2
    for one, other in zip(again["clips"], result["clips"], strict=True):
        assert {**one, "state": "made"} == other
    assert (workdir / "out/manifest.jsonl").read_bytes() == before


def test_only_what_is_missing_is_made_also_where_a_folder_is_no_utf_8(batch, workdir):
    (workdir / "prompts.csv").write_text("Prompt;Note\na red circle;1\na blue square;2\n")
    folder = os.fsdecode(b"d\xff")
    words = (*GIF, "-o", folder)
    ran = batch(*words)
    assert ran.stderr.count("warning: prompts.csv: no setting, and ignored: note\n") == 1
    first = ran.json()
    assert first["folder"] == "d\ufffd"
    gone = workdir / folder / first["clips"][0]["file"]
    content = gone.read_bytes()
    gone.unlink()
    (workdir / folder / "manifest.jsonl").unlink()  # it is made of what is there
    assert states(batch(*words).json()) == ["made", "already there"]
    assert gone.read_bytes() == content
    assert {*read_manifest(workdir / folder)} == {clip["file"] for clip in first["clips"]}
    assert states(batch(*words, "--seed", "1").json()) == ["made", "made"]
    assert len(names(folder, "*.gif")) == 4
    assert (workdir / folder / "index.html").read_text("utf-8")


def test_the_page(batch, workdir):
    text = "a <b>red</b> circle & more"
    (workdir / "p.jsonl").write_text(json.dumps({"prompt": text, "num": 2}) + "\n")
    ran = batch(*SMALL, file="p.jsonl").fine()
    assert "2 made of 2, in " in ran.stdout
    page = (workdir / "out/index.html").read_text()
    read = PageReader(page)
    assert read.problems == []
    assert "2 of 2 files" in read.headings
    assert read.texts.count(text) == 2
    assert "48x32 pixels, 1 frame, 3 steps, guidance 3, sparse" in read.texts
    shown = [given for tag, given in read.elements if tag == "img"]
    assert [given["alt"] for given in shown] == [text] * 2
    for given in shown:
        with Image.open(workdir / "out" / given["src"]) as image:
            assert (image.format, image.size) == ("JPEG", (48, 32))
    links = [given["href"] for tag, given in read.elements if tag == "a"]
    assert sorted(links) == names("out", "*.mp4")
    assert str(workdir) not in page
    (policy,) = [given["content"] for tag, given in read.elements if "http-equiv" in given]
    assert "img-src 'self' file:;" in policy


@pytest.mark.parametrize("change", ["profile", "weights", "lora", "flow shift"])
def test_all_that_decides_is_in_the_name(batch, broken_model, workdir, monkeypatch, change):
    """The profile; a byte of the first tensor, as where a LoRA was fused; a LoRA."""
    monkeypatch.setattr(Request, "load", lambda _: None)
    monkeypatch.setattr(entries.Maker, "make", lambda _, entry, __: entry.clip("made", seconds=1.0))
    (workdir / "prompts.csv").write_text("prompt\na\n")
    lora = workdir / "lora.safetensors"
    save_file({f"{name}.lora_A.weight": np.zeros(200_000, np.uint8) for name in "ab"}, lora)
    (workdir / "out").mkdir()

    def file(*also):
        (clip,) = batch(*GIF, "--lora", lora, *also, model=broken_model).json()["clips"]
        return clip["file"]

    before = file()
    also = ()
    assert file() == before
    if change == "profile":
        profile = broken_model / "chipsparse.yaml"
        profile.write_text(profile.read_text().replace("refresh_every: 10", "refresh_every: 9"))
    elif change == "flow shift":
        also = ("--flow-shift", "6")
        assert file("--flow-shift", "6.0") == file(*also)
    else:
        path = lora
        if change == "weights":
            (path,) = (broken_model / "transformer").glob("*.safetensors")
        content = bytearray(path.read_bytes())
        content[8 + int.from_bytes(content[:8], "little")] ^= 1
        path.write_bytes(content)
    assert file(*also) != before


@pytest.mark.parametrize(
    ("content", "sentences"),
    [
        (
            "prompt,seed,steps,crf\na,,,\nb,x,,\nc,,0,\nd,,,99\n",
            ["3 of 4 prompts of prompts.csv", "line 3: --seed x must be a valid integer",
             "line 4: --steps 0 must be greater than", "line 5: --crf 99 is out"],
        ),
        (f"prompt,seed\na,\nb,{2**64 - 1}\n", []),
        (f"prompt,seed,num\na,,\nb,{2**64 - 1},2\n", ["2 seeds from there go beyond 2^64 - 1"]),
        ("prompt,frames\na,\nb,6\n", ["line 3: --frames 6 does not fit"]),  # of the model
    ],
)  # fmt: skip
def test_bad_lines_are_named_before_loading(batch, workdir, monkeypatch, content, sentences):
    monkeypatch.setattr(Request, "load", lambda _: (_ for _ in ()).throw(UserError("loads")))
    (workdir / "prompts.csv").write_text(content)
    error = batch().sentence()
    assert (error == "loads") == (not sentences)
    for sentence in sentences:
        assert sentence in f"error: {error}"
    assert names(workdir) == ["prompts.csv"]


def test_after_an_interruption_and_a_failure_it_goes_on(batch, workdir, breaks_at, loads):
    (workdir / "prompts.csv").write_text("prompt\na red circle\n")
    given = (*SMALL, "--num", "3")
    breaks_at(1, KeyboardInterrupt())
    ran = batch(*given)
    assert ran.exit_code == 130
    kept = "what was finished is in the folder; the same command goes on"
    assert ran.stderr.splitlines()[-1] == f"chipsparse: interrupted, {kept}"
    assert len(names("out", "*.mp4")) == 1
    page = PageReader((workdir / "out/index.html").read_text())
    assert "1 of 3 files" in page.headings
    assert page.sections["Not made"].count("not yet come to") == 2
    breaks_at(1, ValueError("no such token"))
    ran = batch(*given)
    assert ran.exit_code == 1
    assert loads()[0] == 2
    assert "1 made, 1 already there, 1 failed of 3" in ran.stdout
    sentence = "ValueError: no such token"
    assert f"chipsparse: error: line 2, seed 1: {sentence} (1 of 2, " in ran.stderr
    clips = read_manifest(workdir / "out").values()
    (failed,) = [clip for clip in clips if clip.state == "failed"]
    assert (failed.error, failed.tries, failed.request.seed) == (sentence, 1, 1)
    page = PageReader((workdir / "out/index.html").read_text())
    assert sentence in page.sections["Not made"]
    breaks_at(None, None)  # another run tries it again
    assert "1 made, 2 already there of 3" in batch(*given).stdout
    assert "Not made" not in PageReader((workdir / "out/index.html").read_text()).sections


@pytest.mark.parametrize(
    ("error", "times", "state", "tries"),
    [
        (RuntimeError("CUDA error"), 1, "made", 2),
        (RuntimeError("CUDA error"), 2, "failed", 2),
        (UserError("no such token"), 1, "failed", 1),
    ],
)
def test_what_may_come_from_the_state_of_the_pipeline_is_tried_again(
    batch,
    workdir,
    monkeypatch,
    loads,
    error,
    times,
    state,
    tries,
):
    (workdir / "prompts.csv").write_text("prompt\na red circle\n")
    before = Mock(side_effect=[*[error] * times, []])  # before there is a folder
    monkeypatch.setattr(entries, "prompt_warnings", before)
    ran = batch(*GIF)
    (clip,) = json.loads(ran.stdout)["clips"]
    assert (clip["state"], clip["tries"], loads()[0]) == (state, tries, tries)
    assert ("(tried 2 times)" in ran.stderr) == (state == "failed" and tries == 2)


def test_images_also_from_an_image(batch, flux_folder, workdir, loads):
    Image.new("RGB", (48, 32)).save(workdir / "a.png")
    (workdir / "prompts.csv").write_text("prompt,image\na,\nb,a.png\n")
    result = batch("--steps", "2", "--json", model=flux_folder).json()
    assert (states(result), loads()[0]) == (["made", "made"], 2)  # two kinds of pipelines
    for clip in result["clips"]:
        assert clip["file"].endswith(".png")
        with Image.open(workdir / "out" / clip["file"]) as image:
            assert image.size == (48, 32)


def test_the_last_line_about_a_file_counts_and_a_broken_one_loses_no_other(tmp_path):
    def clip(name, state):
        request = RequestRecord(prompt="ein Würfel\n\u2028", command=[os.fsdecode(b"d\xff")])
        return BatchClip(file=name, state=state, lines=[1], request=request)

    assert read_manifest(tmp_path) == {}
    note(tmp_path, clip("a.mp4", "failed"))
    note(tmp_path, clip("a.mp4", "made"))
    with (tmp_path / "manifest.jsonl").open("a") as file:
        file.write('{"file": "b.mp4", "sta')
    note(tmp_path, clip("c.mp4", "made"))
    known = read_manifest(tmp_path)
    assert [(name, known[name].state) for name in known] == [("a.mp4", "made"), ("c.mp4", "made")]
    request = known["c.mp4"].request
    assert (request.prompt, request.command) == ("ein Würfel\n\u2028", ["d\ufffd"])
    (tmp_path / "manifest.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"manifest\.jsonl could not be read"):
        read_manifest(tmp_path)
