"""Two videos or images against each other: numbers, and a clip that shows where they differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from chipsparse.cli.compare.options import CompareOptions
from chipsparse.cli.compare.record import FilesComparison, ShownClip
from chipsparse.cli.errors import EXIT_FAILED, UserError, results_alone, say, user_errors
from chipsparse.cli.media import write as media
from chipsparse.cli.media.formats import check_output
from chipsparse.cli.media.panels import Panel, difference_rows, stack_panels
from chipsparse.cli.media.read import Clip, output_fps, read_clip
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.cli.views.terminal import print_result
from chipsparse.common.files import check_inputs_stay
from chipsparse.experiments.comparison import comparison_of
from chipsparse.experiments.frames import check_fit
from chipsparse.experiments.lpips import Lpips, find_lpips
from chipsparse.experiments.quality import compare_clips


def compare_files(options: CompareOptions) -> None:
    """Read both, compare them, write their clip, and print."""
    shown = None
    output = options.output
    with results_alone(), ProgressDisplay() as display:
        with display.stage(f"reading {options.a} and {options.b}"):
            a = read_clip(Path(options.a or ""))
            b = read_clip(Path(options.b or ""))
        rate = options.fps or output_fps(a, b)
        fps = rate if output and output.suffix.lower() == ".gif" else options.fps
        _check(a, b, options, fps)
        frames, height, width, _ = a.frames.shape
        lpips = find_lpips(height, width)
        check_lpips(options, lpips)
        with display.stage("comparing"):
            quality = compare_clips(a.frames, b.frames, perceptual=lpips.measure)
        with user_errors(ValueError):
            broken = options.bounds.broken(comparison_of(quality, height, width))
        if output is not None:
            with display.stage(f"writing {output}"):
                pair = (a.frames, a.path.name), [(b.frames, b.path.name)]
                shown = write_clip(output, *pair, options, fps=rate, in_one_row=True)
    result = FilesComparison(
        a=str(a.path),
        b=str(b.path),
        frames=frames,
        height=height,
        width=width,
        lossy=list(dict.fromkeys(str(clip.path) for clip in (a, b) if clip.lossy)),
        lpips_missing=lpips.why_not,
        clip=shown,
        bounds=options.bounds.given,
        passed=not broken if options.bounds.given else None,
        broken=[bound.text for bound in broken],
        **quality.model_dump(),
    )
    print_result(result, as_json=options.json)
    fail_where_broken(result.broken)


def check_lpips(options: CompareOptions, lpips: Lpips) -> None:
    """Raise `UserError` where a bound needs LPIPS, and it cannot be measured."""
    if options.max_lpips is not None and lpips.why_not is not None:
        raise UserError(f"--max-lpips {options.max_lpips:g} needs LPIPS: {lpips.why_not}")


def fail_where_broken(broken: Sequence[str]) -> None:
    """End the command with exit code 1 and the broken bounds on stderr; do nothing for none."""
    if broken:
        say(f"failed: {'; '.join(broken)}")
        raise typer.Exit(EXIT_FAILED)


def write_clip(
    output: Path,
    reference: Panel,
    others: Sequence[Panel],
    options: CompareOptions,
    *,
    fps: float,
    in_one_row: bool = False,
) -> ShownClip:
    """Write clips beside each other, with heat-maps of the difference from the reference."""
    rows, factor = difference_rows(reference, others, factor=options.amplify, in_one_row=in_one_row)
    written = media.write_media({output: stack_panels(rows)}, fps=fps)
    return ShownClip(files=[str(file) for file in written[output]], amplified=factor)


def _check(a: Clip, b: Clip, options: CompareOptions, fps: float | None) -> None:
    """Raise `UserError` where the clips do not fit together, or cannot be written."""
    with user_errors(ValueError):
        check_fit(a.frames, b.frames, names=(str(a.path), str(b.path)))
    if options.output is not None:
        check_output(options.output, fps=fps)
        single = len(a.frames) == 1
        check_inputs_stay(options.writes(single=single), options.reads())
