"""The pytest plugin, in small test suites of its own."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from chipsparse.cli.media.read import read_clip, read_frames
from chipsparse.cli.media.write import write_lossless
from chipsparse.cli.regression import check, page, plugin
from chipsparse.cli.regression.check import MediaRegression
from chipsparse.config import SparsityConfig
from tests.cli.html_reader import PageReader
from tests.tiny_models import tiny_flux_pipeline

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[3]
CHANGED = "frames[3, 2:6, 2:6] ^= 64"
SUITE = """\
import numpy as np
import pytest

frames = np.random.default_rng(0).integers(0, 256, (5, 17, 33, 3), dtype=np.uint8)
{change}

@pytest.mark.parametrize("size", [16, "a/b"])
def test_image(media_regression, size):
    media_regression.check(frames[0], "still", settings={{"size": size}})

def test_clip(media_regression):
    media_regression.check(frames, "moves", {bounds})
"""


@pytest.fixture
def suite(pytester, monkeypatch):
    """Writes `test_suite.py` and runs pytest on it, in this process."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the entry point may be installed
    assert (check, page) is not None  # else each run would import them, and PyTorch, anew

    def run(*words, change="", bounds="", process=False):
        file = pytester.path / "test_suite.py"
        text = SUITE.format(change=change, bounds=bounds)
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
            shutil.rmtree(pytester.path / "__pycache__", ignore_errors=True)
        start = pytester.runpytest_subprocess if process else pytester.runpytest_inprocess
        return start("-p", plugin.__name__, "-p", "no:cacheprovider", *words)

    run.path = pytester.path
    return run


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_missing_golden_fails_with_the_command_that_makes_it(suite):
    result = suite()
    result.assert_outcomes(failed=3)
    command = "make it with: pytest test_suite.py::test_clip --update-golden"
    assert command in result.stdout.str()
    assert not (suite.path / "golden").exists()
    new = suite.path / "media-report/new/golden/test_suite/moves.webm"
    assert read_frames(new).shape == (5, 17, 33, 3)
    result = suite("--golden-dir", "kept here")
    assert "--update-golden --golden-dir 'kept here'" in result.stdout.str()


def test_golden_files_are_made_lossless_with_a_record_and_compared_exactly(suite):
    result = suite("--update-golden")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["golden file written: *moves.webm"])
    golden = suite.path / "golden/test_suite"
    images = [name for name in files(golden) if name.endswith(".png")]
    assert len(images) == 2  # each parameter has its own
    assert "still-16.png" in images
    record = json.loads((golden / "moves.webm.json").read_text())
    assert (record["frames"], record["height"], record["width"]) == (5, 17, 33)
    assert record["test"] == "test_suite.py::test_clip"
    assert record["versions"]["torch"]
    assert json.loads((golden / "still-16.png.json").read_text())["settings"] == {"size": 16}
    before = {path: path.stat().st_mtime_ns for path in golden.iterdir()}
    suite().assert_outcomes(passed=3)
    suite("--update-golden").assert_outcomes(passed=3)
    assert {path: path.stat().st_mtime_ns for path in golden.iterdir()} == before
    assert not (suite.path / "media-report").exists()


def test_a_failure_names_the_worst_frame_and_makes_a_page(suite):
    suite("--update-golden")
    golden = read_frames(suite.path / "golden/test_suite/moves.webm")
    result = suite(change=CHANGED)
    result.assert_outcomes(failed=1, passed=2)
    why = "largest pixel difference 64 of 255 in frame 3 breaks largest pixel difference <= 0"
    assert f"test_suite.py::test_clip: {why}" in result.stdout.str()
    report = suite.path / "media-report"
    result.stdout.fnmatch_lines([f"page: {report / plugin.PAGE}"])
    new = read_frames(report / "new/golden/test_suite/moves.webm")
    assert (new != golden).any(axis=(1, 2, 3)).tolist() == [False, False, False, True, False]
    (clip,) = (report / "failures").glob("*.webm")
    picture = read_frames(clip.with_suffix(".png"))
    shown = read_frames(clip)
    np.testing.assert_array_equal(picture[0], shown[3])
    left = shown[:, -17:, :33]
    np.testing.assert_array_equal(left, golden)
    np.testing.assert_array_equal(shown[:, -17:, 37:70], new)
    assert shown[3, -17:, -33:].any()
    assert not shown[2, -17:, -33:].any()
    reader = PageReader((report / plugin.PAGE).read_text())
    assert reader.problems == []
    assert len(reader.external()) == 2  # the picture and the clip, which lie beside the page
    assert why in reader.sections["Failures"]
    (image,) = reader.all("img")
    assert (report / image["src"]).samefile(clip.with_suffix(".png"))
    # What CI keeps is what the repository needs.
    shutil.copytree(report / "new", suite.path, dirs_exist_ok=True)
    suite(change=CHANGED).assert_outcomes(passed=3)


@pytest.mark.parametrize(
    ("bounds", "passed"),
    [
        ("min_psnr=10, max_pixel=64", True),
        ("min_psnr=99", False),
        ("max_pixel=63", False),
        ("min_ssim=0.9999", False),
        ("max_flicker=0", False),
        ("max_flicker=255", True),
    ],
)
def test_bounds_hold_for_every_frame(suite, bounds, passed):
    suite("--update-golden", "-k", "clip")
    result = suite("-k", "clip", change=CHANGED, bounds=bounds)
    result.assert_outcomes(passed=int(passed), failed=int(not passed), deselected=2)


@pytest.mark.parametrize(
    ("change", "both"),
    [
        ("frames = frames[:3]", "golden has 5 frames and now has 3"),
        ("frames = frames[:, :8]", "golden has 33x17 pixels and now has 33x8"),
        ("frames = frames[:1]", "golden has 5 frames and now has 1"),
    ],
)
def test_other_sizes_fail_with_both_and_can_be_updated(suite, change, both):
    suite("--update-golden", "-k", "clip")
    result = suite("-k", "clip", change=change, bounds="min_psnr=1")
    assert both in result.stdout.str()
    suite("-k", "clip", "--update-golden", change=change).assert_outcomes(passed=1, deselected=2)
    suite("-k", "clip", change=change).assert_outcomes(passed=1, deselected=2)
    golden = files(suite.path / "golden")
    assert len([name for name in golden if not name.endswith(".json")]) == 1


def test_another_folder_holds_the_golden_files(suite):
    suite("--update-golden", "--golden-dir", "kept").assert_outcomes(passed=3)
    assert (suite.path / "kept/test_suite/moves.webm").exists()
    suite("--golden-dir", "kept").assert_outcomes(passed=3)
    suite().assert_outcomes(failed=3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("frames", "'../a'"), "may have letters"),
        (("frames", "'a', min_ssim=2"), "min_ssim must be from 0 to 1, got 2"),
        (("[]", "'a'"), "there is no frame"),
    ],
)
def test_mistakes_of_a_test_are_refused(suite, words, message):
    call = f"media_regression.check({', '.join(words)})"
    change = f"def test_mistake(media_regression):\n    {call}"
    result = suite("--update-golden", "-k", "mistake", change=change)
    assert message in result.stdout.str()
    assert not (suite.path / "golden").exists()


def test_a_name_is_used_once_in_a_test(suite):
    twice = "def test_twice(media_regression):\n" + 2 * (
        "    media_regression.check(frames, 'same')\n"
    )
    result = suite("--update-golden", "-k", "twice", change=twice)
    assert "the name same is checked twice" in result.stdout.str()


@pytest.mark.slow
def test_xdist_makes_one_page(suite):
    suite("--update-golden")
    words = ("-p", "xdist", "-n", "2")
    suite(*words, process=True).assert_outcomes(passed=3)
    result = suite(*words, change="frames ^= 64", process=True)
    result.assert_outcomes(failed=3)
    reader = PageReader((suite.path / "media-report" / plugin.PAGE).read_text())
    assert len(reader.all("img")) == 3


def test_lossless_files_of_odd_sizes(tmp_path):
    frames = np.random.default_rng(0).integers(0, 256, (3, 7, 5, 3), dtype=np.uint8)
    write_lossless(tmp_path / "a.webm", frames, fps=8)
    clip = read_clip(tmp_path / "a.webm")
    np.testing.assert_array_equal(clip.frames, frames)
    assert clip.fps == 8


def test_nothing_heavy_is_imported_at_collection():
    code = (
        f"import pytest, sys; before = set(sys.modules); import {plugin.__name__}; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(ran.stdout.split()) <= {"chipsparse", "json"}


class Node:
    def __init__(self, path):
        self.path = path
        self.nodeid = "test_it.py::test_it"
        self.user_properties = []


@pytest.fixture
def regression(tmp_path):
    """The fixture itself, of a test in an empty folder."""

    class Config:
        rootpath = tmp_path

        class invocation_params:
            dir = tmp_path

        @staticmethod
        def getoption(name):
            return {"--media-report": "media-report"}.get(name)

    class Request:
        node = Node(tmp_path / "test_it.py")
        config = Config

    return MediaRegression(Request)


def flux_call():
    settings = {"height": 32, "width": 32, "num_inference_steps": 4, "max_sequence_length": 16}
    return {"prompt": "a", "output_type": "np", **settings}


@pytest.mark.parametrize("seeded", [True, False])
def test_sparse_against_dense_sees_the_same_noise(regression, seeded):
    pipe = tiny_flux_pipeline()
    call = flux_call()
    if seeded:
        call["generator"] = torch.Generator().manual_seed(1)
    full = {"schedule.actions": ["dense"], "attention.density": "dense", "mlp.density": "dense"}
    config = SparsityConfig().override(full)
    found = regression.against_dense(pipe, call, config=config, max_pixel=0)
    assert found.identical
    skips = SparsityConfig().override({"schedule.actions": ["dense", "skip"]})
    found = regression.against_dense(pipe, call, config=skips, min_psnr=5)
    assert not found.identical
    of_function = regression.against_dense(
        pipe,
        lambda pipe: pipe(**flux_call()),
        config=config,
        max_pixel=0,
    )
    assert of_function.identical
    with pytest.raises(pytest.fail.Exception, match="breaks PSNR >= 200 dB"):
        regression.against_dense(pipe, call, config=skips, min_psnr=200)
    with pytest.raises(ValueError, match="give a bound"):
        regression.against_dense(pipe, call)


@pytest.mark.slow
def test_the_example(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    folder = pytester.path / "examples/regression"
    shutil.copytree(
        ROOT / "examples/regression",
        folder,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (pytester.path / "assets").symlink_to(ROOT / "assets")
    words = ("-p", plugin.__name__, "examples/regression")
    pytester.runpytest_inprocess(*words).assert_outcomes(passed=2)
    file = folder / "test_shapes.py"
    file.write_text(file.read_text().replace("SEED = 0", "SEED = 1"))
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    result = pytester.runpytest_inprocess(*words)
    result.assert_outcomes(failed=2)
    reader = PageReader((pytester.path / "media-report" / plugin.PAGE).read_text())
    assert len(reader.all("img")) == 2
    pytester.runpytest_inprocess(*words, "--update-golden").assert_outcomes(passed=2)
    pytester.runpytest_inprocess(*words).assert_outcomes(passed=2)
