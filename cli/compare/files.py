"""Two videos or images against each other: numbers, and a clip that shows where they differ."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chipsparse
from chipsparse.cli.commands.compare import CompareOptions
from chipsparse.cli.compare.clip_json import clip_json
from chipsparse.cli.errors import UserError
from chipsparse.cli.generation.lpips import Lpips, find_lpips
from chipsparse.cli.media import write as media
from chipsparse.cli.media.panels import difference_rows, stack_panels
from chipsparse.cli.media.read import Clip, output_fps, read_clip
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.measure.clip_comparison import ClipComparison, compare_clips


@dataclass(frozen=True)
class ComparisonClip:
    """A clip that shows a comparison.

    Attributes:
        amplified: by how much its heat-map amplifies.
    """

    files: list[Path]
    amplified: int


@dataclass(frozen=True)
class FilesComparison:
    """What `chipsparse compare` found out about two files.

    Attributes:
        paths: of A and B.
        result: how far B is from A.
        lpips: the metric, or why there is none.
        clip: of both and their difference, if one was asked for.
    """

    paths: tuple[Path, Path]
    clips: tuple[Clip, Clip]
    result: ClipComparison
    lpips: Lpips
    clip: ComparisonClip | None

    @property
    def lossy(self) -> list[Path]:
        """The files whose format changed the pixels."""
        pairs = zip(self.paths, self.clips, strict=True)
        return list(dict.fromkeys(path for path, clip in pairs if clip.lossy))

    def to_json(self) -> dict[str, Any]:
        """Every number; `psnr_db` is null where the pixels are the same."""
        frames, height, width, _ = self.clips[0].frames.shape
        return {
            "chipsparse": chipsparse.__version__,
            "mode": "files",
            "a": self.paths[0],
            "b": self.paths[1],
            "frames": frames,
            "height": height,
            "width": width,
            "lossy": self.lossy,
            **clip_json(self.result, "flicker_a", "flicker_b"),
            "lpips_missing": self.lpips.why_not,
            "clip": self.clip,
        }


def compare_files(options: CompareOptions) -> FilesComparison:
    """Reads both, compares them and writes their clip.

    Raises:
        UserError: a file cannot be read or written, or the two do not fit together.
    """
    first, second = (Path(subject.text) for subject in options.subjects)
    if options.output is not None:
        media.check_output(options.output, fps=options.rate)
    with ProgressDisplay() as display:
        clips = _read(first, display), _read(second, display)
        _check_pair(first, clips[0], second, clips[1])
        rate = options.fps or output_fps(*clips)
        if options.output is not None:
            media.check_output(options.output, fps=rate)
            _check_clips_stay(options.output, [*clips[0].files, *clips[1].files])
        a, b = (clip.frames for clip in clips)
        lpips = find_lpips(*a.shape[1:3])
        with display.stage("comparing"):
            result = compare_clips(a, b, perceptual=lpips.measure)
        clip = None
        if options.output is not None:
            with display.stage(f"writing {options.output}"):
                rows, factor = difference_rows(
                    (a, first.name), [(b, second.name)], factor=options.amplify, in_one_row=True
                )
                written = media.write_media({options.output: stack_panels(rows)}, fps=rate)
                clip = ComparisonClip(written[options.output], factor)
    return FilesComparison((first, second), clips, result, lpips, clip)


def _read(path: Path, display: ProgressDisplay) -> Clip:
    with display.stage(f"reading {path}"):
        return read_clip(path)


def _check_pair(a: Path, first: Clip, b: Path, second: Clip) -> None:
    for what, index in (("frames", 0), ("pixels", slice(2, 0, -1))):
        sizes = [clip.frames.shape[index] for clip in (first, second)]
        if sizes[0] != sizes[1]:
            texts = ["x".join(map(str, s)) if isinstance(s, tuple) else str(s) for s in sizes]
            raise UserError(
                f"{a} has {texts[0]} {what} and {b} has {texts[1]}; only clips of one size and "
                "length can be compared"
            )


def _check_clips_stay(output: Path, files: list[Path]) -> None:
    """Raises `UserError` where the output, or one of its numbered files, would replace an input."""
    for file in files:
        stem, dash, number = file.stem.rpartition("-")
        numbered = bool(dash) and number.isdigit() and file.with_name(stem + file.suffix)
        for taken in (file, numbered):
            if taken and taken.resolve() == output.resolve():
                raise UserError(f"--output {output} would replace {file}, which is compared")
