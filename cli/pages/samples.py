"""Sample frames: of videos and images, small enough to stand in the page itself."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from chipsparse.cli.errors import UserError
from chipsparse.cli.media.heat_map import choose_factor, difference, heat_map, heat_map_label
from chipsparse.cli.media.read import read_clip
from chipsparse.cli.media.write import numbered
from chipsparse.cli.pages.records import Clips

FRAMES, LARGEST_SIDE = 6, 320
# Of files that several clips share.
JOINED_FRAMES, JOINED_LARGEST_SIDE = 3, 640
JPEG_QUALITY = 88
# How much newer than the file that names it a clip may be and still be the one it was about.
SAME_RUN_SECONDS = 60.0
HOW = "Give the files that it should show with --media."


@dataclass(frozen=True)
class Sample:
    """Frames of one file.

    Attributes:
        frames: uint8 ``[F, H, W, 3]``, in their own size.
        numbers: of these frames in their clip.
        joined: whether several clips share the file.
    """

    label: str
    frames: np.ndarray
    numbers: Sequence[int]
    joined: bool = False

    @property
    def images(self) -> list[tuple[int, str]]:
        """Number and data URI of each frame."""
        side = JOINED_LARGEST_SIDE if self.joined else LARGEST_SIDE
        uris = (data_uri(frame, side) for frame in self.frames)
        return list(zip(self.numbers, uris, strict=True))


@dataclass(frozen=True)
class Samples:
    """The frames of several files, one below the other.

    Attributes:
        about: which clips these are, where that has to be said.
    """

    rows: Sequence[Sample]
    about: str = ""


def read_sample(path: Path, label: str, *, joined: bool = False) -> Sample:
    """Evenly spaced frames of a file; raises `UserError` where it cannot be read."""
    frames = read_clip(path).frames
    numbers = spaced(len(frames), JOINED_FRAMES if joined else FRAMES)
    return Sample(label, frames[numbers], numbers, joined)


def spaced(count: int, most: int) -> list[int]:
    """So many numbers below a count, evenly spaced, with the first one and the last one."""
    return sorted({round(place) for place in np.linspace(0, count - 1, min(count, most))})


def named_samples(source: Path, clips: Clips) -> Samples | str:
    """Frames of the clips that a file names, as they were when it was written; else why not."""
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
            samples[label] = read_sample(path, f"{label}: {path.name}", joined=clips.joined)
        except UserError as error:
            return f"{str(error).replace(str(path), path.name)}."
    shown = list(samples.values())
    if clips.reference in samples and len(shown) == 2:
        (other,) = (sample for label, sample in samples.items() if label != clips.reference)
        shown = with_difference(samples[clips.reference], other)
    return Samples(shown, clips.about)


def with_difference(reference: Sample, sample: Sample) -> list[Sample]:
    """Both and, where their frames have one shape, a heat-map of where they differ."""
    if reference.frames.shape != sample.frames.shape:
        return [reference, sample]
    apart = difference(reference.frames, sample.frames)
    factor = choose_factor([apart])
    shown = heat_map(apart, factor)
    label = f"{heat_map_label(factor)}: black is none, white {-(-255 // factor)} of 255 or more"
    return [reference, sample, Sample(label, shown, sample.numbers)]


def data_uri(frame: np.ndarray, side: int) -> str:
    """A frame as text.

    Args:
        frame: uint8 ``[H, W, 3]``.
        side: the largest that it may have, in pixels.

    Returns:
        A URI with the frame as PNG or JPEG, whichever is smaller.
    """
    image = Image.fromarray(frame)
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    forms = []
    for form, options in (("png", {"optimize": True}), ("jpeg", {"quality": JPEG_QUALITY})):
        buffer = io.BytesIO()
        image.save(buffer, form, **options)
        forms.append((len(buffer.getvalue()), form, buffer.getvalue()))
    _, form, content = min(forms)
    return f"data:image/{form};base64,{base64.b64encode(content).decode('ascii')}"


def find(source: Path, name: str) -> Path | None:
    """Where a file is that another one names: from the current folder, or beside that one."""
    for path in (Path(name), source.parent / name, source.parent / Path(name).name):
        if path.exists() or numbered(path):
            return path
    return None


def newest(path: Path) -> float:
    """When a file, or the last of its numbered ones, was written."""
    files = [path] if path.exists() else numbered(path)
    return max(file.stat().st_mtime for file in files)
