"""The formats of videos and images, and what is checked before anything is computed.

Nothing here needs numpy, PIL or torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from chipsparse.cli.errors import UserError, user_errors
from chipsparse.common.files import IMAGES, beside, scratch_folder

DEFAULT_FPS = 16
GIF_MAX_FPS = 50
# Of each kind of video: the encoder with its options, the constant rate factor that is visually
# lossless, and the largest, which is worst.
CODECS = {
    ".mp4": (("libx264", "-preset", "slow", "-movflags", "+faststart"), 12, 51),
    ".webm": (("libvpx-vp9", "-b:v", "0", "-row-mt", "1", "-cpu-used", "2"), 15, 63),
}
CLIPS = (*CODECS, ".gif", ".png")
SUFFIXES = (*CODECS, ".gif", *IMAGES)


def check_readable(name: str, path: Path) -> None:
    """Raise `UserError` where an option's file cannot be read."""
    if path.is_dir():
        raise UserError(f"{name} {path} is a folder; name a file")
    if not path.exists():
        raise UserError(f"{name} {path} does not exist")
    if not path.is_file():  # a pipe may never end, and cannot be read twice
        raise UserError(f"{name} {path} is no regular file")


def check_output(
    path: Path,
    *,
    fps: float | None = None,
    crf: int | None = None,
    also: tuple[str, ...] = (),
    suffixes: Sequence[str] = CLIPS,
) -> None:
    """Raise `UserError` where clips could not be written; leave nothing.

    ``fps`` and ``crf`` are None where they are the usual ones. ``also`` has the words of further
    clips, see `beside`. ``suffixes`` are those that the model can fill.
    """
    kind = path.suffix.lower()
    if kind not in suffixes:
        suffix = f"the suffix {path.suffix}" if path.suffix else "no suffix"
        raise UserError(f"--output {path} has {suffix}; use one of {', '.join(suffixes)}")
    for clip in (path, *(beside(path, word) for word in also)):
        check_writable("--output", clip, beside(clip, "0000") if kind in IMAGES else None)
    if kind == ".gif" and fps is not None and fps > GIF_MAX_FPS:
        raise UserError(f"--fps {fps:g} is too fast for a GIF; use {GIF_MAX_FPS} or less, or .mp4")
    if kind in IMAGES and fps is not None:
        raise UserError(f"--fps is about .mp4, .webm and .gif, and {kind} has none")
    if kind in CODECS:
        ffmpeg("write", kind)
        most = CODECS[kind][2]
        if crf is not None and not 0 <= crf <= most:
            raise UserError(f"--crf {crf} is out of range; for {kind} it must be from 0 to {most}")
    elif crf is not None:
        raise UserError(f"--crf is about {' and '.join(CODECS)}, and {kind} has none")


def check_kind(path: Path, *, video: bool, frames: int | None = 1) -> None:
    """Raise `UserError` where a model of images is to write a video, or a video a lossy image.

    ``frames`` is the number of a video; None where only the pipeline's code says.
    """
    kind = path.suffix.lower()
    if not video and kind not in IMAGES:
        raise UserError(
            f"this model makes images, not videos; use {path.with_suffix('.png')}, .jpg or .webp",
        )
    if video and frames != 1 and kind not in CLIPS:
        raise UserError(f"{path} is for one image, not for a video; use one of {', '.join(CLIPS)}")


def check_file(option: str, path: Path, *suffixes: str) -> None:
    """Raise `UserError` where a file could not be written, or has none of the suffixes."""
    if path.suffix.lower() not in suffixes:
        raise UserError(f"{option} {path} must end in {suffixes[0]}")
    check_writable(option, path)


def check_writable(option: str, path: Path, longest: Path | None = None) -> None:
    """Raise `UserError` where a file could not be written; leave nothing.

    ``longest`` is the longest name that is written, where it is not this one.
    """
    if os.path.isdir(path):  # which takes any length of a name
        raise UserError(f"{option} {path} is a folder; name a file in it")
    if not os.path.isdir(path.parent):
        folder = f"the folder {path.parent} of {option} {path}"
        raise UserError(f"{folder} does not exist; create it first")
    with (
        user_errors(OSError, what=f"{option} {path} cannot be written"),
        scratch_folder(path.parent) as scratch,
    ):
        (scratch / (longest or path).name).write_bytes(b"0")


def ffmpeg(verb: str, suffix: str) -> str:
    """Return the program that reads and writes videos; raise `UserError` where there is none."""
    import imageio_ffmpeg

    try:
        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except RuntimeError as error:
        raise UserError(
            f"no ffmpeg was found to {verb} {suffix}; "
            "reinstall imageio-ffmpeg, or use .gif or .png",
        ) from error
