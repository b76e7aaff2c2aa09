"""Two videos or images against each other: numbers, and a clip that shows where they differ."""

from __future__ import annotations

from pathlib import Path

from chipsparse.cli.compare.options import CompareOptions
from chipsparse.cli.compare.record import FilesComparison, ShownClip
from chipsparse.cli.errors import UserError, results_alone
from chipsparse.cli.media import write as media
from chipsparse.cli.media.panels import difference_rows, stack_panels
from chipsparse.cli.media.read import Clip, output_fps, read_clip, size_text
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.cli.views.terminal import print_result
from chipsparse.experiments.lpips import find_lpips
from chipsparse.experiments.quality import compare_clips


def compare_files(options: CompareOptions) -> None:
    """Read both, compare them, write their clip, and tell.

    Raises:
        UserError: a file cannot be read or written, or the two do not fit together.
    """
    with results_alone(), ProgressDisplay() as display:
        result = _compare(options, display)
    print_result(result, as_json=options.json)


def _compare(options: CompareOptions, display: ProgressDisplay) -> FilesComparison:
    first, second = (Path(subject.text) for subject in options.subjects)
    if options.output is not None:
        media.check_output(options.output, fps=options.fps)
    clips: list[Clip] = []
    for path in (first, second):
        with display.stage(f"reading {path}"):
            clips.append(read_clip(path))
    _check_pair(*clips)
    rate = options.fps or output_fps(*clips)
    if options.output is not None:
        if options.output.suffix.lower() == ".gif":
            media.check_output(options.output, fps=rate)
        _check_clips_stay(options.output, [*clips[0].files, *clips[1].files])
    a, b = (clip.frames for clip in clips)
    frames, height, width, _ = a.shape
    lpips = find_lpips(height, width)
    with display.stage("comparing"):
        quality = compare_clips(a, b, perceptual=lpips.measure)
    shown = None
    if options.output is not None:
        with display.stage(f"writing {options.output}"):
            rows, factor = difference_rows(
                (a, first.name), [(b, second.name)], factor=options.amplify, in_one_row=True
            )
            written = media.write_media({options.output: stack_panels(rows)}, fps=rate)
            shown = ShownClip(files=[str(f) for f in written[options.output]], amplified=factor)
    return FilesComparison(
        a=str(first),
        b=str(second),
        frames=frames,
        height=height,
        width=width,
        lossy=list(dict.fromkeys(str(clip.path) for clip in clips if clip.lossy)),
        lpips_missing=lpips.why_not,
        clip=shown,
        **quality.model_dump(),
    )


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
    """Raise `UserError` where the output, or one of its numbered files, would replace an input."""
    for file in files:
        stem, _, number = file.stem.rpartition("-")
        clip = file.with_name(stem + file.suffix) if stem and number.isdigit() else file
        if output.resolve() in (file.resolve(), clip.resolve()):
            raise UserError(f"--output {output} would replace {file}, which is compared")
