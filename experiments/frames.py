"""Frames as pipelines give them, in one form: uint8 ``[F, H, W, 3]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from PIL import Image, ImageOps, ImageSequence

# An image, an array, a tensor, a list of them, a batch of one, or a pipeline's output.
Frames: TypeAlias = Any

CHANNELS = (1, 3, 4)  # grey, RGB, RGBA
HALF_STEP = 0.5 / 255  # by which rounding may leave [0, 1]


def frames_of(source: Frames) -> np.ndarray:
    """Return frames in memory as uint8 ``[F, H, W, 3]``.

    Args:
        source: A PIL image, an array ``[H, W, C]`` or ``[F, H, W, C]``, a tensor
            ``[C, H, W]`` or ``[F, C, H, W]`` (or with the channels last), a list of any of them,
            or a pipeline's output. A batch of one clip may stand around them. Floats lie in
            [0, 1]; whole numbers are uint8. Transparent pixels are laid over white.

    Raises:
        ValueError: There is no frame, several clips, frames of several sizes, or values that are
            no pixels.
    """
    import torch  # here, since the command refuses images before it loads PyTorch

    for name in ("frames", "images"):
        if hasattr(source, name):
            return frames_of(getattr(source, name))
    if isinstance(source, Image.Image):
        shown = source.tell()
        animation = ImageSequence.Iterator(source)
        frames = np.stack([np.asarray(rgb_image(frame)) for frame in animation])
        source.seek(shown)
        return frames
    if isinstance(source, torch.Tensor):
        values = source.detach().cpu()
        floats = values.float() if values.is_floating_point() else values  # NumPy lacks bfloat16
        return _pixels(floats.numpy(), first=True)
    if isinstance(source, np.ndarray):
        return _pixels(source, first=False)
    if isinstance(source, Sequence) and not isinstance(source, (str, bytes)):
        return _joined(source)
    raise ValueError(f"frames are images, arrays or tensors, got {type(source).__name__}")


def rgb_image(image: Image.Image) -> Image.Image:
    """Return an image as a viewer shows it: upright, in RGB, transparent parts white.

    One with 16 bits per channel is rounded to 8; of one with 32, nobody knows what white is.
    """
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I;16"):
        upright = Image.fromarray(np.rint(np.asarray(upright) / 257).astype(np.uint8))
    if upright.mode in ("I", "F"):
        raise ValueError("it has 32 bits per channel; save it with 8")
    if upright.has_transparency_data:
        coloured = upright.convert("RGBA")
        white = Image.new("RGBA", coloured.size, "white")
        return Image.alpha_composite(white, coloured).convert("RGB")
    return upright.convert("RGB")


def size_text(frame: np.ndarray) -> str:
    """Return width and height of a frame ``[H, W, 3]``, for people."""
    return f"{frame.shape[1]}x{frame.shape[0]}"


def check_fit(a: np.ndarray, b: np.ndarray, *, names: tuple[str, str] = ("a", "b")) -> None:
    """Raise `ValueError` where two clips ``[F, H, W, 3]`` differ in length or size."""
    for what, of_a, of_b in (
        ("frames", str(len(a)), str(len(b))),
        ("pixels", size_text(a[0]), size_text(b[0])),
    ):
        if of_a != of_b:
            raise ValueError(
                f"{names[0]} has {of_a} {what} and {names[1]} has {of_b}; only clips of one size "
                "and length can be compared",
            )


def joined(clips: Sequence[np.ndarray]) -> np.ndarray:
    """Return clips of one size, one after the other; raise `ValueError` for several sizes."""
    if not clips:
        raise ValueError("there is no frame")
    for clip in clips:
        if clip.shape[1:] != clips[0].shape[1:]:
            sizes = f"{size_text(clips[0][0])} and {size_text(clip[0])}"
            raise ValueError(f"the frames differ in size: {sizes} pixels")
    return np.concatenate(clips)


def _joined(sources: Sequence[Frames]) -> np.ndarray:
    """Return the frames of a list, which may be a batch of one clip."""
    if len(sources) == 1:
        return frames_of(sources[0])
    clips = [frames_of(source) for source in sources]
    several = [len(clip) for clip in clips if len(clip) != 1]
    nested = any(isinstance(source, (list, tuple)) for source in sources)
    if several or nested:
        raise ValueError(f"this is a batch of {len(clips)} clips; give one of them, such as [0]")
    return joined(clips)


def _pixels(values: np.ndarray, *, first: bool) -> np.ndarray:
    """Return the pixels of an array, whose channels are ``first`` where it could be either."""
    shape = values.shape
    if values.ndim == 5:
        if shape[0] != 1:
            raise ValueError(f"the shape {shape} is a batch of {shape[0]} clips; give one of them")
        values = values[0]
    if values.ndim == 2:
        values = values[..., None]
        first = False
    if values.ndim == 3:
        values = values[None]
    if values.ndim != 4 or 0 in shape:
        raise ValueError(f"frames are [F, H, W, C] or [F, C, H, W], got the shape {shape}")
    is_first = values.shape[1] in CHANNELS
    is_last = values.shape[3] in CHANNELS
    if not is_first and not is_last:
        raise ValueError(f"the shape {shape} has no axis of 1, 3 or 4 channels, first or last")
    if is_first and (first or not is_last):
        values = np.moveaxis(values, 1, 3)
    pixels = _bytes(values)
    if pixels.shape[3] == 4:
        return np.stack([np.asarray(rgb_image(Image.fromarray(frame))) for frame in pixels])
    return np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:3], 3)))


def _bytes(values: np.ndarray) -> np.ndarray:
    """Return floats in [0, 1] or uint8 as uint8."""
    if values.dtype == np.uint8:
        return np.ascontiguousarray(values)
    if not np.issubdtype(values.dtype, np.floating):
        raise ValueError(f"pixels are floats in [0, 1] or uint8, got {values.dtype}")
    least = float(values.min())
    most = float(values.max())
    if not (least >= -HALF_STEP and most <= 1 + HALF_STEP):  # NaN breaks it, too
        raise ValueError(f"floats must lie in [0, 1], got {least:g} to {most:g}")
    return np.rint(values.astype(np.float32).clip(0, 1) * 255).astype(np.uint8)
