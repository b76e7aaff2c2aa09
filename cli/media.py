"""Frames to files: MP4, GIF and PNG, all of a command's files or none of them.

Frames are `[F, H, W, 3]` uint8 arrays everywhere in this file.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from chipsparse.cli.errors import UserError, first_line

GIF_MAX_FPS = 50
DEFAULT_FPS = 16
MP4_CONSTANT_RATE_FACTOR = 12  # visually lossless; 0 is lossless, 23 the encoder's default


def check_output(path: Path, *, fps: int) -> None:
    """Raises `UserError` where `path` could not be written; writes nothing."""
    if path.suffix.lower() not in WRITERS:
        known = ", ".join(WRITERS)
        suffix = f"the suffix {path.suffix}" if path.suffix else "no suffix"
        raise UserError(f"--output {path} has {suffix}; use one of {known}")
    if path.is_dir():
        raise UserError(f"--output {path} is a folder; name a file in it")
    folder = path.parent
    if not folder.is_dir():
        raise UserError(f"the folder {folder} of --output {path} does not exist; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"the folder {folder} of --output {path} cannot be written to")
    if path.suffix.lower() == ".gif" and fps > GIF_MAX_FPS:
        raise UserError(f"--fps {fps} is too fast for a GIF; use {GIF_MAX_FPS} or less, or .mp4")
    if path.suffix.lower() == ".mp4":
        check_ffmpeg("write")


def check_kind(path: Path, *, video: bool) -> None:
    """Raises `UserError` where a model of images is to write a video."""
    if not video and path.suffix.lower() != ".png":
        raise UserError(f"this model makes images, not videos; use {path.with_suffix('.png')}")


def write_media(clips: Mapping[Path, np.ndarray], *, fps: int) -> dict[Path, list[Path]]:
    """Writes each clip to its path and returns the files of each; all paths share one folder.

    A PNG of several frames becomes `stem-000.png`, `stem-001.png`, … Everything is written to a
    temporary folder beside the outputs first, so that a failure leaves neither new files nor
    changed ones.
    """
    written: dict[Path, list[Path]] = {}
    try:
        folder = next(iter(clips)).parent
        with tempfile.TemporaryDirectory(prefix=".chipsparse-", dir=folder) as scratch:
            for path, frames in clips.items():
                writer = WRITERS[path.suffix.lower()]
                written[path] = writer(Path(scratch) / path.name, frames, fps)
            for file in (file for files in written.values() for file in files):
                if (folder / file.name).is_dir():
                    raise IsADirectoryError(f"{folder / file.name} is a folder")
            for path, files in written.items():
                for file in files:
                    os.replace(file, folder / file.name)
                written[path] = [folder / file.name for file in files]
    except OSError as error:
        name = ", ".join(str(path) for path in clips)
        raise UserError(f"{name} could not be written: {first_line(error)}") from error
    return written


def beside(path: Path, word: str) -> Path:
    """`out.mp4` and `dense` give `out-dense.mp4`."""
    return path.with_name(f"{path.stem}-{word}{path.suffix}")


def clip_files(path: Path, count: int) -> list[Path]:
    """The files of a clip of so many frames: one, or a PNG for each frame."""
    if count == 1 or path.suffix.lower() != ".png":
        return [path]
    digits = max(3, len(str(count - 1)))
    return [beside(path, f"{index:0{digits}}") for index in range(count)]


def _write_mp4(path: Path, frames: np.ndarray, fps: int) -> list[Path]:
    import imageio_ffmpeg

    frames = _even_sides(frames)
    height, width = frames.shape[1:3]
    colours = "bt709"
    parameters = ["-crf", str(MP4_CONSTANT_RATE_FACTOR), "-preset", "slow"]
    parameters += ["-vf", f"scale=out_color_matrix={colours}:out_range=tv"]
    parameters += ["-colorspace", colours, "-color_primaries", colours, "-color_trc", colours]
    parameters += ["-movflags", "+faststart"]
    encoder = imageio_ffmpeg.write_frames(
        str(path),
        (width, height),
        fps=fps,
        codec="libx264",
        quality=None,
        pix_fmt_in="rgb24",
        pix_fmt_out="yuv420p",
        macro_block_size=1,
        ffmpeg_log_level="error",
        output_params=parameters,
    )
    try:
        encoder.send(None)
        for frame in frames:
            encoder.send(np.ascontiguousarray(frame))
    finally:
        encoder.close()
    if not path.is_file() or path.stat().st_size == 0:
        raise OSError("ffmpeg wrote no file")
    return [path]


def _write_gif(path: Path, frames: np.ndarray, fps: int) -> list[Path]:
    images = [Image.fromarray(frame).quantize(256) for frame in frames]
    # A GIF counts in hundredths of a second: spread the rounding so that the whole length is right.
    ends = [round(100 * (index + 1) / fps) for index in range(len(images))]
    durations_ms = [10 * (end - start) for start, end in zip([0, *ends], ends, strict=False)]
    images[0].save(
        path, save_all=True, append_images=images[1:], duration=durations_ms, loop=0, disposal=1
    )
    return [path]


def _write_png(path: Path, frames: np.ndarray, fps: int) -> list[Path]:
    files = clip_files(path, len(frames))
    for file, frame in zip(files, frames, strict=True):
        Image.fromarray(frame).save(file)
    return files


def _even_sides(frames: np.ndarray) -> np.ndarray:
    """Repeats the last row or column where a side is odd, which yuv420p cannot store."""
    bottom, right = frames.shape[1] % 2, frames.shape[2] % 2
    return np.pad(frames, ((0, 0), (0, bottom), (0, right), (0, 0)), mode="edge")


def check_ffmpeg(verb: str) -> None:
    """Raises `UserError` where there is no ffmpeg to read or write MP4."""
    import imageio_ffmpeg

    try:
        imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        raise UserError(
            f"no ffmpeg was found to {verb} .mp4; reinstall imageio-ffmpeg, or use .gif or .png"
        ) from error


Writer = Callable[[Path, np.ndarray, int], list[Path]]
WRITERS: dict[str, Writer] = {".mp4": _write_mp4, ".gif": _write_gif, ".png": _write_png}
