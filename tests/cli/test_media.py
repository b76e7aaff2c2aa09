"""Files of clips: written whole or not at all, read as a viewer shows them; panels, heat-maps."""

import errno
import json
import os
import re
import resource
import struct
import subprocess
import zlib
from pathlib import Path

import imageio.v3 as iio
import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image

from chipsparse.cli.errors import UserError
from chipsparse.cli.media import write as media
from chipsparse.cli.media.panels import (
    COLOURS,
    GAP_PIXELS,
    Panel,
    choose_factor,
    difference,
    difference_rows,
    heat_map,
    stack_panels,
)
from chipsparse.cli.media.read import read_clip, read_image
from tests.cli.conftest import command, names
from tests.tiny_models import PROMPT

VIDEOS = (".mp4", ".webm")
BARS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (128, 128, 128), (20, 60, 200)]


def noise(frames=5, height=32, width=48):
    """What no encoder makes small."""
    return np.random.default_rng(0).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def written(name, frames, **options):
    media.write_media({Path(name): frames}, fps=8, **options)
    return Path(name)


# Writing.


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_colours_survive(tmp_path, suffix):
    path = tmp_path / f"bars{suffix}"
    bars = np.repeat(np.array(BARS, dtype=np.uint8), 16, axis=0)
    frames = np.broadcast_to(bars, (3, 32, *bars.shape)).copy()
    assert media.write_media({path: frames}, fps=16) == {path: [path]}
    centres = iio.imread(path)[:, 16, 8::16, :3].astype(int)
    np.testing.assert_allclose(centres, [BARS] * len(centres), atol=4)


def test_odd_sides_of_a_video_are_filled_up(workdir):
    frames = read_clip(written("a.mp4", noise(3, 31, 95))).frames
    assert frames.shape == (3, 32, 96, 3)


@pytest.mark.parametrize(("fps", "total_ms"), [(16, 1000), (30, 530), (7, 2290)])
def test_gif_lasts_as_long_as_the_clip(workdir, fps, total_ms):
    media.write_media({Path("a.gif"): noise(16, 16, 16)}, fps=fps)
    with Image.open("a.gif") as image:
        durations = []
        for index in range(image.n_frames):
            image.seek(index)
            durations.append(image.info["duration"])
    assert (len(durations), sum(durations)) == (16, total_ms)
    assert max(durations) - min(durations) <= 10


def test_a_larger_crf_makes_a_smaller_file(workdir):
    for suffix, most in ((".mp4", 51), (".webm", 63)):
        name = f"a{suffix}"
        sizes = [written(name, noise(8), crf=crf).stat().st_size for crf in (0, None, most)]
        assert sizes[0] > sizes[1] > sizes[2]


def test_frames_in_png_files(workdir):
    many = np.zeros((1001, 2, 2, 3), dtype=np.uint8)
    files = media.write_media({Path("many.png"): many}, fps=1)[Path("many.png")]
    assert (files[0].name, files[-1].name) == ("many-0000.png", "many-1000.png")
    frames = noise(7)
    written("a.png", frames)
    np.testing.assert_array_equal(read_clip(Path("a.png")).frames, frames)
    # Of a longer clip of before, the frames beyond those of this one are not read.
    shorter = frames[::-1][:5]
    written("a.png", shorter)
    np.testing.assert_array_equal(read_clip(Path("a.png")).frames, shorter)
    Path("a-002.png").unlink()
    with pytest.raises(UserError, match=r"a\.png has 4 of its 5 frames; the others are missing"):
        read_clip(Path("a.png"))


FULL = "[out#0/mp4 @ 0x5] Error muxing a packet: No space left on device"
# What stands in place of ffmpeg, and what is said of it.
ENCODERS = {
    f'cat > /dev/null; echo half > "$out"; echo "{FULL}" >&2; exit 228': (
        "Error muxing a packet: No space left on device"
    ),
    'echo half > "$out"; exit 8': "ffmpeg ended with exit code 8",
    "kill -9 $$": "ffmpeg ended with exit code -9",
    "cat > /dev/null; exit 0": "No such file or directory",
}


def test_what_cannot_be_written_leaves_what_was_there(workdir, tmp_path_factory, monkeypatch):
    def loses(name, frames):
        Path(name).write_bytes(b"older")
        with pytest.raises(UserError) as failed:
            written(name, frames)
        assert (Path(name).read_bytes(), names(workdir)) == (b"older", [name])
        Path(name).unlink()
        return str(failed.value)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for suffix in (".mp4", ".webm", ".gif", ".png"):  # `ulimit -f` ends ffmpeg by its signal
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, limits[1]))
        try:
            said = loses(f"out{suffix}", noise(1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert said.startswith(f"out{suffix} could not be written: ")
    script = tmp_path_factory.mktemp("bin") / "ffmpeg"
    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", lambda: str(script))
    for text, sentence in ENCODERS.items():
        script.write_text(f"#!/bin/sh\nfor out; do :; done\n{text}\n")
        script.chmod(0o755)
        assert loses("out.mp4", noise()) == f"out.mp4 could not be written: {sentence}"

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(media, "_write_pngs", full)
    with pytest.raises(UserError, match=r"a\.gif, b\.png could not be written: No space left"):
        media.write_media({Path("a.gif"): noise(), Path("b.png"): noise(1)}, fps=8)
    assert names(workdir) == []


def test_a_text_file_is_written_whole_or_not_at_all(workdir):
    Path("a.json").write_text("older")

    def fail():
        with media.written_whole("--report", Path("a.json")) as file:
            file.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (names(workdir), Path("a.json").read_text()) == (["a.json"], "older")
    with media.written_whole("--report", Path("a.json")) as file:
        file.write_text("new")
    assert (names(workdir), Path("a.json").read_text()) == (["a.json"], "new")
    missing = Path("no/a.json")
    with pytest.raises(UserError, match=r"--report no/a\.json could not be written: No such file"):
        media.written_whole("--report", missing).__enter__()


# Facts in the files.

FACTS = {
    "prompt": "a cat = x; #1\nand \\ a dög",
    "negative_prompt": "blur",
    "steps": "4",
    "guidance_scale": "3.0",
    "seed": "5",
    "size": "48x32",
    "model": "tiny, wan",
    "chipsparse": "0.1.0",
}
TEXT = (
    "a cat = x; #1\nand \\ a dög\nNegative prompt: blur\n"
    'Steps: 4, CFG scale: 3.0, Seed: 5, Size: 48x32, Model: "tiny, wan", Version: chipsparse 0.1.0'
)


def tags(file):
    """What ffmpeg finds in a video."""
    words = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", file, "-f", "ffmetadata", "-"]
    text = subprocess.run(words, capture_output=True, check=True).stdout.decode()
    return text.replace("\\\n", "\n").replace("\\=", "=").replace("\\;", ";").replace("\\#", "#")


def test_files_say_how_they_were_made(workdir):
    clips = {Path(f"a{suffix}"): noise(1) for suffix in media.SUFFIXES}
    media.write_media(clips, fps=8, metadata=FACTS)
    with Image.open("a.png") as image:
        assert image.info["parameters"] == TEXT
        assert json.loads(image.info["chipsparse"]) == FACTS
    with Image.open("a.gif") as image:
        assert image.info["comment"].decode() == TEXT
    for suffix in VIDEOS:
        found = tags(f"a{suffix}").replace("COMMENT", "comment").replace("DESCRIPTION", "descript")
        assert "a cat = x; #1\nand \\\\ a dög\nNegative prompt: blur\nSteps: 4" in found
        assert '={"prompt": "a cat = x; #1' in found


def test_a_prompt_may_be_longer_than_a_command_line(workdir):
    long = {"prompt": "a very long prompt " * 20_000}
    written("a.webm", noise(1), metadata=long)
    assert long["prompt"][: media.LONGEST_TAG - 100] in tags("a.webm")


def test_no_folder_is_named(generate, model_folder, workdir):
    generate("-o", "o.png", "--frames", "1", "--negative-prompt", "blue", "--seed", "7").fine()
    with Image.open("o.png") as image:
        facts = json.loads(image.info["chipsparse"])
        assert str(model_folder.parent) not in str(image.info)
    assert facts.pop("chipsparse").startswith("0.")
    assert facts == {
        "prompt": PROMPT,
        "negative_prompt": "blue",
        "steps": "4",
        "guidance_scale": "3.0",
        "seed": "7",
        "size": "48x32",
        "frames": "1",
        "model": model_folder.name,
        "dtype": "float32",
        "mode": "sparse",
        "profile": "chipsparse.yaml",
    }


# Reading.

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)
TURNS = {1: (RED, BLUE), 2: (BLUE, RED), 3: (BLUE, RED), 6: (RED, BLUE), 8: (BLUE, RED)}


@pytest.mark.parametrize("read", [read_image, lambda path: read_clip(path).frames[0]])
def test_every_reader_shows_what_a_viewer_does(tmp_path, read, recwarn):
    """Red at the left, blue at the right; in files that say so in other ways."""
    left = Image.new("RGB", (12, 8), RED)
    left.paste(BLUE, (6, 0, 12, 8))
    first, path = left.quantize(4), tmp_path / "a.png"
    red = first.getpixel((0, 0))
    half = bytes(255 - 127 * (index == red) for index in range(4))
    for image, words, expected in (
        (first, {"transparency": red}, (WHITE, BLUE)),
        (first, {"transparency": half}, ((255, 127, 127), BLUE)),
        (left, {"transparency": RED}, (WHITE, BLUE)),
        (left.convert("P"), {}, (RED, BLUE)),
        (Image.new("LA", (12, 8), (100, 128)), {}, ((177,) * 3, (177,) * 3)),
        (Image.new("1", (12, 8), 1), {}, (WHITE, WHITE)),
    ):
        image.save(path, **words)
        pixels = np.asarray(read(path))
        assert (tuple(pixels[1, 1]), tuple(pixels[-2, -2])) == expected
    for turn, expected in TURNS.items():
        exif = Image.Exif()
        exif[0x0112] = turn
        left.save(path, exif=exif)
        pixels = np.asarray(read(path))
        assert pixels.shape == ((12, 8, 3) if turn > 4 else (8, 12, 3))
        assert (tuple(pixels[1, 1]), tuple(pixels[-2, -2])) == expected
    assert recwarn.list == []


SIXTEEN = np.array([[0, 128, 129], [32639, 65406, 65407], [65535, 257, 514]], np.uint16)
EIGHT = [[0, 0, 1], [127, 254, 255], [255, 1, 2]]


def test_images_of_other_depths(tmp_path):
    for name in ("a.png", "a.tif", "a.pgm"):
        Image.fromarray(SIXTEEN).save(tmp_path / name)
    swapped = Image.frombytes("I;16B", (3, 3), SIXTEEN.astype(">u2").tobytes())
    swapped.save(tmp_path / "b.tif")
    for name in ("a.png", "a.tif", "a.pgm", "b.tif"):
        assert np.asarray(read_image(tmp_path / name))[..., 0].tolist() == EIGHT
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(SIXTEEN).save(tmp_path / "a.png", exif=turned)
    found = np.asarray(read_image(tmp_path / "a.png"))[..., 0]
    assert found.tolist() == np.rot90(EIGHT, -1).tolist()
    for kind, mode in ((np.int32, "I"), (np.float32, "F")):
        Image.fromarray(SIXTEEN.astype(kind)).save(tmp_path / "a.tif")
        said = rf"--image .*a\.tif does not have 8 bits per channel \(its mode: {mode}\)$"
        with pytest.raises(UserError, match=said):
            read_image(tmp_path / "a.tif")
    Image.new("RGB", (8, 8), RED).convert("CMYK").save(tmp_path / "a.jpg")
    assert np.abs(np.asarray(read_image(tmp_path / "a.jpg")) - np.int64(RED)).max() <= 3


def huge():
    """A PNG whose header alone says so: its pixels would take 10 GiB."""

    def chunk(kind, content):
        crc = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"")), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_files_that_cannot_be_read(workdir):
    """By the reader of clips, of `--image`, and by commands: a sentence, and no waiting."""
    Path("text.png").write_text("text")
    Path("huge.png").write_bytes(huge())
    Path("a.gif").write_bytes(b"GIF89a" + bytes(range(200)))
    Path("b.gif").write_bytes(b"GIF89a\xff" * 9)
    os.mkfifo("pipe.png")
    for name, said in {
        "text.png": "--image text.png is no image that can be read",
        "b.png": "--image b.png does not exist",
        ".": "--image . is a folder; name a file",
        "pipe.png": "--image pipe.png is no regular file",
    }.items():
        with pytest.raises(UserError, match=f"^{re.escape(said)}"):
            read_image(Path(name))
    for name, said in {
        "huge.png": "huge.png could not be read: Image size (3600000000 pixels) exceeds",
        "a.gif": "a.gif could not be read: ",
        "b.gif": "b.gif could not be read: ",
        "pipe.png": "pipe.png is no regular file",
    }.items():
        assert command("compare", name, name).sentence().startswith(said)
    assert command("report", "pipe.png", "-o", "g.html").sentence() == "pipe.png is no regular file"
    for suffix in VIDEOS:
        content = written(f"a{suffix}", noise(9)).read_bytes()
        Path(f"cut{suffix}").write_bytes(content[: len(content) * 3 // 4])
        with pytest.raises(UserError, match=f"cut{suffix} could not be read: "):
            read_clip(Path(f"cut{suffix}"))


# Panels and heat-maps.


def clip(value, frames=2, height=20, width=60):
    return np.full((frames, height, width, 3), value, np.uint8)


@pytest.mark.parametrize("width", [16, 48, 832])
def test_side_by_side(width):
    left, right = (clip(value, height=32, width=width) for value in (10, 200))
    joined = stack_panels([[Panel(left, "dense 12.3 s"), Panel(right, "sparse 4.5 s")]])
    assert joined.shape[::2] == (2, 2 * width + GAP_PIXELS)
    assert joined.shape[1] % 2 == 0
    np.testing.assert_array_equal(joined[:, -32:, :width], left)
    np.testing.assert_array_equal(joined[:, -32:, -width:], right)


def test_differences_and_their_colours():
    a = np.array([[[[10, 200, 30], [0, 0, 0], [255, 255, 255]]]], np.uint8)
    b = np.array([[[[13, 190, 30], [0, 0, 0], [0, 255, 255]]]], np.uint8)
    for first, second in ((a, b), (b, a)):  # of the channel that differs most
        np.testing.assert_array_equal(difference(first, second), [[[10, 0, 255]]])
    # Differences of 0, 51, ..., 255 after amplification have the colours of the table.
    steps = np.array([[[0, 51, 102, 153, 204, 255]]], np.uint8)
    for values, factor in ((steps, 1), (steps // 51, 51)):
        np.testing.assert_array_equal(heat_map(values, factor)[0, 0], COLOURS)
    # Halfway between black and (50, 10, 120), and beyond the scale.
    np.testing.assert_array_equal(heat_map(np.array([[[25]]], np.uint8), 1)[0, 0, 0], [25, 5, 59])
    np.testing.assert_array_equal(heat_map(np.array([[[32]]], np.uint8), 8)[0, 0, 0], [255] * 3)
    every = np.arange(256, dtype=np.uint8).reshape(1, 1, 256)
    assert (np.diff(heat_map(every, 1)[0, 0] @ [0.2126, 0.7152, 0.0722]) >= 0).all()


@pytest.mark.parametrize(
    ("largest", "factor"), [(0, 64), (3, 64), (4, 32), (31, 8), (32, 4), (127, 2), (128, 1)]
)
def test_the_factor_is_the_largest_that_leaves_the_scale_to_hardly_any_pixel(largest, factor):
    zeros = np.zeros((1, 4, 4), np.uint8)
    assert choose_factor([zeros, np.full((1, 4, 4), largest, np.uint8)]) == factor
    # One pixel in two hundred does not matter, two do.
    differences = np.full((1, 10, 20), largest, np.uint8)
    differences[0, 0, 0] = 255
    assert choose_factor([differences]) == factor
    differences[0, 1, 0] = 255
    assert choose_factor([differences]) == 1


def test_rows_of_a_reference_and_two_clips():
    others = [(clip(101), "A"), (clip(104), "B")]
    rows, factor = difference_rows((clip(100), "dense"), others, factor=None)
    assert factor == 32
    joined = stack_panels(rows)
    strip = (joined.shape[1] - 2 * 20 - GAP_PIXELS) // 2
    assert joined.shape == (2, 2 * (strip + 20) + GAP_PIXELS, 3 * 60 + 2 * GAP_PIXELS, 3)

    def at(row, column):
        top, left = strip + row * (strip + 20 + GAP_PIXELS), column * (60 + GAP_PIXELS)
        part = joined[:, top : top + 20, left : left + 60]
        assert len(np.unique(part.reshape(-1, 3), axis=0)) == 1
        return part[0, 0, 0].tolist()

    assert [at(0, column) for column in range(3)] == [[100] * 3, [101] * 3, [104] * 3]
    colours = heat_map(np.array([[[0, 1, 4]]], np.uint8), 32)[0, 0].tolist()
    assert [at(1, column) for column in range(3)] == colours
    assert joined[:, :strip, :60].max() > 200  # a label
    in_one_row = difference_rows((clip(9), "a"), [(clip(12), "b")], factor=5, in_one_row=True)
    assert [panel.label for panel in in_one_row[0][0]] == ["a", "b", "difference x5"]


def test_a_label_that_does_not_fit_loses_its_last_words():
    def strip(label):
        return stack_panels([[Panel(clip(50), label)]])[0, :-20]

    np.testing.assert_array_equal(strip("flow of manner free floors"), strip("flow of"))
    assert (strip("flow of") != strip("flow")).any()
    with pytest.raises(ValueError, match="differ in shape"):
        stack_panels([[Panel(clip(1), ""), Panel(clip(1, frames=1), "")]])
    with pytest.raises(ValueError, match="differ in length"):
        stack_panels([[Panel(clip(1), "")], []])
