"""Files to frames: MP4, GIF, PNG, and folders of PNG."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from chipsparse.cli.errors import UserError, first_line
from chipsparse.cli.media import DEFAULT_FPS, check_ffmpeg

EIGHT_BIT_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")


@dataclass(frozen=True)
class Clip:
    """The pixels of a video or an image.

    Attributes:
        frames: uint8 ``[F, H, W, 3]``.
        fps: frames per second; None where the files do not tell.
        files: what was read.
        lossy: whether the file's format changes the pixels that are written to it.
    """

    frames: np.ndarray
    fps: float | None
    files: list[Path]
    lossy: bool


def read_clip(path: Path) -> Clip:
    """Reads a video, an image, or the numbered images that `write_media` makes of a clip.

    Args:
        path: ``.mp4``, ``.gif``, ``.png``, or a folder of PNG files, which are taken in the order
            of the numbers in their names. Where ``out.png`` does not exist, ``out-000.png`` and so
            on are meant.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    reader = READERS.get(path.suffix.lower())
    try:
        if path.is_dir():
            return _read_pngs(path, list(path.glob("*.[pP][nN][gG]")))
        if reader is None:
            known = ", ".join(READERS)
            raise UserError(f"{path} is no {known} or folder of .png; nothing else can be read")
        if not path.exists() and path.suffix.lower() == ".png":
            numbered = re.compile(re.escape(path.stem) + r"-\d+" + re.escape(path.suffix))
            found = [each for each in path.parent.glob("*") if numbered.fullmatch(each.name)]
            return _read_pngs(path, found)
        if not path.exists():
            raise UserError(f"the file {path} does not exist")
        return reader(path)
    except (OSError, RuntimeError, StopIteration, SyntaxError, ValueError) as error:
        raise UserError(f"{path} could not be read: {first_line(error)}") from error


def _read_mp4(path: Path) -> Clip:
    import imageio_ffmpeg

    check_ffmpeg("read")
    # One frame out for each frame in: by default ffmpeg repeats and drops some to keep the rate.
    frames = imageio_ffmpeg.read_frames(
        str(path), pix_fmt="rgb24", output_params=["-fps_mode", "passthrough"]
    )
    try:
        facts = next(frames)
        width, height = facts["size"]
        pixels = [
            np.frombuffer(frame, np.uint8).reshape(height, width, 3)  # a copy is made by np.stack
            for frame in frames
        ]
    finally:
        frames.close()
    if not pixels:
        raise UserError(f"{path} has no frame")
    return Clip(np.stack(pixels), float(facts["fps"]) or None, [path], lossy=True)


def _read_gif(path: Path) -> Clip:
    frames, milliseconds = [], 0.0
    with Image.open(path) as image:
        for index in range(getattr(image, "n_frames", 1)):
            image.seek(index)
            milliseconds += image.info.get("duration", 0)
            frames.append(np.asarray(image.convert("RGB")))
    fps = 1000 * len(frames) / milliseconds if milliseconds else None
    return Clip(np.stack(frames), fps, [path], lossy=True)


def _read_png(path: Path) -> Clip:
    return Clip(_png(path)[None], None, [path], lossy=False)


def _read_pngs(path: Path, files: list[Path]) -> Clip:
    if not files:
        what = "has no .png file" if path.is_dir() else "does not exist"
        raise UserError(f"{'the folder ' if path.is_dir() else 'the file '}{path} {what}")
    files = sorted(files, key=_natural_order)
    frames = [_png(file) for file in files]
    for file, frame in zip(files, frames, strict=True):
        if frame.shape != frames[0].shape:
            raise UserError(
                f"the frames differ in size: {files[0]} has {_size(frames[0])} pixels and {file} "
                f"has {_size(frame)}"
            )
    return Clip(np.stack(frames), None, files, lossy=False)


def _png(path: Path) -> np.ndarray:
    try:
        with Image.open(path) as image:
            if image.mode not in EIGHT_BIT_MODES:
                raise UserError(f"{path} does not have 8 bits per channel (its mode: {image.mode})")
            return np.asarray(image.convert("RGB"))
    except UnidentifiedImageError as error:
        raise UserError(f"{path} is not an image that could be read") from error


def _natural_order(path: Path) -> list[tuple[int, str]]:
    """``frame-2`` before ``frame-10``."""
    return [
        (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)
    ]


def _size(frame: np.ndarray) -> str:
    return f"{frame.shape[1]}x{frame.shape[0]}"


def output_fps(*clips: Clip) -> int:
    """The rate of a clip made of these: of the first that has one."""
    known = [clip.fps for clip in clips if clip.fps]
    return max(1, round(known[0])) if known else DEFAULT_FPS


READERS: dict[str, Callable[[Path], Clip]] = {
    ".mp4": _read_mp4,
    ".gif": _read_gif,
    ".png": _read_png,
}
