"""Results as pages and on a terminal, and the files that they are read from."""

import copy
import importlib.util
import io
import json
import os
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from chipsparse.cli.errors import UserError
from chipsparse.cli.generate.record import GenerationResult, SeriesResult
from chipsparse.cli.views import frames
from chipsparse.cli.views.names import command_text, name_of
from chipsparse.cli.views.page import best_points, overview_section, page
from chipsparse.cli.views.report import read_result, write_report
from chipsparse.cli.views.sections import QualityPoint, Result, Section, Table
from chipsparse.cli.views.terminal import print_result, print_sections
from chipsparse.cli.views.units import TIMES, bytes_unit, percent, seconds_text, seconds_unit
from chipsparse.profiles.profile import ASSETS
from tests.cli.html_reader import PageReader

HOSTILE = "<script>alert(\"1\")</script> & 'x' </h1><img src=http://example.org/a.png>"
ACTIONS = ("dense", "refresh", "sparse", "skip")
LATER = (2e9, 2e9 + frames.SAME_RUN_SECONDS)
pytestmark = pytest.mark.usefixtures("workdir")  # an empty folder for each test


def call(step, branch, action, **more):
    own = {"action": action, "kept": 0.25 if action == "sparse" else 1}
    layers = [{"layer": n, "part": p, **own} for n in range(3) for p in ("attention", "mlp")]
    return {
        "generation": 1,
        "step": step,
        "steps_total": len(ACTIONS),
        "branch": branch,
        "action": action,
        "finished": True,
        "cache_bytes": 3 << 20,
        "host_bytes": 1 << 20,
        "seconds": None if action == "skip" else 0.5 + step,
        "bytes_to_device": 1 << 20 if action == "sparse" else 0,
        "layers": [] if action == "skip" else layers,
        **more,
    }


def run(seconds, actions):
    steps = [{"step": n, "action": action, "seconds": 1.0} for n, action in enumerate(actions)]
    shape = {"height": 32, "width": 48, "frames": 5}
    return {"steps": steps, "denoising_seconds": seconds, "total_seconds": seconds + 1, **shape}


BROKEN_OFF = [call(0, "a", "dense"), call(1, "a", "refresh", finished=False)]
CONTENT = {
    "kind": "generation",
    "request": {
        "mode": "compare",
        "prompt": "a red circle",
        "seed": 7,
        "device": "cpu",
        "settings": {"width": 48, "height": 32, "num_frames": 5, "num_inference_steps": 4},
        "dtype": "float32",
        "quality": "fast",
        "profile": "/home/alice/fast.yaml",
        "model": "/home/alice/models/my-wan",
        "loras": [{"file": "/home/alice/style.safetensors", "scale": 0.5}],
        "warnings": ["the prompt is short"],
        "command": ["chipsparse", "generate", "--model", "/home/alice/m", "--", "a/b"],
    },
    "files": {"output": ["o.gif"], "dense": ["o-dense.gif"]},
    "sparse": {**run(4.0, ACTIONS), "work_share": 0.5, "fallbacks": ["one layer is dense"]},
    "dense": run(8.0, ["dense"] * 4),
    "comparison": {"speedup": 2.0, "psnr_db": 31.25, "ssim": 0.95},
    "report": {
        "kind": "report",
        "dtype": "float32",
        "cache_bytes": 3 << 20,
        "host_bytes": 1 << 20,
        "versions": {"chipsparse": "0.1", "triton": None},
        "device": {"type": "cpu", "name": "a CPU"},
        "transformers": {"transformer": {"schedule": "2 of 4 steps in full"}},
        "steps": [call(n, b, a) for n, a in enumerate(ACTIONS) for b in ("cond", "uncond")],
        "reasons": [
            {
                "code": "of.a",
                "level": "fallback",
                "sentence": "no cache in /home/alice/x: see /var/log/log.txt",
            },
            {"code": "of.b", "level": "note", "sentence": "8/16 stay"},
        ],
        "backends": {"column_sums": "reference"},
        "passed_over": {"column_sums": {"triton": "no GPU"}},
    },
}


def content(**changes):
    """Return the file of a generation, with values at dotted paths changed."""
    changed = copy.deepcopy(CONTENT)
    for path, value in changes.items():
        target = changed
        *groups, name = path.split("__")
        for group in groups:
            target = target[group]
        target[name] = value
    return changed


def shown(*contents, **options):
    """Return the page of such files in the current folder."""
    files = []
    for number, item in enumerate(contents):
        file = Path(f"r{number}.json")
        file.write_text(json.dumps(item))
        files.append((file, read_result(file)))
    reader = PageReader(page(files, **options))
    assert reader.problems == []
    assert reader.external() == []
    return reader


def text_of(sections, width=200):
    console = Console(file=io.StringIO(), width=width)
    print_sections(console, sections)
    return console.file.getvalue()


def write_clip(name, seed=0, frames=5, size=(32, 48)):
    pixels = np.random.default_rng(seed).integers(0, 255, (frames, *size, 3), np.uint8)
    first, *others = map(Image.fromarray, pixels)
    first.save(name, save_all=True, append_images=others)


def test_the_page_of_a_generation():
    write_clip("o.gif")
    write_clip("o-dense.gif", seed=1)
    reader = shown(CONTENT)
    head = reader.sections["a red circle"]
    for text in (f"2.00{TIMES}", "31.25 dB", "SSIM 0.9500", "4.00 s", "dense 8.00 s", "3.0 MiB"):
        assert text in head
    assert "Warning: the prompt is short" in head
    assert "1 dense, 1 refresh, 1 sparse, 1 skip" in head
    assert "style.safetensors at 0.5" in head
    steps = reader.sections["Steps"]
    assert "step 2, sparse: 5.00 s" in steps
    assert "mean step of the dense run, 2.00 s" in steps
    assert "2\nsparse\n5.00 s\n25.0%\n25.0%\n2.0 MiB\n0 B\n" in steps
    budgets = reader.sections["Budget of each layer and step"]
    assert budgets.count("layers 0 to 2, step 1: refresh\n") == 4  # two parts, two widths
    assert "layers 0 to 2, step 2: sparse, 25.0% computed" in budgets
    memory = reader.sections["Memory over steps"]
    assert "caches in host memory" in memory
    assert "allocated on the GPU behind" not in memory
    assert "triton: no GPU" in reader.sections["What ran where"]
    assert len(reader.all("img")) == 3 * 5  # dense, sparse and where they differ
    assert "Not on this page" not in reader.headings
    for figure in reader.all("div", role="img"):
        assert figure["aria-label"]


def test_a_page_without_the_library_that_draws_charts(monkeypatch):
    with_charts = shown(CONTENT)
    find_spec = importlib.util.find_spec

    def without_charts(name, *others):
        return None if name == "matplotlib" else find_spec(name, *others)

    monkeypatch.setattr("importlib.util.find_spec", without_charts)
    reader = shown(CONTENT)
    assert reader.headings == with_charts.headings
    assert not reader.all("div", role="img")
    missing = "Not drawn: charts need matplotlib"
    assert missing in reader.sections["Steps"]
    assert "2\nsparse\n5.00 s\n25.0%\n" in reader.sections["Steps"]  # its table stays
    assert missing not in with_charts.source


def test_a_page_names_no_folder_and_runs_nothing():
    reader = shown(content(request__prompt=HOSTILE))
    assert HOSTILE in reader.headings
    assert "alice" not in reader.source
    assert "/var/log" not in reader.source
    ran = reader.sections["What ran where"]
    assert "see log.txt" in ran
    assert "8/16 stay" in ran
    again = reader.sections["Run it again"]
    assert "chipsparse generate --model m -- a/b" in again
    reader = shown(content(request__prompt="a\x00b\ud800c"))  # which HTML cannot write
    assert "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}c" in reader.headings


def test_what_is_missing_is_said_with_the_way_to_get_it():
    bare = content(comparison=None, dense=None, files={}, report__steps=[], report__backends={})
    left = shown(bare).sections["Not on this page"]
    for text in ("generate --compare --report", "--media", "to the end of no transformer call"):
        assert text in left
    assert left.count("Nothing was sparse, or the generation broke off") == 2


def test_alerts():
    for changes, text in (
        ({"report__error": "OSError: x"}, "failed after 4 of 4 steps: OSError: x"),
        ({"report__steps": BROKEN_OFF}, "not finished: 1 of 4 steps were"),
        ({"report__nothing_sparse": "nothing is sparse here"}, "Warning: nothing is sparse here"),
    ):
        assert text in shown(content(**changes)).sections["a red circle"]


def test_steps_of_sections_follow_each_other_in_a_report_from_python():
    sections = [call(n, "a", a, generation=g) for g in (1, 2) for n, a in enumerate(ACTIONS)]
    sections[-1] |= {"forecast": True, "corrected": True}
    reader = shown({**CONTENT["report"], "steps": sections})
    assert "A generation" in reader.headings
    assert "step 1 of section 2, refresh" in reader.sections["Steps"]
    assert reader.sections["Steps"].count("skipped, forecast") == 1
    assert "skipped, forecast, corrected" in reader.sections["Steps"]


def test_several_files_make_one_page_with_all_points():
    other = content(request__prompt="another", comparison__speedup=3.0, comparison__psnr_db=20.0)
    reader = shown(CONTENT, other, CONTENT["report"])
    overview = reader.sections["All files"]
    assert f"1: r0, a red circle, seed 7: 2.00{TIMES}, 31.25 dB" in overview
    assert "2: r1, another, seed 7" in overview
    assert [link["href"] for link in reader.all("a")] == ["#part-1", "#part-2", "#part-3"]
    assert "All files" not in shown(CONTENT).headings


def test_the_best_points_are_those_that_nothing_beats():
    places = [(1.0, 40.0), (2.0, 35.0), (1.5, 30.0), (2.0, 33.0), (3.0, 20.0), (0.9, 40.0)]
    points = [QualityPoint(str(place), *place) for place in places]
    assert [(p.speedup, p.psnr_db) for p in best_points(points)] == [(1, 40), (2, 35), (3, 20)]
    _, table = overview_section([[], points[:1], points[1:3]]).parts
    assert {row[0].partition(":")[0] for row in table.rows} == {"2", "3.1", "3.2"}


def test_long_and_large_clips_are_shown_in_small():
    for count, places in ((1, [0]), (2, [0, 1]), (6, [*range(6)]), (33, [0, 6, 13, 19, 26, 32])):
        assert frames.spaced(count, 6) == places
    write_clip("o.gif", frames=40, size=(100, 900))
    sample = frames.read_sample(Path("o.gif"), "x")
    assert len(sample.images) == frames.FRAMES
    assert sample.images[-1][0] == 39
    flat = np.full((100, 900, 3), 9, np.uint8)
    uri = frames.data_uri(flat, frames.LARGEST_SIDE)
    assert uri.startswith("data:image/png")  # which is smaller here
    assert len(shown(CONTENT, samples=[sample]).all("img")) == frames.FRAMES


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda: Path("o.gif").unlink(), "o.gif, which r0.json names, is not there"),
        (lambda: os.utime("o.gif", LATER), "o.gif was written after"),
    ],
)
def test_frames_that_are_not_those_of_the_file_are_left_out(spoil, sentence):
    write_clip("o.gif")
    write_clip("o-dense.gif")
    spoil()
    reader = shown(CONTENT)
    assert sentence in reader.sections["Not on this page"]
    assert "Sample frames" not in reader.headings


def test_frames_are_found_beside_a_file_that_was_moved():
    Path("there").mkdir()
    Path("there/r.json").write_text(json.dumps(content(files={"output": ["elsewhere/o.gif"]})))
    write_clip("there/o.gif")
    shutil.move("there", "moved")
    source = Path("moved/r.json")
    assert "sparse: o.gif" in PageReader(page([(source, read_result(source))])).headings


def test_names_of_paths_and_words_of_commands():
    names = {
        "/home/alice/models/my-wan/": "my-wan",
        "C:\\Users\\Alice\\my wan": "my wan",
        "~/m": "m",
        "../m": "m",
        "a/b/c": "c",
        "/home/alice/.cache/huggingface/hub/models--Wan-AI--Wan2.1/snapshots/0": "Wan-AI/Wan2.1",
    } | {name: name for name in ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "profile", "", "/")}
    assert {path: name_of(path) for path in names} == names
    words = ["chipsparse", "--model", "a/b", "--config", "a/b", "--negative-prompt", "a/b"]
    assert command_text(words) == "chipsparse --model a/b --config b --negative-prompt a/b"


def test_units_fit_the_value():
    assert seconds_unit([0.2, 0.9])[0] == "ms"
    assert seconds_unit([0.2, 59])[0] == "s"
    assert seconds_unit([900])[0] == "min"
    assert (bytes_unit([5])[0], bytes_unit([2 << 30])[0]) == ("MiB", "GiB")
    shares = [percent(share) for share in (0.0, 0.1104, 0.999, 1.0)]
    assert shares == ["0%", "11.0%", "100%", "100%"]
    assert [seconds_text(s) for s in (0.0123, 0.5, 61.2)] == ["12.3 ms", "0.50 s", "1 min 1 s"]


def test_the_summary_of_a_generation(capsys):
    result = GenerationResult.model_validate(CONTENT)
    printed = text_of(result.sections())
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert "gain 2.00 times as fast as dense (8.00 s), PSNR 31.25 dB, SSIM 0.9500" in lines
    assert "time 4.00 s for 4 steps, 5.00 s with text and decoding" in lines
    expected = {"steps DRSk", "sparse 1 1.00 s 100% 100%", "fallback one layer is dense"}
    assert expected <= set(lines)
    assert "Sample frames" not in printed
    print_result(result, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert GenerationResult.model_validate(printed).to_json() == result.to_json() == printed
    dense = GenerationResult.model_validate(content(comparison=None, sparse=None))
    assert "none: the unpatched model ran" in text_of(dense.sections())
    tiny = content(request__model=str(ASSETS / "tiny-wan"), comparison__speedup=3.15)
    printed = text_of(GenerationResult.model_validate(tiny).sections())
    assert "step caches reach 21-27 dB at 3x" in printed  # not by the half of the operations


def test_a_series_says_its_worst_clip_and_what_failed():
    best = GenerationResult.model_validate(content(comparison__psnr_db=None))
    worst = GenerationResult.model_validate(content(request__prompt="another", request__seed=8))
    failed = GenerationResult.model_validate(content(comparison=None, error="no memory"))
    series = SeriesResult(asked=4, clips=[best, worst, failed])
    lines = [" ".join(line.split()) for line in text_of(series.sections()).splitlines()]
    assert "clips 2 of 4 made, 1 failed" in lines
    assert any("at worst PSNR 31.25 dB" in line for line in lines)
    assert "o.gif a red circle 7 4.00 s 2.00x the same" in lines
    assert "failed a red circle 7 - - -" in lines


def test_cells_of_a_wide_table_are_folded_on_a_narrow_terminal():
    wide = Table(["way", *"abcdefgh"], [("chipsparse fast", *["38.22 (31.07)"] * 8)])
    words = text_of([Section("", [wide])], width=80).split()
    assert words[9:] == ["chipsparse", *["38.22"] * 8, "fast", *["(31.07)"] * 8]


STEPS = r"is damaged.*report\.steps\[0\]\.step is"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is no JSON:"),
        ('{"kind": "benchmark"}', "is of no kind that report knows"),
        (content(report__steps=[{"action": "dense"}]), f"{STEPS} missing"),
        (content(report__steps=[call(10**9, "a", "dense")]), f"{STEPS} 1000000000"),
        (content(comparison__speedup=1e40), r"is damaged.*comparison\.speedup is 1e\+40"),
    ],
)
def test_files_that_are_no_results_or_damaged(text, sentence):
    Path("f.json").write_text(text if isinstance(text, str) else json.dumps(text))
    with pytest.raises(UserError, match=sentence):
        read_result(Path("f.json"))


def test_values_that_do_not_fit_each_other_end_with_a_sentence(workdir, monkeypatch):
    monkeypatch.setattr("chipsparse.cli.views.report.page", lambda *_, **__: [][1])
    Path("f.json").write_text(json.dumps({"kind": "series", "asked": 0, "clips": []}))
    with pytest.raises(UserError, match="the values in the files do not fit each other"):
        write_report([Path("f.json")], [], Path("r.html"))
    assert not Path("r.html").exists()


def test_infinite_numbers_are_null_in_json():
    class Measured(Result):
        kind: Literal["measured"] = "measured"
        value: float

    assert Measured(value=float("inf")).to_json()["value"] is None
