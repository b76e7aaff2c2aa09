"""Sample frames of videos and images, small enough to stand in the page itself."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from chipsparse.cli.errors import UserError
from chipsparse.cli.media.panels import choose_factor, difference, heat_map
from chipsparse.cli.media.read import read_clip
from chipsparse.cli.views.sections import Clips
from chipsparse.common.files import numbered_files

# Frames of a file and their largest side in pixels: of one clip, and of clips side by side.
FRAMES = 6
LARGEST_SIDE = 320
WIDE_FRAMES = 3
WIDE_LARGEST_SIDE = 640
JPEG_QUALITY = 88
# How much newer than the file that names it a clip may be and still be the one that was meant.
SAME_RUN_SECONDS = 60.0
HOW = "Give the files that it should show with --media."


@dataclass(frozen=True)
class Sample:
    """Frames of one file: uint8 ``[F, H, W, 3]`` in their own size, with their numbers."""

    label: str
    frames: np.ndarray
    numbers: Sequence[int]
    side_by_side: bool = False

    @property
    def images(self) -> list[tuple[int, str]]:
        """The number of each frame, and a data URI of it, scaled down to the page's size."""
        side = WIDE_LARGEST_SIDE if self.side_by_side else LARGEST_SIDE
        uris = (data_uri(frame, side) for frame in self.frames)
        return list(zip(self.numbers, uris, strict=True))


def read_sample(path: Path, label: str, *, side_by_side: bool = False) -> Sample:
    """Return evenly spaced frames of a file; raises `UserError` where it cannot be read."""
    frames = read_clip(path).frames
    numbers = spaced(len(frames), WIDE_FRAMES if side_by_side else FRAMES)
    return Sample(label, frames[numbers], numbers, side_by_side)


def spaced(count: int, most: int) -> list[int]:
    """Return at most ``most`` numbers below a count, evenly spaced, the first and last included."""
    return sorted({round(place) for place in np.linspace(0, count - 1, min(count, most))})


def named_samples(source: Path, clips: Clips) -> list[Sample] | str:
    """Return frames of the clips that a file names as they were when it was written, or why not."""
    if not clips.names:
        return clips.missing or f"{source.name} names no clip. {HOW}"
    samples: dict[str, Sample] = {}
    for label, name in clips.names.items():
        # Elsewhere than beside the file, another run may have clips of the same names.
        path = find(source, str(source.parent / name) if clips.beside else name)
        if path is None:
            return f"{Path(name).name}, which {source.name} names, is not there. {HOW}"
        if newest(path) > newest(source) + SAME_RUN_SECONDS:
            return f"{path.name} was written after {source.name}. {HOW}"
        try:
            title = f"{label}: {path.name}"
            samples[label] = read_sample(path, title, side_by_side=clips.side_by_side)
        except UserError as error:
            return f"{str(error).replace(str(path), path.name)}."
    shown = list(samples.values())
    reference = samples.get(clips.reference or "")
    if reference is not None and len(shown) == 2:
        (other,) = (sample for sample in shown if sample is not reference)
        shown = [reference, other]
        if reference.frames.shape == other.frames.shape:
            differences = difference(reference.frames, other.frames)
            factor = choose_factor([differences])
            label = f"difference x{factor}: black is none, {white_of(factor)}"
            shown.append(Sample(label, heat_map(differences, factor), other.numbers))
    return shown


def white_of(factor: int) -> str:
    """Return the difference that a heat-map with this factor paints white."""
    white = -(-255 // factor)
    more = " or more" if white < 255 else ""
    return f"white is {white} of 255{more}"


def data_uri(frame: np.ndarray, side: int) -> str:
    """Return a frame, uint8 ``[H, W, 3]``, as a data URI of a PNG or JPEG, whichever is smaller.

    It is made smaller where its largest side has more than ``side`` pixels.
    """
    image = Image.fromarray(frame)
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    forms = image_uri(image, "png", optimize=True), image_uri(image, "jpeg", quality=JPEG_QUALITY)
    return min(forms, key=len)


def image_uri(image: Image.Image, form: str, **options: Any) -> str:
    """Return an image in a format of PIL as an address that holds it."""
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return f"data:image/{form};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def find(source: Path, name: str) -> Path | None:
    """Return the file that another one names: from the current folder, or beside that one."""
    for path in (Path(name), source.parent / name, source.parent / Path(name).name):
        if path.exists() or numbered_files(path):
            return path
    return None


def newest(path: Path) -> float:
    """Return when a file, or the last of its numbered ones, was written."""
    files = [path] if path.exists() else numbered_files(path)
    return max(file.stat().st_mtime for file in files)
