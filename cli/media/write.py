"""Frames to files: MP4, WebM, GIF and PNG, all of a command's files or none of them.

Frames are `[F, H, W, 3]` uint8 arrays everywhere in this file.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from chipsparse.cli.errors import UserError, reason
from chipsparse.cli.media import ffmpeg
from chipsparse.cli.media.images import beside, earlier_pngs, write_gif, write_pngs
from chipsparse.cli.media.metadata import Style
from chipsparse.cli.media.output_names import check_writable
from chipsparse.common.cache_folder import cache_folder
from chipsparse.common.finished_files import place
from chipsparse.common.scratch import scratch_folder

GIF_MAX_FPS = 50


def check_output(
    path: Path, *, fps: float | None = None, crf: int | None = None, also: tuple[str, ...] = ()
) -> None:
    """Raises `UserError` where clips could not be written; leaves nothing.

    Args:
        fps: as asked for; None where it is the usual one.
        crf: likewise.
        also: words of further clips, see `beside`.
    """
    kind = path.suffix.lower()
    if kind not in WRITERS:
        known = ", ".join(WRITERS)
        suffix = f"the suffix {path.suffix}" if path.suffix else "no suffix"
        raise UserError(f"--output {path} has {suffix}; use one of {known}")
    clips = [beside(path, word) for word in also]
    frames = [beside(each, "0000") for each in (path, *clips)] if kind == ".png" else []
    check_writable("--output", path, clips, longest=frames)
    if kind in ffmpeg.CODECS:
        ffmpeg.check_ffmpeg("write", kind)
    check_style(kind, fps, crf)


def check_style(kind: str, fps: float | None, crf: int | None) -> None:
    """Raises `UserError` for what files of this suffix do not have; None is not asked for."""
    if kind == ".gif" and fps is not None and fps > GIF_MAX_FPS:
        raise UserError(f"--fps {fps} is too fast for a GIF; use {GIF_MAX_FPS} or less, or .mp4")
    if kind == ".png" and fps is not None:
        raise UserError("--fps is about .mp4, .webm and .gif, and .png has none")
    if crf is None:
        return
    if kind not in ffmpeg.CODECS:
        raise UserError(f"--crf is about {' and '.join(ffmpeg.CODECS)}, and {kind} has none")
    most = ffmpeg.CODECS[kind].most_crf
    if not 0 <= crf <= most:
        raise UserError(f"--crf {crf} is out of range; for {kind} it must be from 0 to {most}")


def check_kind(path: Path, *, video: bool) -> None:
    """Raises `UserError` where a model of images is to write a video."""
    if not video and path.suffix.lower() != ".png":
        raise UserError(f"this model makes images, not videos; use {path.with_suffix('.png')}")


def write_media(
    clips: Mapping[Path, np.ndarray],
    *,
    fps: float,
    crf: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> dict[Path, list[Path]]:
    """Writes each clip to its path and returns the files of each; all paths share one folder.

    A PNG of several frames becomes `stem-000.png`, `stem-001.png`, … Everything is written to a
    temporary folder beside the outputs first and read back, so that a failure leaves neither new
    files nor changed ones. PNG files that an earlier run wrote for the same path go with it.

    Args:
        clips: frames by the path of their clip.
        crf: see `Style`.
        metadata: facts about the clips, such as `generation_metadata` gives.

    Raises:
        UserError: a file could not be written; it says where the clips were kept instead.
    """
    style = Style(fps, crf, metadata or {})
    written: dict[Path, list[Path]] = {}
    try:
        folder = next(iter(clips)).parent
        with scratch_folder(folder) as scratch:
            finished: dict[Path, Path] = {}
            stale: set[Path] = set()
            for path, frames in clips.items():
                files = WRITERS[path.suffix.lower()](scratch / path.name, frames, style)
                written[path] = [folder / file.name for file in files]
                finished |= zip(written[path], files, strict=True)
                if path.suffix.lower() == ".png":
                    stale.update(earlier_pngs(path))
            place(finished, stale=stale - finished.keys(), scratch=scratch)
    except OSError as error:
        name = ", ".join(str(path) for path in clips)
        end = keep_elsewhere(clips, fps=fps, metadata=metadata)
        raise UserError(f"{name} could not be written: {reason(error)}; {end}") from error
    return written


def keep_elsewhere(
    clips: Mapping[Path, np.ndarray], *, fps: float, metadata: Mapping[str, str] | None = None
) -> str:
    """Writes finished clips, which are not to be lost, in the first folder that takes them.

    As PNG, which loses nothing, and as many small files pass where one large one does not. Says
    where they are, or that there is room nowhere.
    """
    style = Style(fps, None, metadata or {})
    for parent in _places():
        with suppress(OSError):
            parent.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix="chipsparse-kept-", dir=parent))
            try:
                for path, frames in clips.items():
                    write_pngs(folder / f"{path.stem}.png", frames, style)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            return f"all is kept as PNG in {folder}"
    return "nothing could be kept elsewhere"


def _places() -> Iterator[Path]:
    with suppress(OSError):  # where no temporary folder can be written to
        yield Path(tempfile.gettempdir())
    if (folder := cache_folder()) is not None:
        yield folder


# Each writes a clip and returns its files.
WRITERS: dict[str, Callable[[Path, np.ndarray, Style], list[Path]]] = {
    **dict.fromkeys(ffmpeg.CODECS, ffmpeg.write_video),
    ".gif": write_gif,
    ".png": write_pngs,
}
