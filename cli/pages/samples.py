"""Sample frames: of videos and images, small enough to stand in the page itself."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from chipsparse.cli.errors import UserError
from chipsparse.cli.heat_map import choose_factor, difference, heat_map
from chipsparse.cli.heat_map import label as heat_map_label
from chipsparse.cli.pages.elements import Element, element
from chipsparse.cli.pages.generation_record import GenerationRecord
from chipsparse.cli.pages.json_values import Values
from chipsparse.cli.pages.part import Missing, Section
from chipsparse.cli.pictures import numbered
from chipsparse.cli.read_media import read_clip

FRAMES, LARGEST_SIDE = 6, 320
# Of pictures that several clips share.
JOINED_FRAMES, JOINED_LARGEST_SIDE = 3, 640
JPEG_QUALITY = 88
# How much newer than the file that names it a picture may be and still be the one it was about.
SAME_RUN_SECONDS = 60.0
HOW = "Give the files that it should show with --media."


@dataclass(frozen=True)
class Sample:
    """Frames of one file.

    Attributes:
        label: which file it is.
        frames: uint8 ``[F, H, W, 3]``, in their own size.
        numbers: of these frames in their clip.
        joined: whether the file is a picture of several clips.
    """

    label: str
    frames: np.ndarray
    numbers: Sequence[int]
    joined: bool = False


def read_sample(path: Path, label: str, *, joined: bool = False) -> Sample:
    """Evenly spaced frames of a file; raises `UserError` where it cannot be read."""
    frames = read_clip(path).frames
    numbers = spaced(len(frames), JOINED_FRAMES if joined else FRAMES)
    return Sample(label, frames[numbers], numbers, joined)


def spaced(count: int, most: int) -> list[int]:
    """So many numbers below a count, evenly spaced, with the first one and the last one."""
    return sorted({round(place) for place in np.linspace(0, count - 1, min(count, most))})


def samples_section(samples: Sequence[Sample], title: str = "Sample frames") -> Section:
    """The frames of each sample in a row, one below the other."""
    return Section(
        title,
        "Evenly spaced frames, made smaller for this page. Numbers are those of the frames.",
        [element("div", *map(_strip, samples), class_="samples")],
    )


def with_difference(reference: Sample, sample: Sample) -> list[Sample]:
    """Both and, where their frames have one shape, a heat-map of where they differ."""
    if reference.frames.shape != sample.frames.shape:
        return [reference, sample]
    apart = difference(reference.frames, sample.frames)
    factor = choose_factor([apart])
    shown = heat_map(apart, factor)
    label = f"{heat_map_label(factor)}: black is none, white {-(-255 // factor)} of 255 or more"
    return [reference, sample, Sample(label, shown, sample.numbers)]


def _strip(sample: Sample) -> Element:
    side = JOINED_LARGEST_SIDE if sample.joined else LARGEST_SIDE
    pictures = (
        element(
            "figure",
            element("img", src=data_uri(frame, side), alt=f"{sample.label}, frame {number}"),
            element("figcaption", str(number)) if len(sample.numbers) > 1 else None,
        )
        for number, frame in zip(sample.numbers, sample.frames, strict=True)
    )
    several = len(sample.numbers) > 1
    strip = element("div", *pictures, class_="strip")
    classes = ["sample", *([] if several else ["single"]), *(["joined"] if sample.joined else [])]
    return element("div", element("h3", sample.label), strip, class_=" ".join(classes))


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


# What the files name.


def generation_samples(record: GenerationRecord) -> Section | Missing:
    """The sparse and the dense clip that a report names, where they are still there."""
    source = record.values.file
    wanted = {"sparse": record.files.get("output"), "dense": record.files.get("dense")}
    return _named(source, {label: name for label, name in wanted.items() if name}, "dense")


def files_samples(values: Values) -> Section | Missing:
    """Both files of a comparison."""
    return _named(values.file, {"A": values.text("a"), "B": values.text("b")}, "A")


def configs_samples(values: Values) -> Section | Missing:
    """The picture that a comparison of configs wrote."""
    picture = values.object("picture")
    names = picture.texts("files")
    if not names:
        return Missing("Sample frames", "They are there with compare -o worst.mp4.")
    label = "the prompt with the lowest PSNR: A, B, and where each differs from dense"
    return _named(values.file, {label: names[0]}, None, joined=True)


def suite_samples(values: Values) -> Section | Missing:
    """Every row's clip of the prompt on which ours are farthest from dense."""
    if "pictured" not in values:
        return Missing("Sample frames", "They are there as soon as a prompt is complete.")
    pictured = values.object("pictured")
    names = pictured.object("files").texts_by_name()
    # Beside the file: another suite in the current folder may have clips of the same names.
    names = {label: str(values.file.parent / name) for label, name in names.items()}
    found = _named(values.file, names, None)
    if isinstance(found, Missing):
        return found
    which = (
        f"The prompt of seed {pictured.count('seed')}, on which chipsparse is farthest from dense."
    )
    return dataclasses.replace(found, text=f"{which} {found.text}")


def _named(
    source: Path, names: dict[str, str], reference: str | None, *, joined: bool = False
) -> Section | Missing:
    """The clips that a file names, with their difference from one of them."""
    if not names:
        return Missing("Sample frames", f"{source.name} names no picture. {HOW}")
    samples: dict[str, Sample] = {}
    for label, name in names.items():
        path = find(source, name)
        if path is None:
            why = f"{Path(name).name}, which {source.name} names, is not there."
            return Missing("Sample frames", f"{why} {HOW}")
        if newest(path) > newest(source) + SAME_RUN_SECONDS:
            return Missing("Sample frames", f"{path.name} was written after {source.name}. {HOW}")
        try:
            samples[label] = read_sample(path, f"{label}: {path.name}", joined=joined)
        except UserError as error:
            why = str(error).replace(str(path), path.name)
            return Missing("Sample frames", f"{why}.")
    shown = list(samples.values())
    if reference in samples and len(shown) == 2:
        (other,) = [sample for label, sample in samples.items() if label != reference]
        shown = with_difference(samples[reference], other)
    return samples_section(shown)


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
