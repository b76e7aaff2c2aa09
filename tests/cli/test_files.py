"""No command replaces a file that it reads: not by its output, nor by any file beside that."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from chipsparse.cli.errors import UserError
from chipsparse.cli.media import write as media
from chipsparse.common.files import Write, check_inputs_stay, numbered
from tests.cli.conftest import PROFILE, command
from tests.tiny_models import PROMPT

VIDEO = "--model VIDEO"
FLUX = "--model FLUX"
IMAGE_TO_VIDEO = "--model IMAGE_TO_VIDEO"
TUNE = f"tune {FLUX} --min-psnr 30 --calibration-prompts 1 --held-out-prompts 2"
# Each command with the file that it would replace; `COPY` is a copy of the model of images.
REPLACES = {
    # The file itself, by other names.
    f"generate -o o.gif {VIDEO} --prompts o-000.gif": "o-000.gif",
    "generate x -o o.png --image sub/../o.png": "o.png",
    "generate x -o o.png --image hard.png": "o.png",
    "generate x -o LINKED/o.png --image o.png": "o.png",
    "generate x -o o.png --image soft.png": "o.png",
    # Files beside it.
    f"generate x -o o.png --compare {FLUX} --image o-dense.png": "o-dense.png",
    f"generate x -o o.png --compare {FLUX} --image o-compare.png": "o-compare.png",
    f"generate -o o.png --num 2 {FLUX} --compare --image o-001-dense.png x": "o-001-dense.png",
    f"generate x -o new.png {IMAGE_TO_VIDEO} --image new-000.png": "new-000.png",
    f"generate x -o v.png {IMAGE_TO_VIDEO} --compare --image v-dense-001.png": "v-dense-001.png",
    f"generate -o o.gif {VIDEO} --prompts p-000.json --report p.json": "p-000.json",
    # What belongs to the model and the profile.
    "generate x -o o.png --model COPY --report COPY/model_index.json": "model_index.json",
    "generate x -o o.png --model COPY --report COPY/vae/config.json": "config.json",
    f"{TUNE.replace('FLUX', 'COPY')} -o COPY/chipsparse.yaml": "chipsparse.yaml",
    # Folders that batches, suites and searches fill.
    f"batch b/manifest.jsonl -o b {FLUX}": "manifest.jsonl",
    f"batch b/index.html -o b {FLUX}": "index.html",
    f"batch c.csv -o b {FLUX}": "index.html",
    f"{TUNE} -o n.yaml --prompts n.tune.json": "n.tune.json",
    f"{TUNE} -o n.yaml --prompts n.tune-dense/0.npy": "0.npy",
    f"{TUNE} -o n.yaml --config n.yaml": "n.yaml",
    "compare --suite FLUX -o s --prompts s/suite.html": "suite.html",
    "compare --suite FLUX -o s --prompts s/suite.json": "suite.json",
    "compare --suite FLUX -o s --prompts s/measured.json": "measured.json",
    "compare --suite FLUX -o s --prompts s/clips/0-dense.png": "0-dense.png",
    "compare --suite FLUX -o s --prompts s/dense/0.npy": "0.npy",
    # Comparisons and pages.
    f"compare dense n.yaml -o hard.gif {FLUX} --prompts p.txt": "hard.gif",
    f"compare dense profile -o w.png {VIDEO} --prompts w-000.png": "w-000.png",
    "compare o.png soft.png -o hard.png": "hard.png",
    "compare sub o.png -o sub/1.png": "1.png",
    "compare v-dense.png v.png -o v-dense.png": "v-dense-000.png",
    "report r.html -o r.html": "r.html",
    "report r.json --media sub -o sub/1.png": "1.png",
}


@contextmanager
def kept(folder):
    """The block changes no file of a folder, and adds none."""

    def contents():
        paths = [path for path in folder.rglob("*") if not path.is_dir()]
        return {
            path: os.readlink(path) if path.is_symlink() else path.read_bytes() for path in paths
        }

    before = contents()
    yield
    assert contents() == before


@pytest.fixture
def everything(workdir, flux_folder):
    """Files of all kinds; what they hold is not looked at before the refusal."""
    for folder in ("sub", "b", "s/clips", "s/dense", "n.tune-dense"):
        Path(folder).mkdir(parents=True)
    picture = Image.new("RGB", (48, 32))
    names = ("o", "o-dense", "o-compare", "o-001-dense", "new-000", "v-dense-001", "sub/1")
    for name in names:
        picture.save(f"{name}.png")
    frames = np.zeros((2, 32, 48, 3), np.uint8)
    media.write_media({Path("v-dense.png"): frames, Path("v.png"): frames}, fps=8)
    prompts = f"{PROMPT}\na blue square\na white triangle\n"
    for name in (
        "p.txt",
        "w-000.png",
        "p-000.json",
        "o-000.gif",
        "n.tune.json",
        "n.tune-dense/0.npy",
        "r.html",
    ):
        Path(name).write_text(prompts)
    for name in ("suite.html", "suite.json", "measured.json", "clips/0-dense.png", "dense/0.npy"):
        Path("s", name).write_text(prompts)
    Path("b/manifest.jsonl").write_text(json.dumps({"prompt": PROMPT}) + "\n")
    Path("b/index.html").write_text(PROMPT)
    Path("c.csv").write_text("prompt,image\na,b/index.html\n")
    Path("n.yaml").write_text(PROFILE)
    Path("r.json").write_text("{}")
    os.link("o.png", "hard.png")
    os.link("n.yaml", "hard.gif")
    Path("soft.png").symlink_to("o.png")
    Path("LINKED").symlink_to(".")
    shutil.copytree(flux_folder, "COPY")
    return workdir


@pytest.mark.parametrize("line", REPLACES)
def test_no_input_is_replaced(
    line,
    everything,
    loads_nothing,
    monkeypatch,
    model_folder,
    flux_folder,
    image_to_video_folder,
):
    monkeypatch.setattr("chipsparse.cli.errors.importlib.util.find_spec", lambda name: name)
    models = {"VIDEO": model_folder, "FLUX": flux_folder, "IMAGE_TO_VIDEO": image_to_video_folder}
    with kept(everything):
        said = command(*(str(models.get(word, word)) for word in line.split())).sentence()
    assert said.endswith("which is read")
    assert REPLACES[line] in said


def test_files_are_told_by_what_they_are(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    read = tmp_path / "a/b/read.txt"
    read.write_text("read")
    (tmp_path / "other.txt").write_text("other")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for reads in ([read], [tmp_path / "a"], [tmp_path / "link/b"]):
        for name in ("a/b/read.txt", "link/b/../b/read.txt"):
            with pytest.raises(UserError, match=r"-o .* would replace .*read\.txt, which is read"):
                check_inputs_stay([Write("-o", tmp_path / name)], [tmp_path / "no", *reads])
        new = [Write("-o", tmp_path / name) for name in ("a/b/new.txt", "other.txt", "no")]
        check_inputs_stay(new, reads)


def test_a_small_picture_does_not_replace_the_prompts(everything, batch, flux_folder):
    batch("-o", "b", file="p.txt", model=flux_folder).fine()
    small = sorted(Path("b/thumbnails").glob("*.jpg"))[0]
    (Path("b") / small.name).with_suffix(".png").unlink()
    small.write_text(Path("p.txt").read_text())
    with kept(everything / "b"):
        said = batch("-o", "b", file=str(small), model=flux_folder).sentence()
    assert said == f"--output {small} would replace {small}, which is read"


@pytest.mark.parametrize(
    ("count", "name"),
    [(1, "a-000.png"), (1000, "a-000.png"), (1001, "a-0000.png")],
)
def test_numbers_have_as_many_digits_as_the_last_one(count, name):
    assert numbered(Path("a.png"), 0, count) == Path(name)


@pytest.mark.parametrize("target", ["real.png", "nowhere.png"])
def test_a_link_is_neither_replaced_nor_followed(generate, workdir, loads_nothing, target):
    Path("real.png").write_text("mine")
    Path("link.png").symlink_to(target)
    Path("o-dense.gif").symlink_to(target)
    for name, words in {
        "link.png": ("-o", "link.png", "--frames", "1"),
        "o-dense.gif": ("-o", "o.gif", "--compare"),
    }.items():
        with kept(workdir):
            said = generate(*words).sentence()
        assert said.startswith(f"--output {name} is a link to {target}, which it would replace")


def test_names_like_those_of_files_that_are_written(everything, batch, generate, flux_folder):
    """A model of images writes one file, and a batch none of the name that lines are checked by."""
    before = Path("new-000.png").read_bytes()
    generate("-o", "new.png", "--image", "new-000.png", model=flux_folder).fine()
    assert Path("new-000.png").read_bytes() == before
    Path("b/clip.png").write_bytes(before)
    Path("prompts.csv").write_text("prompt,image\na,b/clip.png\n")
    batch("-o", "b", model=flux_folder).fine()
    assert Path("b/clip.png").read_bytes() == before


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "x", "-o", "o.png", "--compare", "--image", "o-dense.png"],
        ["batch", "b/index.html", "-o", "b"],
        ["compare", "o.png", "o-dense.png", "-o", "hard.png"],
        ["report", "r.json", "-o", "r.html", "--media", "r.html"],
    ],
)
def test_the_refusal_does_not_wait_for_torch(everything, words):
    end = "finally: print('torch' in sys.modules)"
    code = f"import sys; from chipsparse.cli import main\ntry: main.main()\n{end}"
    command = [sys.executable, "-c", code, *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "False\n")
    assert ran.stderr.count("\n") == 1
    assert "which is read" in ran.stderr


@pytest.mark.parametrize("words", [["compare", "o.png"], ["generate", "x", "--image"]])
def test_names_that_are_too_long_are_refused(everything, loads_nothing, words):
    said = command(*words, 300 * "x" + ".png", "-o", "new.png").sentence()
    assert "xxx.png" in said
