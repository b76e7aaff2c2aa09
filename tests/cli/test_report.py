"""`chipsparse generate --report` and `--strict`: what they write, refuse, and leave behind."""

import json
import os

import pytest
import torch

import chipsparse
from chipsparse.cli.media import report_file
from chipsparse.cli.media import write as media
from chipsparse.common import finished_files
from chipsparse.experiments import clips as denoise
from tests.cli.conftest import names

DENSE_MLP = "MLP runs dense in 1 of 3 layers (first: layer 1): its second linear is of class Other"


@pytest.fixture
def adapted(monkeypatch):
    """Loads pipelines in which one MLP cannot run sparse."""
    from chipsparse.cli.generate import job

    class Other(torch.nn.Linear):
        pass

    load = job.load_pipeline

    def spoiled(*arguments, **options):
        pipe = load(*arguments, **options)
        pipe.transformer.blocks[1].ffn.net[2].__class__ = Other
        return pipe

    monkeypatch.setattr(job, "load_pipeline", spoiled)


def test_report(generate, workdir):
    small = ("--frames", "1", "--seed", "5", "--json")
    printed = generate("-o", "out.png", *small, "--report", "r.json").json()
    assert names(workdir) == ["out.png", "r.json"]
    data = json.loads((workdir / "r.json").read_text())
    assert printed["files"] == {"output": ["out.png"], "report": ["r.json"]}
    assert data["request"]["seed"] == 5
    assert data["request"]["settings"]["num_inference_steps"] == 4
    assert data["pipeline"]["class"] == "WanPipeline"
    assert data["pipeline"]["location"] == data["request"]["model"]
    assert (data["error"], data["fallbacks"], data["notes"]) == (None, [], [])
    assert (data["files"], data["comparison"]) == ({"output": ["out.png"]}, None)
    assert data["denoising_seconds"] == {"sparse": printed["sparse"]["denoising_seconds"]}
    assert data["totals"]["steps"] == {"dense": 1, "refresh": 1, "sparse": 2}
    assert data["totals"]["attention_kept"] == printed["sparse"]["steps"][3]["attention_kept"]
    assert len(data["steps"]) == 8  # guidance
    for step in data["steps"]:
        assert len(step["layers"]) == 6
        assert all(entry["seconds"] > 0 for entry in step["layers"])
    (workdir / "reference").touch()
    assert os.stat("r.json").st_mode == os.stat("reference").st_mode
    assert chipsparse.SparsityConfig.from_mapping(data["config"]).schedule.warmup_steps == 2


def test_a_folder_whose_name_is_no_utf_8(generate, workdir):
    folder = os.fsdecode(b"d\xff")
    (workdir / folder).mkdir()
    given = ("-o", f"{folder}/c.png", "--frames", "1", "--report", f"{folder}/r.json", "--json")
    printed = generate(*given).json()
    assert names(folder) == ["c.png", "r.json"]
    assert printed["files"]["output"] == ["d\ufffd/c.png"]
    assert json.loads((workdir / folder / "r.json").read_text())["files"] == {
        "output": ["d\ufffd/c.png"]
    }


def test_a_report_of_both_runs_says_how_far_they_are_apart(generate, workdir):
    printed = generate("-o", "out.gif", "--compare", "--report", "r.json", "--json").json()
    data = json.loads((workdir / "r.json").read_text())
    assert data["comparison"] == printed["comparison"]
    assert data["comparison"]["speedup"] > 0
    expected = {name: printed[name]["denoising_seconds"] for name in ("dense", "sparse")}
    assert data["denoising_seconds"] == expected
    assert data["files"] == {
        kind: files for kind, files in printed["files"].items() if kind != "report"
    }
    assert set(data["files"]) == {"output", "dense", "compare"}


def test_the_table_names_the_report_and_notes(generate, monkeypatch):
    from chipsparse.report.generation import GenerationReport

    begin = GenerationReport.begin

    def noting(self, *arguments):
        begin(self, *arguments)
        self.note("a note")

    monkeypatch.setattr(GenerationReport, "begin", noting)
    ran = generate("-o", "out.gif", "--report", "r.json")
    lines = [line.split() for line in ran.stdout.splitlines()]
    assert ["report", "r.json"] in lines
    assert ["note", "a", "note"] in lines


def test_without_a_report_no_layer_is_timed(generate, monkeypatch):
    enabled = []
    real = chipsparse.enable

    def enable(*arguments, **options):
        enabled.append(options)
        return real(*arguments, **options)

    monkeypatch.setattr(chipsparse, "enable", enable)
    generate("-o", "out.gif").fine()
    generate("-o", "out.gif", "--strict", "--report", "r.json").fine()
    assert enabled == [
        {"strict": False, "layer_times": False, "parallel": None},
        {"strict": True, "layer_times": True, "parallel": None},
    ]


def test_a_strict_run_fails_with_the_sentence_of_the_fallback(generate, workdir, adapted):
    said = generate("-o", "out.gif", "--strict").sentence()
    assert said == f"{DENSE_MLP} (an adapter, or quantized)"
    assert names(workdir) == []
    assert "fallback" in generate("-o", "out.gif").fine().stdout


def test_the_report_of_a_run_that_fails_says_how_far_it_came(generate, workdir, adapted):
    ran = generate("-o", "out.gif", "--strict", "--report", "r.json")
    assert ran.exit_code == 2
    assert names(workdir) == ["r.json"]
    data = json.loads((workdir / "r.json").read_text())
    assert data["error"].startswith(f"FallbackError: {DENSE_MLP}")
    (step,) = data["steps"]
    assert (step["step"], step["finished"], step["seconds"]) == (0, False, None)


def test_an_error_after_the_loop_is_reported_too(generate, workdir, monkeypatch):
    def breaks(*_):
        raise ZeroDivisionError("in the decoder")

    monkeypatch.setattr(denoise, "_as_frames", breaks)
    ran = generate("-o", "out.gif", "--report", "r.json")
    assert ran.exit_code == 1
    data = json.loads((workdir / "r.json").read_text())
    assert data["error"] == "ZeroDivisionError: in the decoder"
    assert all(step["finished"] for step in data["steps"])


def test_a_report_that_cannot_be_written_leaves_everything_as_it_was_and_keeps_the_clip(
    generate, workdir, temporary, monkeypatch
):
    (workdir / "r.json").write_text("old")
    (workdir / "out.gif").write_text("old")

    def full(path, _):
        path.write_text('{"half')
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report_file, "write_checked", full)
    said = generate("-o", "out.gif", "--report", "r.json").sentence()
    monkeypatch.undo()
    (kept,) = temporary.iterdir()
    assert said == (
        "--report r.json could not be written: No space left on device; all is kept as PNG in "
        f"{kept}"
    )
    assert names(kept) == [f"out-{frame:03}.png" for frame in range(5)]
    assert names(workdir) == ["out.gif", "r.json"]
    assert {path.read_text() for path in workdir.iterdir()} == {"old"}


def test_a_video_that_cannot_be_written_leaves_no_report(generate, workdir, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(media.WRITERS, ".gif", full)
    said = generate("-o", "out.gif", "--report", "r.json").sentence()
    assert said.startswith("out.gif could not be written")
    assert names(workdir) == []


def test_a_report_that_fails_too_does_not_hide_the_error(generate, workdir, adapted, monkeypatch):
    monkeypatch.setattr(
        finished_files.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no"))
    )
    assert DENSE_MLP in generate("-o", "out.gif", "--strict", "--report", "r.json").sentence()
    assert names(workdir) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--report", "r.txt"), "--report r.txt must end in .json"),
        (("--report", "no/r.json"), "the folder no of --report no/r.json does not exist"),
        (("--report", "r.json", "--dense"), "--report is about the sparse run, which --dense"),
        (("--strict", "--dense"), "--strict is about the sparse run, which --dense leaves out"),
    ],
)
def test_mistakes(generate, workdir, loads_nothing, arguments, sentence):
    assert generate("-o", "out.gif", *arguments).sentence().startswith(sentence)
    assert names(workdir) == []


@pytest.mark.parametrize(
    ("files", "name"),
    [
        (["out.mp4"], "out.mp4"),
        (["a/out-000.png", "a/out-001.png"], "a/out.png"),
        ("out.png", "out.png"),  # as reports once had it
    ],
)
def test_the_page_finds_the_clip_of_a_list_of_files(workdir, files, name):
    from chipsparse.cli.pages.generation_record import Generation

    found = Generation.model_validate({"files": {"output": files, "dense": []}})
    assert found.clips.names == {"sparse": name}
