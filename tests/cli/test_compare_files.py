"""`chipsparse compare` of two files."""

import re
from functools import partial

import imageio.v3 as iio
import numpy as np
import pytest
from PIL import Image

from chipsparse.cli.media import write as media
from chipsparse.cli.media.heat_map import heat_map
from chipsparse.cli.media.panels import GAP_PIXELS
from chipsparse.cli.media.read import read_clip
from chipsparse.experiments import quality
from tests.cli.conftest import command, nothing_written


@pytest.fixture
def compare(workdir):
    return partial(command, "compare")


@pytest.fixture
def fails(compare, workdir):
    """Runs the command and returns its one sentence; nothing may have been written."""

    def run(*arguments):
        with nothing_written(workdir):
            return compare(*arguments).sentence()

    return run


def gradient(frames=5, height=32, width=48):
    """Smooth, so that encoders change little."""
    time, row, column = np.mgrid[:frames, :height, :width]
    channels = (5 * column, 4 * row + 8 * time, np.full_like(row, 90))
    return np.stack(channels, axis=-1).clip(0, 255).astype(np.uint8)


def with_a_square(frames):
    """The same, but for 8x8 pixels of frame 3, 16 lighter in one channel."""
    changed = frames.copy()
    changed[3, 4:12, 8:16, 2] += 16
    return changed


@pytest.fixture
def pair(workdir):
    """`a.png` and `b.png`, five frames each."""
    a = gradient()
    b = with_a_square(a)
    media.write_media({workdir / "a.png": a, workdir / "b.png": b}, fps=8)
    return a, b


def test_json_has_every_frame_and_the_whole(compare, pair):
    content = compare("a.png", "b.png", "--json").json()
    a, b = (clip / 255 for clip in pair)
    assert (content["mode"], content["a"], content["b"]) == ("files", "a.png", "b.png")
    assert (content["frames"], content["height"], content["width"]) == (5, 32, 48)
    assert content["psnr_db"] == pytest.approx(quality.psnr(a, b))
    # 64 of 32 * 48 pixels in one of three channels of one of five frames.
    error = 64 / (32 * 48) / 3 / 5 * (16 / 255) ** 2
    assert content["psnr_db"] == pytest.approx(-10 * np.log10(error))
    assert content["ssim"] == pytest.approx(quality.ssim(a, b))
    assert content["flicker_a"] == pytest.approx(quality.flicker(a))
    assert content["flicker_b"] == pytest.approx(quality.flicker(b))
    assert content["flicker_change"] > 0
    assert (content["largest_difference"], content["identical"]) == (16, False)
    assert (content["lpips"], content["lossy"], content["clip"]) == (None, [], None)
    assert content["lpips_missing"]
    frames = content["per_frame"]
    assert [frame["frame"] for frame in frames] == [0, 1, 2, 3, 4]
    assert [frame["psnr_db"] is None for frame in frames] == [True, True, True, False, True]
    assert frames[3]["psnr_db"] == pytest.approx(-10 * np.log10(5 * error))
    assert [frame["ssim"] for frame in frames] == pytest.approx(quality.ssim_per_frame(a, b))
    for key, clip in (("flicker_a", a), ("flicker_b", b)):
        around = [quality.flicker(clip[first : first + 3]) for first in range(3)]
        values = [frame[key] for frame in frames]
        assert [values[0], values[4]] == [None, None]
        assert values[1:4] == pytest.approx(around)
    assert np.mean([frame["flicker_b"] for frame in frames[1:4]]) == pytest.approx(
        content["flicker_b"]
    )


def test_table(compare, pair):
    ran = compare("a.png", "b.png").fine()
    lines = [line.split() for line in ran.stdout.splitlines()]
    a, b = (clip / 255 for clip in pair)
    psnr, worst = quality.psnr(a, b), quality.psnr_per_frame(a, b)[3]
    assert ["PSNR", f"{psnr:.2f}", "dB", f"{worst:.2f}", "dB", "3"] in lines
    assert [
        "SSIM",
        f"{quality.ssim(a, b):.4f}",
        f"{quality.ssim(a[3:4], b[3:4]):.4f}",
        "3",
    ] in lines
    assert ["largest", "difference", "16", "of", "255"] in lines
    assert ["compared", "5", "frames", "of", "48x32", "pixels"] in lines
    assert re.search(r"LPIPS +not available: \w", ran.stdout)
    assert "encoder" not in ran.stdout


def test_the_same_pixels(compare, pair):
    ran = compare("a.png", "a.png")
    assert re.search(r"PSNR +the same +the same +all", ran.stdout)
    assert "the same in every frame" in ran.stdout
    content = compare("a.png", "a.png", "--json").json()
    assert (content["identical"], content["psnr_db"], content["ssim"]) == (True, None, 1.0)


def test_lpips_where_it_is_available(compare, pair, monkeypatch):
    from chipsparse.cli.generation.lpips import Lpips

    def measure(a, b):
        return float((a - b).abs().max())

    monkeypatch.setattr("chipsparse.cli.compare.files.find_lpips", lambda *_: Lpips(measure, None))
    content = compare("a.png", "b.png", "--json").json()
    assert content["lpips"] == pytest.approx(16 / 255 / 5)
    assert [frame["lpips"] for frame in content["per_frame"]] == pytest.approx(
        [0, 0, 0, 16 / 255, 0]
    )
    assert content["lpips_missing"] is None
    assert re.search(r"LPIPS +0.0125 +0.0627 +3", compare("a.png", "b.png").stdout)


def test_picture(compare, pair, workdir):
    clip = compare("a.png", "b.png", "-o", "out.png", "--json").json()["clip"]
    assert clip == {"files": [f"out-00{n}.png" for n in range(5)], "amplified": 8}
    shown = np.stack([iio.imread(file) for file in clip["files"]])
    assert shown.shape[2] == 3 * 48 + 2 * GAP_PIXELS
    left, middle, right = (shown[:, -32:, first : first + 48] for first in (0, 52, 104))
    np.testing.assert_array_equal(left, pair[0])
    np.testing.assert_array_equal(middle, pair[1])
    expected = np.zeros((5, 32, 48), np.uint8)
    expected[3, 4:12, 8:16] = 16
    np.testing.assert_array_equal(right, heat_map(expected, 8))
    assert (right[3, 4:12, 8:16] > 0).any()


def test_the_factor_is_shown_and_can_be_given(compare, pair, workdir):
    ran = compare("a.png", "b.png", "-o", "out.gif", "--amplify", "3").fine()
    assert "difference x3: white is 85 of 255 or more" in ran.stdout
    assert "out.gif" in ran.stdout
    with Image.open("out.gif") as image:
        assert image.n_frames == 5


def test_the_picture_of_videos_has_their_rate(compare, workdir):
    a = gradient()
    media.write_media({workdir / "a.mp4": a, workdir / "b.mp4": with_a_square(a)}, fps=8)
    compare("a.mp4", "b.mp4", "-o", "out.mp4").fine()
    assert iio.immeta("out.mp4")["fps"] == 8.0
    assert iio.imread("out.mp4").shape[0] == 5
    compare("a.mp4", "b.mp4", "-o", "fast.mp4", "--fps", "24").fine()
    assert iio.immeta("fast.mp4")["fps"] == 24.0


def test_lossy_formats_are_named(compare, pair, workdir):
    media.write_media({workdir / "a.mp4": pair[0], workdir / "a.gif": pair[0]}, fps=8)
    for file in ("a.mp4", "a.gif"):
        ran = compare("a.png", file).fine()
        assert f"{file}: part of the difference may be the encoder's" in ran.stdout
        content = compare("a.png", file, "--json").json()
        assert content["lossy"] == [file]
        assert 30 < content["psnr_db"] < 60


def test_a_folder_of_frames_in_the_order_of_their_numbers(compare, workdir):
    frames = gradient(frames=12)
    (workdir / "frames").mkdir()
    for index, frame in enumerate(frames):
        iio.imwrite(workdir / "frames" / f"f{index}.png", frame)
    media.write_media({workdir / "a.png": frames}, fps=8)
    content = compare("a.png", "frames", "--json").json()
    assert (content["identical"], content["frames"]) == (True, 12)


def test_images(compare, workdir):
    a = gradient(frames=1)
    media.write_media({workdir / "a.png": a, workdir / "b.png": a ^ 1}, fps=8)
    ran = compare("a.png", "b.png", "-o", "out.png", "--json")
    content = ran.json()
    assert content["psnr_db"] == pytest.approx(20 * np.log10(255))
    assert (content["flicker_a"], content["flicker_change"]) == (None, None)
    assert content["clip"]["files"] == ["out.png"]
    table = compare("a.png", "b.png").stdout
    assert "1 frame of 48x32" in table
    assert "flicker" not in table


def test_gray_and_transparent_images_are_read_as_colours(workdir):
    gray = Image.fromarray(np.array([[0, 128], [255, 7]], np.uint8))
    gray.save("gray.png")
    np.testing.assert_array_equal(read_clip(workdir / "gray.png").frames[0, :, :, 1], gray)
    gray.convert("RGBA").save("alpha.png")
    np.testing.assert_array_equal(
        read_clip(workdir / "alpha.png").frames, read_clip(workdir / "gray.png").frames
    )


@pytest.mark.parametrize("suffix", [".mp4", ".webm", ".gif", ".png"])
def test_reading_gives_what_was_written(workdir, suffix):
    path = workdir / f"clip{suffix}"
    written = media.write_media({path: gradient(frames=7)}, fps=10)[path]
    clip = read_clip(path)
    assert clip.frames.dtype == np.uint8
    np.testing.assert_allclose(clip.frames.astype(int), gradient(frames=7), atol=12)
    assert np.abs(clip.frames.astype(int) - gradient(frames=7)).mean() < 3
    assert clip.fps == (None if suffix == ".png" else 10)
    assert (clip.files, clip.lossy) == (written, suffix != ".png")


# Mistakes


def test_other_sizes_and_lengths(fails, workdir):
    media.write_media({workdir / "a.gif": gradient()}, fps=8)
    media.write_media({workdir / "b.gif": gradient(frames=4)}, fps=8)
    media.write_media({workdir / "c.gif": gradient(width=40)}, fps=8)
    rest = "; only clips of one size and length can be compared"
    assert fails("a.gif", "b.gif") == "a.gif has 5 frames and b.gif has 4" + rest
    assert fails("a.gif", "c.gif") == "a.gif has 48x32 pixels and c.gif has 40x32" + rest


@pytest.mark.parametrize("name", ["no.mp4", "no.gif", "no.png", "folder/no.png"])
def test_no_such_file(fails, pair, name):
    assert fails("a.png", name) == f"the file {name} does not exist"


def test_what_cannot_be_read(fails, pair, workdir):
    (workdir / "empty").mkdir()
    assert fails("a.png", "empty") == "the folder empty has no .png file"
    for name in ("bad.mp4", "bad.gif", "bad.png"):
        (workdir / name).write_text("no pixels")
        assert fails("a.png", name).startswith(f"{name} ")
    assert fails("a.png", "b.avi") == (
        "b.avi is no .mp4, .webm, .gif, .png or folder of .png; nothing else can be read"
    )
    Image.fromarray(np.zeros((8, 8), np.uint16)).save("deep.png")
    assert "does not have 8 bits per channel" in fails("deep.png", "deep.png")


def test_frames_of_a_folder_differ_in_size(fails, workdir):
    (workdir / "frames").mkdir()
    for index, size in enumerate((8, 9)):
        iio.imwrite(workdir / "frames" / f"{index}.png", np.zeros((8, size, 3), np.uint8))
    assert fails("frames", "frames") == (
        "the frames differ in size: frames/0.png has 8x8 pixels and frames/1.png has 9x8"
    )


def test_the_output_must_not_replace_what_is_compared(fails, pair):
    assert fails("a.png", "b.png", "-o", "a.png") == (
        "--output a.png would replace a-000.png, which is compared"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["a.png", "b.png", "-o", "out.avi"], "--output out.avi has the suffix .avi; use one of"),
        (["a.png", "b.png", "--amplify", "0"], "--amplify 0 is too small; it must be at least 1"),
        (["a.png", "b.png", "--fps", "0"], "--fps 0 is too small; it must be at least 1"),
        (["a.png", "b.png", "-o", "o.gif", "--fps", "60"], "--fps 60 is too fast for a GIF"),
        (["a.png", "b.png", "--steps", "4"], "--steps is about generations; A and B are taken for"),
        (["a.png", "b.png", "--seed", "1"], "--seed is about generations; A and B are taken for"),
        (["a.png", "b.png", "--device", "cpu"], "--device is about generations"),
        (["a.png", "dense"], "dense is a config and a.png is taken for a file; compare two files"),
        (
            ["b.yaml", "a.png"],
            "b.yaml is a config and a.png is taken for a file; compare",
        ),
        (["dense", "dense"], "both are the stock model; give a config to compare it with"),
    ],
)
def test_bad_options(fails, pair, arguments, sentence):
    assert fails(*arguments).startswith(sentence)
