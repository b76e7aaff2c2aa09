"""Files of clips: written whole or not at all, read as a viewer shows them; panels, heat-maps."""

import errno
import json
import os
import re
import resource
import subprocess
from contextlib import nullcontext
from pathlib import Path

import imageio.v3 as iio
import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image, ImageSequence

from chipsparse.cli.errors import UserError
from chipsparse.cli.media import write as media
from chipsparse.cli.media.formats import SUFFIXES
from chipsparse.cli.media.panels import COLOURS, choose_factor, difference, heat_map, stack_panels
from chipsparse.cli.media.read import read_clip, read_image
from chipsparse.common.files import IMAGES
from tests.cli.conftest import command, names

BARS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (128, 128, 128), (20, 60, 200)]


def noise(frames=5, height=32, width=48):
    """Return frames that no encoder makes small."""
    return np.random.default_rng(0).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def written(name, frames, **options):
    media.write_media({Path(name): frames}, fps=8, **options)
    return Path(name)


@pytest.mark.parametrize("name", ["a.mp4", "a.gif"])
def test_colours_survive(workdir, name):
    bars = np.repeat(np.array(BARS, dtype=np.uint8), 16, axis=0)
    written(name, np.broadcast_to(bars, (3, 32, *bars.shape)).copy())
    centres = iio.imread(name)[:, 16, 8::16, :3].astype(int)
    np.testing.assert_allclose(centres, [BARS] * len(centres), atol=4)


@pytest.mark.parametrize(("fps", "total_ms"), [(16, 1000), (7, 2290)])
def test_gif_lasts_as_long_as_the_clip(workdir, fps, total_ms):
    media.write_media({Path("a.gif"): noise(16, 16, 16)}, fps=fps)
    with Image.open("a.gif") as image:
        durations = [frame.info["duration"] for frame in ImageSequence.Iterator(image)]
    assert (len(durations), sum(durations)) == (16, total_ms)
    assert max(durations) - min(durations) <= 10
    assert read_clip(Path("a.gif")).fps == pytest.approx(16_000 / total_ms)


def test_videos_have_even_sides_and_a_larger_crf_makes_them_smaller(workdir):
    assert read_clip(written("a.mp4", noise(3, 31, 95))).frames.shape == (3, 32, 96, 3)
    for suffix, most in ((".mp4", 51), (".webm", 63)):
        name = f"a{suffix}"
        sizes = [written(name, noise(8), crf=crf).stat().st_size for crf in (0, None, most)]
        assert sizes[0] > sizes[1] > sizes[2]


def test_an_odd_side_is_lengthened_at_its_end(workdir):
    frames = np.zeros((2, 31, 95, 3), np.uint8)
    frames[:, 16:, 48:] = 255
    read = read_clip(written("a.mp4", frames)).frames
    expected = np.pad(frames, ((0, 0), (0, 1), (0, 1), (0, 0)), mode="edge")
    assert np.abs(read.astype(int) - expected).max() <= 8


def test_a_webp_is_exact_and_a_jpeg_close(workdir):
    smooth = np.indices((32, 48, 3)).sum(axis=0, dtype=np.uint8)[None]
    for name, most in (("a.webp", 0), ("a.jpg", 2), ("a.jpeg", 2)):
        clip = read_clip(written(name, smooth))
        assert np.abs(clip.frames.astype(int) - smooth).max() <= most, name
        assert clip.lossy == bool(most)
    Image.fromarray(smooth[0]).save("lossy.webp")
    assert read_clip(Path("lossy.webp")).lossy
    assert read_image(Path("a.jpg")).size == (48, 32)


def test_several_images_are_numbered(workdir):
    for name in ("a.jpg", "a.webp"):
        written(name, noise(2))
        assert read_clip(Path(name)).frames.shape == (2, 32, 48, 3)
    assert names(".") == ["a-000.jpg", "a-000.webp", "a-001.jpg", "a-001.webp"]


def test_frames_in_png_files(workdir):
    many = np.zeros((1001, 2, 2, 3), dtype=np.uint8)
    files = media.write_media({Path("many.png"): many}, fps=1)[Path("many.png")]
    assert (files[0].name, files[-1].name) == ("many-0000.png", "many-1000.png")
    for frames in (noise(7), noise(7)[::-1][:5]):  # those that a longer clip left are not read
        written("a.png", frames)
        np.testing.assert_array_equal(read_clip(Path("a.png")).frames, frames)
    for number in (2, 5, 6):
        Path(f"a-00{number}.png").unlink()
    with pytest.raises(UserError, match=r"a\.png has 4 of its 5 frames; the others are missing"):
        read_clip(Path("a.png"))


STEMS = (
    "12:30",
    "-x",
    "a%03d",
    "file:x",
    "concat:a",
    "a|b",
    "pipe:1",
    "%d",
    "a b'\"c",
    "[0]*?",
    "~",
)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_names_that_ffmpeg_would_take_for_something_else(workdir, suffix):
    for number, stem in enumerate(STEMS):
        frames = np.full((2, 16, 16, 3), 10 * number, np.uint8)
        frames[1] += 100  # else a GIF holds one
        read = read_clip(written(f"{stem}{suffix}", frames)).frames
        assert np.abs(read.astype(int) - frames).max() <= 3
    several = 2 if suffix in IMAGES else 1
    assert len(names(workdir)) == several * len(STEMS)


PLAYLISTS = {
    "concat.mp4": "ffconcat version 1.0\nfile secret.mp4\n",
    "concat.webm": "ffconcat version 1.0\nfile secret.mp4\n",
    "hls.mp4": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:1,\nsecret.mp4\n#EXT-X-ENDLIST\n",
}


@pytest.mark.parametrize("name", PLAYLISTS)
def test_a_playlist_by_the_name_of_a_video_is_not_followed(workdir, name):
    written("secret.mp4", noise())
    Path(name).write_text(PLAYLISTS[name])
    with pytest.raises(UserError, match=f"{name} could not be read: Could not load meta"):
        read_clip(Path(name))


# What stands in place of ffmpeg, and what is said of it.
ENCODERS = {
    'cat > /dev/null; echo "[out#0/mp4 @ 0x5] No space left" >&2; exit 228': "No space left",
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
    for suffix in SUFFIXES:  # `ulimit -f` ends ffmpeg by its signal
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


@pytest.mark.parametrize(
    ("name", "raised", "said", "content"),
    [
        ("a.json", None, "", "new"),
        ("a.json", ZeroDivisionError, "on the way", "older"),
        ("no/a.json", UserError, "--report no/a.json could not be written: No such", "older"),
    ],
)
def test_a_text_file_is_written_whole_or_not_at_all(workdir, name, raised, said, content):
    Path("a.json").write_text("older")
    with (
        pytest.raises(raised, match=said) if raised else nullcontext(),
        media.written_whole("--report", Path(name)) as file,
    ):
        file.write_text("new")
        if raised:
            raise raised("on the way")
    assert (names(workdir), Path("a.json").read_text()) == (["a.json"], content)


FACTS = {"prompt": "a cat = x; #1\nand \\ a dög", "negative_prompt": "blur", "steps": "4"}
FACTS |= {"guidance_scale": "3.0", "model": "tiny, wan", "chipsparse": "0.1.0"}
TEXT = (
    "a cat = x; #1\nand \\ a dög\nNegative prompt: blur\n"
    'Steps: 4, CFG scale: 3.0, Model: "tiny, wan", Version: chipsparse 0.1.0'
)


def tags(file):
    """Return what ffmpeg finds in a video."""
    words = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", file, "-f", "ffmetadata", "-"]
    text = subprocess.run(words, capture_output=True, check=True).stdout.decode()
    return re.sub(r"\\([\n=;#\\])", r"\1", text)


def test_files_say_how_they_were_made(workdir):
    clips = {Path(f"a{suffix}"): noise(1) for suffix in SUFFIXES}
    media.write_media(clips, fps=8, metadata=FACTS)
    with Image.open("a.png") as image:
        assert image.info["parameters"] == TEXT
        assert json.loads(image.info["chipsparse"]) == FACTS
    with Image.open("a.gif") as image:
        assert image.info["comment"].decode() == TEXT
    for name in ("a.jpg", "a.jpeg", "a.webp"):
        with Image.open(name) as image:
            comment = image.getexif().get_ifd(media.EXIF_FOLDER)[media.USER_COMMENT]
        assert comment.removeprefix(b"UNICODE\0").decode("utf-16-be") == TEXT
    for name in ("a.mp4", "a.webm"):
        assert f"comment={TEXT}" in tags(name).replace("COMMENT", "comment")
        assert '={"prompt": "a cat = x; #1' in tags(name)
    long = {"prompt": "a very long prompt " * 20_000}  # longer than a command line may be
    for name in ("a.webm", "a.jpg", "a.webp"):
        written(name, noise(1), metadata=long)
    assert long["prompt"][: media.LONGEST_TAG - 100] in tags("a.webm")


RED = (255, 0, 0)
BLUE = (0, 0, 255)
WHITE = (255, 255, 255)


def turned(by):
    exif = Image.Exif()
    exif[0x0112] = by
    return {"exif": exif}


@pytest.mark.parametrize("read", [read_image, lambda path: read_clip(path).frames[0]])
def test_every_reader_shows_what_a_viewer_does(tmp_path, read, recwarn):
    """Red at the left, blue at the right; in files that say so in other ways."""
    left = Image.new("RGB", (12, 8), RED)
    left.paste(BLUE, (6, 0, 12, 8))
    indexed = left.quantize(4)
    path = tmp_path / "a.png"
    red = indexed.getpixel((0, 0))
    half = bytes(128 if index == red else 255 for index in range(4))
    sixteen = np.repeat(np.array([[0, 129], [65406, 65535]], np.uint16), 4, axis=0)
    for image, words, expected in (
        (indexed, {"transparency": red}, (WHITE, BLUE)),
        (indexed, {"transparency": half}, ((255, 127, 127), BLUE)),
        (left, {"transparency": RED}, (WHITE, BLUE)),
        (left.convert("P"), {}, (RED, BLUE)),
        (Image.new("LA", (12, 8), (100, 128)), {}, ((177,) * 3, (177,) * 3)),
        (Image.new("1", (12, 8), 1), {}, (WHITE, WHITE)),
        (Image.fromarray(sixteen), {}, ((1,) * 3, (254,) * 3)),
        (Image.fromarray(sixteen), turned(3), ((254,) * 3, (1,) * 3)),
        (left, turned(1), (RED, BLUE)),
        (left, turned(2), (BLUE, RED)),
        (left, turned(6), (RED, BLUE)),
        (left, turned(8), (BLUE, RED)),
    ):
        image.save(path, **words)
        pixels = np.asarray(read(path))
        assert (tuple(pixels[1, 1]), tuple(pixels[-2, -2])) == expected
    assert pixels.shape == (12, 8, 3)
    assert recwarn.list == []


def test_files_that_cannot_be_read(workdir, monkeypatch):
    """By the reader of clips, of `--image`, and by commands: a sentence, and no waiting."""
    Path("text.png").write_text("text")
    written("huge.png", noise(1))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    Path("a.gif").write_bytes(b"GIF89a" + bytes(range(200)))
    Image.fromarray(np.ones((3, 3), np.float32)).save("float.tif")
    os.mkfifo("pipe.png")
    for name, said in {
        "text.png": "--image text.png could not be read: cannot identify image file",
        "float.tif": "--image float.tif could not be read: it has 32 bits per channel",
        ".": "--image . is a folder; name a file",
        "pipe.png": "--image pipe.png is no regular file",
    }.items():
        with pytest.raises(UserError, match=f"^{re.escape(said)}"):
            read_image(Path(name))
    for name, said in {
        "huge.png": "huge.png could not be read: Image size (1536 pixels) exceeds",
        "a.gif": "a.gif could not be read: ",
        "pipe.png": "the file pipe.png is no regular file",
    }.items():
        assert command("compare", name, name).sentence().startswith(said)
    said = command("report", "pipe.png", "-o", "g.html").sentence()
    assert said == "the file pipe.png is no regular file"
    for name in ("a.mp4", "a.webm"):
        content = written(name, noise(9)).read_bytes()
        Path(f"cut-{name}").write_bytes(content[: len(content) * 3 // 4])
        with pytest.raises(UserError, match=f"cut-{name} could not be read: "):
            read_clip(Path(f"cut-{name}"))


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


@pytest.mark.parametrize(("largest", "factor"), [(3, 64), (4, 32), (127, 2), (128, 1)])
def test_the_factor_is_the_largest_that_leaves_the_scale_to_hardly_any_pixel(largest, factor):
    # One pixel in two hundred does not matter, two do.
    differences = np.full((1, 10, 20), largest, np.uint8)
    differences[0, 0, 0] = 255
    assert choose_factor([np.ones_like(differences), differences]) == factor  # of several clips
    differences[0, 1, 0] = 255
    assert choose_factor([differences]) == 1


def test_a_label_that_does_not_fit_loses_its_last_words():
    def strip(label):
        return stack_panels([[(np.full((1, 20, 60, 3), 50, np.uint8), label)]])[0, :-20]

    np.testing.assert_array_equal(strip("flow of manner free floors"), strip("flow of"))
    assert (strip("flow of") != strip("flow")).any()
