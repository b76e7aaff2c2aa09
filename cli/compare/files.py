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
from chipsparse.cli.media.read import Clip, output_fps, read_clip, size_text
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.experiments.quality import ClipComparison, compare_clips


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
        clips: A and B.
        result: how far B is from A.
        lpips: the metric, or why there is none.
        clip: of both and their difference, if one was asked for.
    """

    clips: tuple[Clip, Clip]
    result: ClipComparison
    lpips: Lpips
    clip: ComparisonClip | None

    @property
    def lossy(self) -> list[Path]:
        """The files whose format changed the pixels."""
        return list(dict.fromkeys(clip.path for clip in self.clips if clip.lossy))

    def to_json(self) -> dict[str, Any]:
        """Every number; `psnr_db` is null where the pixels are the same."""
        frames, height, width, _ = self.clips[0].frames.shape
        return {
            "chipsparse": chipsparse.__version__,
            "mode": "files",
            "a": self.clips[0].path,
            "b": self.clips[1].path,
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
        media.check_output(options.output, fps=options.fps)
    with ProgressDisplay() as display:
        clips = _read(first, display), _read(second, display)
        _check_pair(*clips)
        rate = options.fps or output_fps(*clips)
        if options.output is not None:
            if options.output.suffix.lower() == ".gif":
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
    return FilesComparison(clips, result, lpips, clip)


def _read(path: Path, display: ProgressDisplay) -> Clip:
    with display.stage(f"reading {path}"):
        return read_clip(path)


def _check_pair(a: Clip, b: Clip) -> None:
    lengths = len(a.frames), len(b.frames)
    sizes = size_text(a.frames[0]), size_text(b.frames[0])
    for what, (of_a, of_b) in (("frames", lengths), ("pixels", sizes)):
        if of_a != of_b:
            raise UserError(
                f"{a.path} has {of_a} {what} and {b.path} has {of_b}; only clips of one size and "
                "length can be compared"
            )


def _check_clips_stay(output: Path, files: list[Path]) -> None:
    """Raises `UserError` where the output, or one of its numbered files, would replace an input."""
    for file in files:
        stem, _, number = file.stem.rpartition("-")
        clip = file.with_name(stem + file.suffix) if stem and number.isdigit() else file
        if output.resolve() in (file.resolve(), clip.resolve()):
            raise UserError(f"--output {output} would replace {file}, which is compared")
