"""Files to frames: MP4, WebM, GIF, PNG, and folders of PNG."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.generation.input_image import shown
from chipsparse.cli.media.ffmpeg import check_ffmpeg, decode
from chipsparse.cli.media.images import frame_of, numbered
from chipsparse.cli.option_checks import DEFAULT_FPS

EIGHT_BIT_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")


@dataclass(frozen=True)
class Clip:
    """The pixels of a video or an image.

    Attributes:
        path: as it was asked for.
        frames: uint8 ``[F, H, W, 3]``.
        fps: frames per second; None where the files do not tell.
        files: what was read.
        lossy: whether the file's format changes the pixels that are written to it.
    """

    path: Path
    frames: np.ndarray
    fps: float | None
    files: list[Path]
    lossy: bool


def read_clip(path: Path) -> Clip:
    """Reads a video, an image, or the numbered images that `write_media` makes of a clip.

    Args:
        path: ``.mp4``, ``.webm``, ``.gif``, ``.png``, or a folder of PNG files, which are taken in
            the order of the numbers in their names. Where ``out.png`` does not exist,
            ``out-000.png`` and so on are meant; as many as the first one says that there are.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    reader = READERS.get(path.suffix.lower())
    # A damaged file makes decoders raise anything.
    with user_errors(Exception, what=f"{path} could not be read"):
        if path.is_dir():
            return _read_pngs(path, list(path.glob("*.[pP][nN][gG]")))
        if reader is None:
            known = ", ".join(READERS)
            raise UserError(f"{path} is no {known} or folder of .png; nothing else can be read")
        if not path.exists() and path.suffix.lower() == ".png":
            return _read_pngs(path, _sequence(path))
        if not path.exists():
            raise UserError(f"the file {path} does not exist")
        if not path.is_file():  # a pipe may never end, and cannot be read twice
            raise UserError(f"{path} is no regular file")
        return reader(path)


def _read_video(path: Path) -> Clip:
    check_ffmpeg("read", path.suffix)
    frames, fps = decode(path)
    if not len(frames):
        raise UserError(f"{path} has no frame")
    return Clip(path, frames, fps, [path], lossy=True)


def _read_gif(path: Path) -> Clip:
    frames, milliseconds = [], 0.0
    with Image.open(path) as image:
        for index in range(getattr(image, "n_frames", 1)):
            image.seek(index)
            milliseconds += image.info.get("duration", 0)
            frames.append(np.asarray(shown(image)))
    fps = 1000 * len(frames) / milliseconds if milliseconds else None
    return Clip(path, np.stack(frames), fps, [path], lossy=True)


def _read_pngs(path: Path, files: list[Path]) -> Clip:
    if not files:
        if path.is_dir():
            raise UserError(f"the folder {path} has no .png file")
        raise UserError(f"the file {path} does not exist")
    files = sorted(files, key=_natural_order)
    frames = [_png(file) for file in files]
    for file, frame in zip(files, frames, strict=True):
        if frame.shape != frames[0].shape:
            raise UserError(
                f"the frames differ in size: {files[0]} has {size_text(frames[0])} pixels and "
                f"{file} has {size_text(frame)}"
            )
    return Clip(path, np.stack(frames), None, files, lossy=False)


def _sequence(path: Path) -> list[Path]:
    """The numbered frames of a clip; of those that `write_media` made, all of one clip."""
    files = numbered(path)
    first = frame_of(files[0]) if files else None
    if first is None:
        return files
    count = first[1]
    wanted = {(index, count) for index in range(count)}
    frames = [file for file in files if frame_of(file) in wanted]
    if len(frames) != count:
        raise UserError(f"{path} has {len(frames)} of its {count} frames; the others are missing")
    return frames


def _png(path: Path) -> np.ndarray:
    try:
        with Image.open(path) as image:
            if image.mode not in EIGHT_BIT_MODES:
                raise UserError(f"{path} does not have 8 bits per channel (its mode: {image.mode})")
            return np.asarray(shown(image))
    except UnidentifiedImageError as error:
        raise UserError(f"{path} is not an image that could be read") from error


def _natural_order(path: Path) -> list[tuple[int, str]]:
    """``frame-2`` before ``frame-10``."""
    return [
        (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)
    ]


def size_text(frame: np.ndarray) -> str:
    """Width and height of a frame ``[H, W, 3]``, for people."""
    return f"{frame.shape[1]}x{frame.shape[0]}"


def output_fps(*clips: Clip) -> int:
    """The rate of a clip made of these: of the first that has one."""
    known = [clip.fps for clip in clips if clip.fps]
    return max(1, round(known[0])) if known else DEFAULT_FPS


READERS: dict[str, Callable[[Path], Clip]] = {
    ".mp4": _read_video,
    ".webm": _read_video,
    ".gif": _read_gif,
    ".png": lambda path: _read_pngs(path, [path]),
}
