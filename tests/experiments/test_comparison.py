"""`chipsparse.compare`, the forms of frames that it takes, and bounds."""

import math
import types
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from PIL import Image

import chipsparse
from chipsparse.cli.media.read import read_frames
from chipsparse.cli.media.write import write_media
from chipsparse.experiments import quality
from chipsparse.experiments.comparison import Bounds
from chipsparse.experiments.frames import frames_of
from chipsparse.experiments.lpips import Lpips

GENERATOR = np.random.default_rng(0)
CLIP = GENERATOR.integers(0, 256, (5, 16, 20, 3), dtype=np.uint8)
IMAGES = [Image.fromarray(frame) for frame in CLIP]
FLOATS = CLIP.astype(np.float32) / 255
TENSOR = torch.from_numpy(FLOATS).permute(0, 3, 1, 2)  # [F, C, H, W]

FORMS = {
    "PIL list": IMAGES,
    "nested PIL": [IMAGES],
    "uint8 array": CLIP,
    "read-only array": np.broadcast_to(CLIP, CLIP.shape),
    "float array": FLOATS,
    "float64 array": CLIP / 255,
    "batched array": FLOATS[None],
    "list of arrays": list(FLOATS),
    "channels first array": np.moveaxis(FLOATS, 3, 1),
    "tensor": TENSOR,
    "tensor with gradient": TENSOR.clone().requires_grad_(),
    "batched tensor": TENSOR[None],
    "channels last tensor": TENSOR.permute(0, 2, 3, 1),
    "list of tensors": list(TENSOR),
    "list of a clip": [TENSOR],
    "output of frames": types.SimpleNamespace(frames=[IMAGES]),
    "output of images": types.SimpleNamespace(images=TENSOR),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_frames(form):
    np.testing.assert_array_equal(frames_of(FORMS[form]), CLIP)


def test_single_images_grey_and_transparent_ones():
    for image in (IMAGES[0], CLIP[0], TENSOR[0], [IMAGES[0]], [[IMAGES[0]]]):
        np.testing.assert_array_equal(frames_of(image), CLIP[:1])
    grey = CLIP[0, ..., 0]
    for image in (grey, grey[..., None], torch.from_numpy(grey)[None], Image.fromarray(grey)):
        np.testing.assert_array_equal(frames_of(image)[0], np.repeat(grey[..., None], 3, axis=2))
    clear = np.zeros((16, 20, 4), np.uint8)
    for image in (clear, clear / 255, Image.fromarray(clear)):
        assert (frames_of(image) == 255).all()
    assert (frames_of(torch.full((2, 3, 4, 5), 0.5, dtype=torch.bfloat16)) == 128).all()
    # Frames of three pixels a side: arrays have their channels last, tensors first.
    small = np.arange(3 * 3 * 3 * 3, dtype=np.uint8).reshape(3, 3, 3, 3)
    np.testing.assert_array_equal(frames_of(small), small)
    np.testing.assert_array_equal(frames_of(torch.from_numpy(small).permute(0, 3, 1, 2)), small)


def test_files_of_every_kind(tmp_path):
    write_media({tmp_path / "out.png": CLIP, tmp_path / "out.gif": CLIP}, fps=8)
    files = sorted(tmp_path.glob("out-*.png"))
    for source in (tmp_path / "out.png", str(tmp_path), files, [str(file) for file in files]):
        np.testing.assert_array_equal(read_frames(source), CLIP)
    with Image.open(tmp_path / "out.gif") as animation:
        animation.seek(2)
        np.testing.assert_array_equal(frames_of(animation), read_frames(tmp_path / "out.gif"))
        assert animation.tell() == 2
    for suffix in ("mp4", "webm"):
        write_media({tmp_path / f"out.{suffix}": CLIP}, fps=8)
        result = chipsparse.compare(tmp_path / f"out.{suffix}", IMAGES)
        assert len(result.frames) == 5
        assert 5 < result.psnr < 60


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "there is no frame"),
        ([IMAGES, IMAGES], r"a batch of 2 clips; give one of them"),
        (np.stack([FLOATS, FLOATS]), r"batch of 2 clips"),
        ([IMAGES[0], IMAGES[1].resize((8, 8))], "differ in size: 20x16 and 8x8"),
        (FLOATS * 2 - 1, r"floats must lie in \[0, 1\], got -1 to 1"),
        (np.full((1, 4, 4, 3), np.nan), "floats must lie"),
        (CLIP.astype(np.int64), "floats in .* or uint8, got int64"),
        (np.zeros((2, 7, 8, 9)), "no axis of 1, 3 or 4 channels"),
        (np.zeros(4), r"got the shape \(4,\)"),
        (np.zeros((0, 4, 4, 3)), r"got the shape \(0, 4, 4, 3\)"),
        (7, "got int"),
        (None, "got NoneType"),
        ("missing.png", "missing.png"),
        ([IMAGES[0], "a.png"], "got str"),
    ],
)
def test_what_is_no_clip_is_refused(source, message):
    with pytest.raises(ValueError, match=message):
        chipsparse.compare(CLIP, source)


@pytest.mark.parametrize(
    ("other", "both"),
    [
        (CLIP[:3], "a has 5 frames and b has 3"),
        (CLIP[:, :, :8], "a has 20x16 pixels and b has 8x16"),
    ],
)
def test_other_sizes_are_refused_with_both(other, both):
    with pytest.raises(ValueError, match=both):
        chipsparse.compare(CLIP, other)


def test_a_comparison_is_what_the_metrics_say():
    b = CLIP.copy()
    b[3, 4:12, 8:16] ^= 16
    b[1, 0, 0, 0] ^= 1
    made = chipsparse.compare(IMAGES, torch.from_numpy(b / 255).permute(0, 3, 1, 2))
    assert made.psnr == pytest.approx(quality.psnr(CLIP / 255, b / 255))
    assert made.ssim == pytest.approx(quality.ssim(CLIP / 255, b / 255))
    assert made.flicker == pytest.approx(255 * quality.flicker(b / 255))
    assert made.flicker_a == pytest.approx(255 * quality.flicker(CLIP / 255))
    assert made.flicker_change == pytest.approx(made.flicker - made.flicker_a)
    assert (made.height, made.width, made.max_pixel, made.lpips) == (16, 20, 16, None)
    assert [frame.max_pixel for frame in made.frames] == [0, 1, 0, 16, 0]
    assert [math.isinf(frame.psnr) for frame in made.frames] == [True, False, True, False, True]
    assert [frame.flicker is None for frame in made.frames] == [True, False, False, False, True]
    assert made.frames[3].psnr == pytest.approx(quality.psnr(CLIP[3:4] / 255, b[3:4] / 255))
    assert made.worst is made.frames[3]
    assert made.worst_by("ssim") is made.worst_by("max_pixel") is made.worst
    assert made.worst_by("lpips") is None
    assert not made.identical
    with pytest.raises(FrozenInstanceError):
        made.psnr = 0.0


def test_identical_clips_small_frames_and_images():
    same = chipsparse.compare(CLIP, IMAGES)
    assert (same.identical, same.psnr, same.max_pixel, same.ssim) == (True, math.inf, 0, 1.0)
    assert {frame.psnr for frame in same.frames} == {math.inf}
    small = chipsparse.compare(CLIP[0, :8], CLIP[0, :8])
    assert (small.ssim, small.flicker, small.flicker_change) == (None, None, None)
    assert small.worst.frame == 0


def test_lpips_is_measured_where_asked_for_and_there(monkeypatch):
    where = "chipsparse.cli.compare.clips.find_lpips"
    monkeypatch.setattr(where, lambda *_: Lpips(lambda a, b: float((a - b).abs().max()), None))
    made = chipsparse.compare(CLIP, 255 - CLIP, lpips=True)
    assert made.lpips == pytest.approx(np.mean([frame.lpips for frame in made.frames]))
    monkeypatch.setattr(where, lambda *_: Lpips(None, "torchmetrics is not installed"))
    with pytest.raises(ValueError, match="torchmetrics is not installed"):
        chipsparse.compare(CLIP, CLIP, lpips=True)


def test_bounds_hold_for_the_worst_frame():
    b = CLIP.copy()
    b[3] ^= 8
    found = chipsparse.compare(CLIP, b)
    frame = found.frames[3]
    assert Bounds().broken(found) == []
    on_edge = Bounds(min_psnr=frame.psnr, min_ssim=frame.ssim, max_pixel=8, max_flicker=255)
    assert on_edge.broken(found) == []
    for name, value in (
        ("min_psnr", frame.psnr + 0.01),  # the whole clip keeps it
        ("min_ssim", frame.ssim + 1e-6),
        ("max_pixel", 7),
        ("max_flicker", 0),
    ):
        (broken,) = Bounds(**{name: value}).broken(found)
        assert broken.bound == name
        assert f"in frame {broken.frame} breaks" in broken.text
        if name != "max_flicker":  # that of a neighbour may change more
            assert broken.frame == 3
    assert frame.psnr + 0.01 < found.psnr
    assert Bounds(min_psnr=30, max_pixel=4).text == (
        "PSNR >= 30 dB, largest pixel difference <= 4 of 255"
    )
    assert Bounds(max_flicker=0).broken(chipsparse.compare(CLIP[:1], CLIP[:1])) == []
    with pytest.raises(ValueError, match="LPIPS was not measured"):
        Bounds(max_lpips=0.1).broken(found)


@pytest.mark.parametrize(
    "wrong",
    [{"min_ssim": 1.1}, {"max_pixel": 256}, {"min_psnr": -1}, {"max_lpips": math.nan}],
)
def test_bounds_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be from 0"):
        Bounds(**wrong)
