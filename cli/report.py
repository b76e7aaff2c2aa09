"""`chipsparse report`: one HTML page of what other commands measured."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from chipsparse.cli.errors import reported_errors
from chipsparse.cli.options import OUTPUT, PICTURE, DebugOption

EXAMPLE = "Example: [bold]chipsparse report report.json -o report.html[/bold]"


def report(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="What generate --report wrote, the results file of tune, or what compare --json "
            "or bench --json printed. Several make one page.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="Page to write: .html.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ],
    media: Annotated[
        list[Path] | None,
        typer.Option(
            help="Video or image to show frames of (.mp4, .webm, .gif, .png, a folder of .png); "
            "may be given several times.",
            show_default="those that the files name",
            rich_help_panel=PICTURE,
        ),
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Make one HTML page of results: charts, budgets, memory over steps, sample frames.

    The page needs no other file, no network and no scripts.
    """
    with reported_errors(debug=debug):
        # Imported here so that --help does not wait for torch.
        from chipsparse.cli.pages.job import ReportOptions, write_report
        from chipsparse.common.byte_sizes import format_bytes

        options = ReportOptions(sources, output, media or [])
        with contextlib.redirect_stdout(sys.stderr):  # stdout carries the result and nothing else
            written = write_report(options)
        print(f"{output} ({format_bytes(written)})")
