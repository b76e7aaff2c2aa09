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
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.options import Item
from chipsparse.common.files import IMAGES, beside, numbered, scratch_folder
from chipsparse.common.text_files import readable
from chipsparse.common.version import __version__

if TYPE_CHECKING:
    from chipsparse.cli.request import Request

GIF_MAX_FPS = 50
# The name of the text in each PNG of a clip that says how many there are.
FRAME_COUNT = "chipsparse frames"
# The text in a JPEG or WebP: where other programs look for it, after its own mark of the encoding.
EXIF_FOLDER = 0x8769
USER_COMMENT = 0x9286
UTF_16 = b"UNICODE\0"
LONGEST_COMMENT_BYTES = 60_000  # all of it must fit into 64 KiB
JPEG_QUALITY = 95
LONGEST_TAG = 30_000  # letters: a word of a command line is at most 128 KiB
# Of each kind of video: the encoder with its options, the constant rate factor that is visually
# lossless, and the largest, which is worst.
CODECS = {
    ".mp4": (("libx264", "-preset", "slow", "-movflags", "+faststart"), 12, 51),
    ".webm": (("libvpx-vp9", "-b:v", "0", "-row-mt", "1", "-cpu-used", "2"), 15, 63),
}
# Of .webm: every pixel is kept, as VP9 stores green, blue and red themselves.
LOSSLESS = ("-c:v", "libvpx-vp9", "-lossless", "1", "-pix_fmt", "gbrp", "-row-mt", "1")
CLIPS = (*CODECS, ".gif", ".png")
SUFFIXES = (*CODECS, ".gif", *IMAGES)


# Before anything is computed.


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


# Writing.


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


# Facts in the files about how clips were made.


def generation_metadata(request: Request, item: Item) -> dict[str, str]:
    """Return the facts about a generation, in the order in which they are to be shown.

    They name no folder: a file may be sent to others.
    """
    settings = request.settings
    options = request.generate_options
    profile = None if options.dense else request.profile
    guidance = settings.true_cfg_scale
    facts = {
        "prompt": item.prompt,
        "negative_prompt": options.negative_prompt,
        "steps": settings.num_inference_steps,
        "guidance_scale": settings.guidance_scale if guidance is None else guidance,
        "seed": item.seed,
        "size": f"{settings.width}x{settings.height}" if settings.width else None,
        "frames": settings.num_frames,
        "model": _without_folder(request.model.location),
        "lora": ", ".join(f"{lora.file.name}:{lora.scale:g}" for lora in options.loras) or None,
        "scheduler": None if options.scheduler is None else type(request.scheduler).__name__,
        "flow_shift": options.flow_shift,
        "strength": options.strength,
        "dtype": request.dtype_name,
        "mode": options.mode,
        "profile": None if profile is None else _without_folder(profile.source),
        "quality": None if profile is None else profile.quality,
        "chipsparse": __version__,
    }
    return {name: readable(str(value)) for name, value in facts.items() if value is not None}


def _without_folder(location: str) -> str:
    """Return the name of a model or a profile; that of a model on the hub has no folder."""
    path = Path(location).expanduser()
    here = path.is_absolute() or path.exists()
    return os.path.basename(os.path.abspath(path)) if here else location


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
