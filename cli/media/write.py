"""Frames to files: videos and images, each written under another name until it is finished.

Frames are `[F, H, W, 3]` uint8 arrays everywhere in this file.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from chipsparse.cli.errors import user_errors
from chipsparse.cli.media.formats import CODECS, ffmpeg
from chipsparse.common.files import IMAGES, numbered, scratch_folder

# The name of the text in each PNG of a clip that says how many there are.
FRAME_COUNT = "chipsparse frames"
# The text in a JPEG or WebP: where other programs look for it, after its own mark of the encoding.
EXIF_FOLDER = 0x8769
USER_COMMENT = 0x9286
UTF_16 = b"UNICODE\0"
LONGEST_COMMENT_BYTES = 60_000  # all of it must fit into 64 KiB
JPEG_QUALITY = 95
LONGEST_TAG = 30_000  # letters: a word of a command line is at most 128 KiB
# Of .webm: every pixel is kept, as VP9 stores green, blue and red themselves.
LOSSLESS = ("-c:v", "libvpx-vp9", "-lossless", "1", "-pix_fmt", "gbrp", "-row-mt", "1")


@contextmanager
def written_whole(option: str, path: Path) -> Iterator[Path]:
    """Give a file beside its path, which is moved there where the block succeeds.

    A failure leaves neither a new file nor a changed one; `UserError` names the option.
    """
    with (
        user_errors(OSError, what=f"{option} {path} could not be written"),
        scratch_folder(path.parent) as scratch,
    ):
        file = scratch / path.name
        yield file
        os.replace(file, path)


def write_text(option: str, path: Path, text: str) -> None:
    """Write a text as a whole; letters that UTF-8 lacks become question marks."""
    with written_whole(option, path) as file:
        file.write_text(text, encoding="utf-8", errors="replace")


def write_media(
    clips: Mapping[Path, np.ndarray],
    *,
    fps: float,
    crf: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> dict[Path, list[Path]]:
    """Write each clip to its path and return the files of each; all paths share one folder.

    An image of several frames becomes `stem-000.png`, `stem-001.png`, … A file has its name as soon
    as all files are finished. ``metadata`` are facts such as `generation_metadata` gives.
    """
    folder = next(iter(clips)).parent
    files = {path: clip_files(path, len(frames)) for path, frames in clips.items()}
    text = ""
    content = ""
    if metadata:
        text = parameters(metadata)
        content = json.dumps(dict(metadata), ensure_ascii=False)
    with (
        user_errors(OSError, what=f"{', '.join(map(str, clips))} could not be written"),
        scratch_folder(folder) as scratch,
    ):
        for path, frames in clips.items():
            finished = scratch / path.name
            kind = path.suffix.lower()
            if kind == ".png":
                _write_pngs(finished, frames, text, content)
            elif kind in IMAGES:
                _write_images(finished, frames, text)
            elif kind == ".gif":
                _write_gif(finished, frames, fps, text)
            else:
                _write_video(finished, frames, fps, crf, text, content)
        for file in itertools.chain(*files.values()):
            os.replace(scratch / file.name, file)
    return files


def clip_files(path: Path, count: int) -> list[Path]:
    """Return the files of a clip of so many frames: one, or an image for each frame."""
    if count == 1 or path.suffix.lower() not in IMAGES:
        return [path]
    return [numbered(path, index, count) for index in range(count)]


def plain_file(path: Path) -> str:
    """Return a name that ffmpeg takes for a file, whatever is in it.

    It would take ``12:30.mp4`` and ``concat:a.mp4`` for protocols, and ``-x.mp4`` for an option.
    """
    return os.path.abspath(path)


def run_ffmpeg(program: str, words: Sequence[str], content: bytes | None = None) -> bytes:
    """Run ffmpeg to its end and return its output; raise `OSError` where it failed or complained.

    A file that ends too soon is no failure to ffmpeg, but it says so.
    """
    command = [program, "-hide_banner", "-v", "error", "-y", *words]
    ran = subprocess.run(command, input=content, capture_output=True, check=False)
    if ran.returncode or (ran.stderr and content is None):
        line = ran.stderr.decode("utf-8", "replace").strip().partition("\n")[0]
        line = re.sub(r"^\[[^]]*\] ", "", line)  # the part of ffmpeg that says it
        raise OSError(line or f"ffmpeg ended with exit code {ran.returncode}")
    return ran.stdout


def write_lossless(path: Path, frames: np.ndarray, *, fps: float) -> None:
    """Write a clip so that each pixel is read again as it was: .png of one frame, or .webm.

    The file is there as a whole or not at all. Raises `UserError` where it cannot be written.
    """
    with written_whole("the file", path) as file:
        if path.suffix.lower() == ".png":
            Image.fromarray(frames[0]).save(file, format="PNG")
            return
        words = [*_raw_input(frames, fps), *LOSSLESS, plain_file(file)]
        run_ffmpeg(ffmpeg("write", ".webm"), words, frames.tobytes())


def _raw_input(frames: np.ndarray, fps: float) -> list[str]:
    """Return the options of ffmpeg for frames that it reads from its input."""
    size = f"{frames.shape[2]}x{frames.shape[1]}"
    words = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size]
    return [*words, "-r", str(fps), "-i", "pipe:0"]


def _write_video(
    path: Path,
    frames: np.ndarray,
    fps: float,
    crf: int | None,
    text: str,
    content: str,
) -> None:
    kind = path.suffix.lower()
    (encoder, *options), usual, _ = CODECS[kind]
    # The last row or column is repeated where a side is odd, which yuv420p cannot store.
    odd = [(0, side % 2) for side in frames.shape[1:3]]
    frames = np.pad(frames, ((0, 0), *odd, (0, 0)), mode="edge")
    colours = "bt709"
    words = [
        *_raw_input(frames, fps),
        "-c:v",
        encoder,
        *options,
        "-crf",
        str(usual if crf is None else crf),
        "-pix_fmt",
        "yuv420p",
        "-vf",
        f"scale=out_color_matrix={colours}:out_range=tv",
        "-colorspace",
        colours,
        "-color_primaries",
        colours,
        "-color_trc",
        colours,
        "-metadata",
        f"comment={text[:LONGEST_TAG]}",
        "-metadata",
        f"description={content[:LONGEST_TAG]}",
        plain_file(path),
    ]
    run_ffmpeg(ffmpeg("write", kind), words, frames.tobytes())


def _write_gif(path: Path, frames: np.ndarray, fps: float, text: str) -> None:
    images = [Image.fromarray(frame).quantize(256) for frame in frames]
    # A GIF counts in hundredths of a second: spread the rounding so that the whole length is right.
    ends = [round(100 * (index + 1) / fps) for index in range(len(images))]
    images[0].save(
        path,
        save_all=True,
        append_images=images[1:],
        duration=[10 * (end - start) for start, end in zip([0, *ends], ends, strict=False)],
        loop=0,
        disposal=1,
        comment=text.encode("utf-8"),
    )


def _write_pngs(path: Path, frames: np.ndarray, text: str, content: str) -> None:
    facts = PngInfo()
    facts.add_text(FRAME_COUNT, str(len(frames)))
    if text:
        facts.add_text("parameters", text)
        facts.add_text("chipsparse", content)
    for file, frame in zip(clip_files(path, len(frames)), frames, strict=True):
        Image.fromarray(frame).save(file, format="PNG", pnginfo=facts)


def _write_images(path: Path, frames: np.ndarray, text: str) -> None:
    """Write JPEG files, without subsampled colours, or lossless WebP files."""
    kind = "JPEG"
    options: dict[str, Any] = {"quality": JPEG_QUALITY, "subsampling": 0}
    if path.suffix.lower() == ".webp":
        kind = "WebP"
        options = {"lossless": True}
    exif = Image.Exif()
    if text:
        comment = text.encode("utf-16-be")[:LONGEST_COMMENT_BYTES]
        exif.get_ifd(EXIF_FOLDER)[USER_COMMENT] = UTF_16 + comment
    for file, frame in zip(clip_files(path, len(frames)), frames, strict=True):
        content = io.BytesIO()  # a write that a full disk cuts short is no error to Pillow's JPEG
        Image.fromarray(frame).save(content, format=kind, exif=exif, **options)
        file.write_bytes(content.getvalue())


def parameters(facts: Mapping[str, str]) -> str:
    """Return the facts as viewers and other programs for image generation read them.

    These are the prompt, the negative prompt, and a line of pairs, under the names of others.
    """
    names = {"guidance_scale": "CFG scale", "dtype": "Precision", "chipsparse": "Version"}
    lines = []
    pairs = []
    for name, value in facts.items():
        if name == "prompt":
            lines.append(value)
        elif name == "negative_prompt":
            lines.append(f"Negative prompt: {value}")
        else:
            text = f"chipsparse {value}" if name == "chipsparse" else value
            if any(mark in text for mark in ',:\n"'):
                text = json.dumps(text, ensure_ascii=False)
            pairs.append(f"{names.get(name, name.replace('_', ' ').capitalize())}: {text}")
    return "\n".join([*lines, ", ".join(pairs)])
