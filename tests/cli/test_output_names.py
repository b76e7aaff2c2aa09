"""Names of outputs are refused before anything is computed, and nothing is left."""

import os
from pathlib import Path

import pytest

from tests.cli.conftest import command, nothing_written

LONG = "a" * 300


@pytest.fixture
def refused(workdir, model_folder, monkeypatch):
    """Runs a command, which may load no model and read no file of results; returns its sentence."""
    (workdir / "file.txt").write_text("a red circle\na blue square\na third\n")
    (workdir / "folder.mp4").mkdir()
    for name in ("a-dense.mp4", "a-compare.png", "p.tune-dense"):
        (workdir / name).touch() if name == "p.tune-dense" else (workdir / name).mkdir()
    (workdir / "c.yaml").write_text("model_class: WanTransformer3DModel\n")
    (workdir / "c.json").write_text("{}")
    (workdir / "g.html").write_text("{}")
    (workdir / "p.gif").write_text("a red circle\na blue square\n")
    for module in ("generate.job", "compare.configs", "tune.job"):
        monkeypatch.setattr(
            f"chipsparse.cli.{module}.load_pipeline", lambda *_, **__: pytest.fail("loaded")
        )

    def run(line):
        name, *rest = line.format(long=LONG).split()
        if name == "generate":
            rest = ["x", *rest]
        if name in ("generate", "tune"):
            rest += ["--model", str(model_folder)]
        with nothing_written(workdir):
            return command(name, *rest).sentence()

    return run


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("generate -o {long}.mp4", f"--output {LONG}.mp4 cannot be written: File name too long"),
        ("generate -o {long}/a.mp4", f"the folder {LONG} of --output {LONG}/a.mp4 does not exist"),
        ("generate -o file.txt/a.mp4", "--output file.txt/a.mp4 is below file.txt, which is no fo"),
        ("generate -o file.txt/b/a.mp4", "--output file.txt/b/a.mp4 is below file.txt, which is"),
        ("generate -o folder.mp4", "--output folder.mp4 is a folder; name a file in it"),
        ("generate -o /proc/a.mp4", "--output /proc/a.mp4 cannot be written: No such file"),
        ("generate -o a.mp4 --compare", "a-dense.mp4, which is written beside --output a.mp4, is"),
        ("generate -o a.png --compare", "a-compare.png, which is written beside --output a.png,"),
        ("generate -o a.mp4 --report /proc/r.json", "--report /proc/r.json cannot be written: No"),
        ("generate -o a.mp4 --report {long}.json", f"--report {LONG}.json cannot be written: Fi"),
        ("generate -o a.mp4 --report file.txt/r.json", "--report file.txt/r.json is below file.t"),
        (
            "generate -o a.gif --report c.json --config c.json",
            "--report c.json would replace c.json, which is read",
        ),
        ("generate -o a.gif --crf 5", "--crf is about .mp4 and .webm, and .gif has none"),
        (
            "generate -o b.mp4 --crf 52",
            "--crf 52 is out of range; for .mp4 it must be from 0 to 51",
        ),
        ("generate -o b.webm --crf -1", "--crf -1 is out of range; for .webm it must be from 0 to"),
        ("tune --min-psnr 9 -o /proc/p.yaml", "--output /proc/p.yaml cannot be written: No such"),
        (
            "tune --min-psnr 9 -o c.yaml --config c.yaml",
            "--output c.yaml would replace c.yaml, which is read",
        ),
        (
            "tune --min-psnr 9 -o q.yaml --prompts c.json --results ./c.json",
            "--results c.json would replace c.json, which is read",
        ),
        (
            "tune --min-psnr 9 -o p.yaml",
            "p.tune-dense, which keeps the dense clips beside p.tune.json, is no folder;",
        ),
        ("report g.html -o g.html", "--output g.html would replace g.html, which is read"),
        ("report c.json -o file.txt/g.html", "--output file.txt/g.html is below file.txt, which"),
        ("report c.json -o /proc/g.html", "--output /proc/g.html cannot be written: No such file"),
        ("compare a.png b.png -o /proc/a.mp4", "--output /proc/a.mp4 cannot be written: No such"),
        (
            "compare dense profile -o p.gif --prompts p.gif",
            "--output p.gif would replace p.gif, which is read",
        ),
    ],
)
def test_mistakes(refused, line, sentence):
    assert refused(line).startswith(sentence)


def test_a_name_that_only_numbers_make_too_long(refused):
    name = "n" * (os.pathconf(".", "PC_NAME_MAX") - 6)
    assert refused(f"generate -o {name}.png").endswith("cannot be written: File name too long")


def test_a_file_system_that_is_full_already(refused, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("chipsparse.common.scratch.tempfile.mkdtemp", full)
    assert (
        refused("generate -o b.mp4") == "--output b.mp4 cannot be written: No space left on device"
    )


# What is read.


def test_pipes_are_not_waited_for(workdir):
    os.mkfifo("a.png")
    for arguments in (["compare", "a.png", "a.png"], ["report", "a.png", "-o", "g.html"]):
        assert command(*arguments).sentence() == "a.png is no regular file"


def test_a_picture_of_billions_of_pixels(workdir):
    """Only its header says so: its pixels would take 10 GiB."""
    import struct
    import zlib

    def chunk(kind, content):
        crc = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"")), chunk(b"IEND", b"")
    Path("a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    said = command("compare", "a.png", "a.png").sentence()
    assert said.startswith("a.png could not be read: Image size (3600000000 pixels) exceeds")


@pytest.mark.parametrize("content", [b"GIF89a", b"GIF89a" + bytes(range(200)), b"GIF89a\xff" * 9])
def test_a_damaged_gif(workdir, content):
    Path("a.gif").write_bytes(content)
    said = command("compare", "a.gif", "a.gif").sentence()
    assert said.startswith("a.gif could not be read: ")
