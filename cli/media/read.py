"""Files to frames: MP4, WebM, GIF, PNG, folders of PNG, and the image of `--image`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.media.write import PLACE, ffmpeg, run_ffmpeg
from chipsparse.cli.options import DEFAULT_FPS, check_readable

MOST_OF_16_BITS = 2**16 - 1


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
    import imageio_ffmpeg

    program = ffmpeg("read", path.suffix)
    reader = imageio_ffmpeg.read_frames(str(path))
    facts = next(reader)
    reader.close()
    # One frame out for each frame in: by default ffmpeg repeats and drops some to keep the rate.
    words = ["-map", "0:v:0", "-fps_mode", "passthrough", "-pix_fmt", "rgb24", "-f", "rawvideo"]
    content = run_ffmpeg(program, ["-xerror", "-i", path, *words, "-"])
    pixels = np.frombuffer(content, np.uint8)
    width, height = facts["size"]
    if not len(pixels):
        raise UserError(f"{path} has no frame")
    frames = pixels.reshape(-1, height, width, 3).copy()
    return Clip(path, frames, float(facts["fps"]) or None, [path], lossy=True)


def _read_gif(path: Path) -> Clip:
    frames, milliseconds = [], 0.0
    with Image.open(path) as image:
        for index in range(getattr(image, "n_frames", 1)):
            image.seek(index)
            milliseconds += image.info.get("duration", 0)
            frames.append(np.asarray(_shown(image)))
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


def numbered(path: Path) -> list[Path]:
    """Return the files that are named as the frames of a PNG, in the order of their numbers."""
    name = re.compile(re.escape(path.stem) + r"-(\d+)" + re.escape(path.suffix))
    matches = ((name.fullmatch(file.name), file) for file in path.parent.glob("*"))
    return [file for _, file in sorted((int(match[1]), file) for match, file in matches if match)]


def _sequence(path: Path) -> list[Path]:
    """Return the numbered frames of a clip; of those that `write_media` made, all of one clip."""
    files = numbered(path)
    first = _frame_of(files[0]) if files else None
    if first is None:
        return files
    count = first[1]
    wanted = {(index, count) for index in range(count)}
    frames = [file for file in files if _frame_of(file) in wanted]
    if len(frames) != count:
        raise UserError(f"{path} has {len(frames)} of its {count} frames; the others are missing")
    return frames


def _frame_of(file: Path) -> tuple[int, int] | None:
    """Return which frame a PNG of ours is, from 0, and of how many; None for any other file."""
    try:
        with Image.open(file) as image:
            place = re.fullmatch(r"(\d+) of (\d+)", str(image.info.get(PLACE)))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None
    return None if place is None else (int(place[1]), int(place[2]))


def _png(path: Path) -> np.ndarray:
    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):
                raise UserError(f"{path} does not have 8 bits per channel (its mode: {image.mode})")
            return np.asarray(_shown(image))
    except UnidentifiedImageError as error:
        raise UserError(f"{path} is not an image that could be read") from error


def read_image(path: Path) -> Image.Image:
    """Return the image of ``--image``, upright and in RGB, transparent parts white.

    Of an animation it is the first frame. Raises `UserError` for what cannot be read.
    """
    check_readable("--image", path)
    with (  # a damaged file makes decoders raise anything
        user_errors(Exception, what=f"--image {path} is no image that can be read"),
        Image.open(path) as opened,
    ):
        return _shown(_in_eight_bits(ImageOps.exif_transpose(opened), path, opened.format))


def _shown(image: Image.Image) -> Image.Image:
    """Return what a viewer shows of an image: upright, in RGB, transparent parts white."""
    upright = ImageOps.exif_transpose(image)
    if upright.has_transparency_data:
        coloured = upright.convert("RGBA")
        white = Image.new("RGBA", coloured.size, "white")
        return Image.alpha_composite(white, coloured).convert("RGB")
    return upright.convert("RGB")


def _in_eight_bits(image: Image.Image, path: Path, form: str | None) -> Image.Image:
    """Return an image with 8 bits per channel, of one with 16; raise `UserError` for 32.

    What white is in those is not known. Pillow opens some of 16 bits in the mode of 32.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and form in ("PNG", "PPM")):
        values = np.asarray(image)
        if values.min() >= 0 and values.max() <= MOST_OF_16_BITS:
            return Image.fromarray(np.rint(values / 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise UserError(f"--image {path} does not have 8 bits per channel (its mode: {image.mode})")
    return image


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
