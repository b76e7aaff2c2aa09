"""Videos through ffmpeg: encoded, and decoded again before anybody relies on them."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from chipsparse.cli.errors import UserError
from chipsparse.cli.media.metadata import Style, as_json, parameters
from chipsparse.common.deferred_signals import deferred_signals


@dataclass(frozen=True)
class Codec:
    """How a kind of video is encoded.

    Attributes:
        crf: the constant rate factor where none is given; visually lossless.
        most_crf: the largest, and worst.
    """

    encoder: str
    crf: int
    most_crf: int
    options: tuple[str, ...]


CODECS = {
    ".mp4": Codec("libx264", 12, 51, ("-preset", "slow", "-movflags", "+faststart")),
    ".webm": Codec("libvpx-vp9", 15, 63, ("-b:v", "0", "-row-mt", "1", "-cpu-used", "2")),
}


def check_ffmpeg(verb: str, suffix: str) -> None:
    """Raises `UserError` where there is no ffmpeg to read or write a video."""
    try:
        _executable()
    except RuntimeError as error:
        raise UserError(
            f"no ffmpeg was found to {verb} {suffix}; reinstall imageio-ffmpeg, or use .gif or .png"
        ) from error


def write_video(path: Path, frames: np.ndarray, style: Style) -> list[Path]:
    """Writes a video and checks that all its frames can be read.

    Args:
        path: ``.mp4`` or ``.webm``.
        frames: uint8 ``[F, H, W, 3]``; sides that are odd are filled up.

    Raises:
        OSError: ffmpeg failed, or the file does not hold these frames.
    """
    codec = CODECS[path.suffix.lower()]
    frames = np.ascontiguousarray(_even_sides(frames))
    height, width = frames.shape[1:3]
    about = path.with_name(f"{path.name}.metadata")
    about.write_text(_ffmetadata(style.metadata), encoding="utf-8")
    colours = "bt709"
    _run(
        [
            *("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}"),
            *("-r", str(style.fps), "-i", "pipe:0", "-f", "ffmetadata", "-i", about),
            *("-map", "0:v:0", "-map_metadata", "1"),
            *("-c:v", codec.encoder, "-crf", str(codec.crf if style.crf is None else style.crf)),
            *(*codec.options, "-pix_fmt", "yuv420p"),
            *("-vf", f"scale=out_color_matrix={colours}:out_range=tv"),
            *("-colorspace", colours, "-color_primaries", colours, "-color_trc", colours),
            path,
        ],
        frames.data.cast("B"),
    )
    about.unlink()
    found = _probe(path)
    if found != (len(frames), height, width):
        raise OSError(
            f"of {len(frames)} frames of {width}x{height} pixels, the file that ffmpeg wrote has "
            f"{found[0]} of {found[2]}x{found[1]}"
        )
    return [path]


def decode(path: Path) -> tuple[np.ndarray, float | None]:
    """Reads a video.

    Returns:
        Frames, uint8 ``[F, H, W, 3]``, as many as the file has; and their rate, None where it is
        not known.

    Raises:
        OSError: it cannot be decoded to its end.
    """
    import imageio_ffmpeg

    reader = imageio_ffmpeg.read_frames(str(path))
    try:
        facts = next(reader)
    finally:
        reader.close()
    width, height = facts["size"]
    pixels = np.frombuffer(_decoded(path, "-pix_fmt", "rgb24", "-f", "rawvideo"), np.uint8)
    return pixels.reshape(-1, height, width, 3).copy(), float(facts["fps"]) or None


def _probe(path: Path) -> tuple[int, int, int]:
    """The frames, the height and the width of a video that is decoded for them."""
    decoded = _decoded(path, "-f", "framecrc").decode("ascii")
    size = re.search(r"^#dimensions 0: (\d+)x(\d+)$", decoded, re.MULTILINE)
    if size is None:
        raise OSError("ffmpeg finds no frame in the file that it wrote")
    frames = sum(line[:1].isdigit() for line in decoded.splitlines())
    return frames, int(size[2]), int(size[1])


def _decoded(path: Path, *form: str) -> bytes:
    """All frames of a video in some form; `OSError` where the video is damaged."""
    # One frame out for each frame in: by default ffmpeg repeats and drops some to keep the rate.
    one_by_one = ("-map", "0:v:0", "-fps_mode", "passthrough")
    frames, said = _run(["-xerror", "-i", path, *one_by_one, *form, "-"])
    if said:  # a file that ends too soon is no failure to ffmpeg
        raise OSError(_first_line(said))
    return frames


def _run(arguments: Sequence[str | Path], content: memoryview | None = None) -> tuple[bytes, bytes]:
    """Runs ffmpeg to its end and returns what it wrote to its output and said beside it.

    Raises:
        OSError: it failed.
    """
    process: subprocess.Popen[bytes] | None = None
    try:
        with deferred_signals():
            process = subprocess.Popen(
                [_executable(), "-hide_banner", "-v", "error", "-y", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is this process's; it ends ffmpeg
            )
        written, said = process.communicate(cast(Any, content))  # any buffer will do
    except BaseException:
        if process is not None:
            with deferred_signals():
                process.kill()
                process.wait()
                for pipe in (process.stdin, process.stdout, process.stderr):
                    with suppress(OSError):  # of what was not sent
                        cast(IO[bytes], pipe).close()
        raise
    if process.returncode:
        raise _failure(process.returncode, said)
    return written, said


def _failure(code: int, said: bytes) -> OSError:
    """What made ffmpeg end: the system's own word where it has one."""
    if code == -getattr(signal, "SIGXFSZ", 0):
        return OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    for number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO, errno.ENOMEM):
        if os.strerror(number).encode() in said:
            return OSError(number, os.strerror(number))
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    return OSError(f"ffmpeg ended with {ended}" + (f": {_first_line(said)}" if said else ""))


def _first_line(said: bytes) -> str:
    """The first line that ffmpeg printed, without the part of it that did."""
    line = said.decode("utf-8", "replace").strip().partition("\n")[0]
    return re.sub(r"^\[[^]]*\] ", "", line).strip()


def _executable() -> str:
    import imageio_ffmpeg

    return str(imageio_ffmpeg.get_ffmpeg_exe())


def _ffmetadata(facts: Mapping[str, str]) -> str:
    """The facts as a file for ffmpeg: a command line would limit their length."""
    if not facts:
        return ";FFMETADATA1\n"
    tags = {"comment": parameters(facts), "description": as_json(facts)}
    lines = (f"{name}={_escaped(text)}\n" for name, text in tags.items())
    return ";FFMETADATA1\n" + "".join(lines)


def _escaped(text: str) -> str:
    return re.sub(r"([=;#\\\n])", r"\\\1", text)


def _even_sides(frames: np.ndarray) -> np.ndarray:
    """Repeats the last row or column where a side is odd, which yuv420p cannot store."""
    bottom, right = frames.shape[1] % 2, frames.shape[2] % 2
    return np.pad(frames, ((0, 0), (0, bottom), (0, right), (0, 0)), mode="edge")
