"""Writing and joining clips."""

import imageio.v3 as iio
import numpy as np
import pytest
from PIL import Image

from chipsparse.cli.media import write as media
from chipsparse.cli.media.panels import GAP_PIXELS, Panel, join_panels

COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (128, 128, 128), (20, 60, 200)]


def colour_bars(frames=3, height=32):
    bars = np.repeat(np.array(COLOURS, dtype=np.uint8), 16, axis=0)
    return np.broadcast_to(bars, (frames, height, *bars.shape)).copy()


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_colours_survive(tmp_path, suffix):
    path = tmp_path / f"bars{suffix}"
    assert media.write_media({path: colour_bars()}, fps=16) == {path: [path]}
    centres = iio.imread(path)[:, 16, 8::16, :3].astype(int)
    np.testing.assert_allclose(centres, [COLOURS] * len(centres), atol=4)


def test_odd_sides_are_filled_up_for_mp4(tmp_path):
    path = tmp_path / "odd.mp4"
    media.write_media({path: colour_bars()[:, :31, :95]}, fps=16)
    assert iio.imread(path).shape == (3, 32, 96, 3)


@pytest.mark.parametrize(("fps", "total_ms"), [(16, 1000), (30, 530), (7, 2290)])
def test_gif_lasts_as_long_as_the_clip(tmp_path, fps, total_ms):
    generator = np.random.default_rng(0)
    frames = generator.integers(0, 256, (16, 16, 16, 3), dtype=np.uint8)
    media.write_media({tmp_path / "clip.gif": frames}, fps=fps)
    with Image.open(tmp_path / "clip.gif") as image:
        durations = []
        for index in range(image.n_frames):
            image.seek(index)
            durations.append(image.info["duration"])
    assert len(durations) == 16
    assert sum(durations) == total_ms
    assert max(durations) - min(durations) <= 10


def test_png_numbers_sort(tmp_path):
    frames = np.zeros((1001, 2, 2, 3), dtype=np.uint8)
    written = media.write_media({tmp_path / "out.png": frames}, fps=1)
    files = written[tmp_path / "out.png"]
    assert (files[0].name, files[-1].name) == ("out-0000.png", "out-1000.png")
    assert files == sorted(files)


@pytest.mark.parametrize("width", [16, 48, 832])
def test_side_by_side(width):
    left = np.full((2, 32, width, 3), 10, dtype=np.uint8)
    right = np.full((2, 32, width, 3), 200, dtype=np.uint8)
    joined = join_panels([Panel(left, "dense 12.3 s"), Panel(right, "sparse 4.5 s")])
    assert joined.shape[0] == 2
    assert joined.shape[2] == 2 * width + GAP_PIXELS
    assert joined.shape[1] % 2 == 0
    np.testing.assert_array_equal(joined[:, -32:, :width], left)
    np.testing.assert_array_equal(joined[:, -32:, -width:], right)
