"""`chipsparse report`: one HTML page of what other commands measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from chipsparse.cli.errors import results_alone
from chipsparse.cli.options import (
    REQUIRED,
    PrintOptions,
    argument,
    generation_option,
    output_option,
)

EXAMPLE = "Example: [bold]chipsparse report report.json -o report.html[/bold]"


@dataclass(frozen=True, kw_only=True)
class ReportOptions(PrintOptions):
    """What the user typed for `report`."""

    sources: list[Path] = argument(
        help="What generate --report wrote, the results file of tune, or what compare --json "
        "printed. Several make one page.",
        default=REQUIRED,
        metavar="FILE...",
    )
    output: Path = output_option("-o", help="Page to write: .html.", default=REQUIRED, shown=False)
    media: list[Path] | None = generation_option(
        help="Video or image to show frames of (.mp4, .webm, .gif, .png, a folder of .png); "
        "may be given several times.",
        shown="those that the files name",
    )
    json: bool = False


def report(options: ReportOptions) -> None:
    """Make one HTML page of results: charts, budgets, memory over steps, sample frames.

    The page needs no other file, no network and no scripts.
    """
    # Imported here so that --help does not wait for torch.
    from chipsparse.cli.views.report import write_report
    from chipsparse.common.byte_sizes import format_bytes

    with results_alone():
        written = write_report(options.sources, options.media or [], options.output)
    print(f"{options.output} ({format_bytes(written)})")
