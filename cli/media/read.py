"""Files to frames: MP4, WebM, GIF, PNG, JPEG, WebP, folders of PNG, and the image of `--image`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageSequence

from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.media.formats import CODECS, DEFAULT_FPS, SUFFIXES, check_readable, ffmpeg
from chipsparse.cli.media.write import FRAME_COUNT, plain_file, run_ffmpeg
from chipsparse.common.files import IMAGES, numbered_files
from chipsparse.experiments.frames import Frames, frames_of, joined, rgb_image, size_text

WEBP_HEADER_BYTES = 64  # up to the name of the chunk of pixels
# What ffmpeg opens, whatever a file is called: playlists and scripts name other files.
CONTAINERS = ("-format_whitelist", "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,flv,mpegts")


@dataclass(frozen=True)
class Clip:
    """The pixels of a video or an image."""

    path: Path  # as it was asked for
    frames: np.ndarray  # uint8 `[F, H, W, 3]`
    fps: float | None  # None where the files do not tell
    files: list[Path]  # that were read
    lossy: bool  # the format changes pixels that are written to it


def read_clip(path: Path) -> Clip:
    """Return the clip of a video, an image, or of images such as `write_media` makes of a clip.

    PNG files of a folder are taken in the order of the numbers in their names. Where ``out.png``
    does not exist, ``out-000.png`` and so on are meant; as many as the first one says that there
    are. Raises `UserError` where there is no such file, or it cannot be read.
    """
    kind = path.suffix.lower()
    # A damaged file makes decoders raise anything.
    with user_errors(Exception, what=f"{path} could not be read"):
        if path.is_dir():
            files = sorted(path.glob("*.[pP][nN][gG]"), key=_natural_order)
            if not files:
                raise UserError(f"the folder {path} has no .png file")
            return _read_images(path, files)
        if kind not in SUFFIXES:
            known = ", ".join(SUFFIXES)
            raise UserError(f"{path} is no {known} or folder of .png; nothing else can be read")
        frames = [] if kind not in IMAGES or path.exists() else _numbered_frames(path)
        if frames:
            return _read_images(path, frames)
        check_readable("the file", path)
        return _read_video(path) if kind in CODECS else _read_images(path, [path])


def read_frames(source: Frames | str | os.PathLike[str]) -> np.ndarray:
    """Return frames of a file, several files, or in memory, as uint8 ``[F, H, W, 3]``.

    Args:
        source: A path as `read_clip` takes it, a list of paths, or frames as `frames_of` takes
            them.

    Raises:
        ValueError: A file cannot be read, or the frames are none.
    """
    if isinstance(source, (str, os.PathLike)):
        return read_clip(Path(source)).frames
    if isinstance(source, (list, tuple)):
        files = [isinstance(item, (str, os.PathLike)) for item in source]
        if files and all(files):
            return joined([read_clip(Path(item)).frames for item in source])
    return frames_of(source)


def _read_video(path: Path) -> Clip:
    import imageio_ffmpeg

    program = ffmpeg("read", path.suffix)
    file = plain_file(path)
    reader = imageio_ffmpeg.read_frames(file, input_params=[*CONTAINERS])
    facts = next(reader)
    reader.close()
    # One frame out for each frame in: by default ffmpeg repeats and drops some to keep the rate.
    words = ["-map", "0:v:0", "-fps_mode", "passthrough", "-pix_fmt", "rgb24", "-f", "rawvideo"]
    content = run_ffmpeg(program, ["-xerror", *CONTAINERS, "-i", file, *words, "-"])
    if not content:
        raise UserError(f"{path} has no frame")
    width, height = facts["size"]
    frames = np.frombuffer(content, np.uint8).reshape(-1, height, width, 3).copy()
    return Clip(path, frames, float(facts["fps"]) or None, [path], lossy=True)


def _read_images(path: Path, files: list[Path]) -> Clip:
    """Return all frames of all files, which are of one size."""
    frames: list[np.ndarray] = []
    milliseconds = 0.0
    for file in files:
        with Image.open(file) as image:
            for frame in ImageSequence.Iterator(image):
                milliseconds += frame.info.get("duration", 0)
                frames.append(np.asarray(rgb_image(frame)))
        if frames[-1].shape != frames[0].shape:
            raise UserError(
                f"the frames differ in size: {files[0]} has {size_text(frames[0])} pixels and "
                f"{file} has {size_text(frames[-1])}",
            )
    fps = 1000 * len(frames) / milliseconds if milliseconds else None
    return Clip(path, np.stack(frames), fps, files, lossy=_is_lossy(files[0]))


def _is_lossy(image: Path) -> bool:
    """Return whether the format of an image changed its pixels; a WebP says how it was written."""
    if image.suffix.lower() == ".webp":
        with image.open("rb") as file:
            return b"VP8L" not in file.read(WEBP_HEADER_BYTES)
    return image.suffix.lower() != ".png"


def _numbered_frames(path: Path) -> list[Path]:
    """Return the numbered frames of one clip: of a longer one before, some may be left."""
    files = numbered_files(path)
    if not files:
        return []
    with Image.open(files[0]) as first:
        count = int(first.info.get(FRAME_COUNT, len(files)))
    if count > len(files):
        raise UserError(f"{path} has {len(files)} of its {count} frames; the others are missing")
    return files[:count]


def read_image(path: Path) -> Image.Image:
    """Return the image of ``--image``, the first frame of an animation; raise `UserError`."""
    check_readable("--image", path)
    with (  # a damaged file makes decoders raise anything
        user_errors(Exception, what=f"--image {path} could not be read"),
        Image.open(path) as image,
    ):
        return rgb_image(image)


def _natural_order(path: Path) -> list[tuple[int, str]]:
    """Return a key that sorts ``frame-2`` before ``frame-10``."""
    parts = re.split(r"(\d+)", path.name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def output_fps(*clips: Clip) -> int:
    """Return the rate of a clip made of these: of the first that has one."""
    rates = [clip.fps for clip in clips if clip.fps]
    return max(1, round(rates[0])) if rates else DEFAULT_FPS
