"""GIF and PNG files: written, and read again before anybody relies on them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from chipsparse.cli.media.metadata import Style, as_json, parameters

# Where a PNG of several says which frame it is, from 0, and of how many.
PLACE = "chipsparse frame"


def beside(path: Path, word: str) -> Path:
    """`out.mp4` and `dense` give `out-dense.mp4`."""
    return path.with_name(f"{path.stem}-{word}{path.suffix}")


def clip_files(path: Path, count: int) -> list[Path]:
    """The files of a clip of so many frames: one, or a PNG for each frame."""
    if count == 1 or path.suffix.lower() != ".png":
        return [path]
    digits = max(3, len(str(count - 1)))
    return [beside(path, f"{index:0{digits}}") for index in range(count)]


def write_gif(path: Path, frames: np.ndarray, style: Style) -> list[Path]:
    """Writes a GIF of uint8 frames ``[F, H, W, 3]``; raises `OSError` where that fails."""
    images = [Image.fromarray(frame).quantize(256) for frame in frames]
    # A GIF counts in hundredths of a second: spread the rounding so that the whole length is right.
    ends = [round(100 * (index + 1) / style.fps) for index in range(len(images))]
    durations_ms = [10 * (end - start) for start, end in zip([0, *ends], ends, strict=False)]
    images[0].save(
        path,
        save_all=True,
        append_images=images[1:],
        duration=durations_ms,
        loop=0,
        disposal=1,
        comment=parameters(style.metadata).encode("utf-8"),
    )
    _check_gif(path, frames.shape, sum(durations_ms))
    return [path]


def _check_gif(path: Path, shape: tuple[int, ...], total_ms: int) -> None:
    with Image.open(path) as image:
        found_ms = 0
        for index in range(getattr(image, "n_frames", 1)):
            image.seek(index)
            image.load()
            found_ms += image.info.get("duration", 0)
        # Not the number of frames: several that are alike become one that is shown for longer.
        if (image.height, image.width) != shape[1:3] or found_ms != total_ms:
            raise OSError(
                f"{shape[0]} frames take {total_ms} ms, those of the file that was written "
                f"{found_ms} ms"
            )


def write_pngs(path: Path, frames: np.ndarray, style: Style) -> list[Path]:
    """Writes one PNG, or `stem-000.png`, `stem-001.png`, … of several frames.

    Raises:
        OSError: a file could not be written, or does not read as what was written.
    """
    files = clip_files(path, len(frames))
    for index, (file, frame) in enumerate(zip(files, frames, strict=True)):
        text = PngInfo()
        text.add_text(PLACE, f"{index} of {len(frames)}")
        if style.metadata:
            text.add_text("parameters", parameters(style.metadata))
            text.add_text("chipsparse", as_json(style.metadata))
        Image.fromarray(frame).save(file, format="PNG", pnginfo=text)
        with Image.open(file) as image:
            if not np.array_equal(np.asarray(image), frame):
                raise OSError(f"{file.name} reads back as something else than was written")
    return files


def frame_of(file: Path) -> tuple[int, int] | None:
    """Which frame a PNG of ours is, from 0, and of how many; None for any other file."""
    try:
        with Image.open(file) as image:
            place = re.fullmatch(r"(\d+) of (\d+)", str(image.info.get(PLACE)))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None
    return None if place is None else (int(place[1]), int(place[2]))


def numbered(path: Path) -> list[Path]:
    """The files that are named as the frames of such a PNG, in the order of their numbers."""
    name = re.compile(re.escape(path.stem) + r"-(\d+)" + re.escape(path.suffix))
    found = ((name.fullmatch(each.name), each) for each in path.parent.glob("*"))
    return [file for _, file in sorted((int(hit[1]), each) for hit, each in found if hit)]


def earlier_pngs(path: Path) -> list[Path]:
    """What an earlier run wrote under this name: one file, or numbered frames; nobody else's."""
    candidates = [each for each in (path, *numbered(path)) if each.is_file()]
    places = {each: frame_of(each) for each in candidates}
    return [
        each
        for each, place in places.items()
        if place is not None and (each == path) == (place[1] == 1)
    ]
