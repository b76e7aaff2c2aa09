"""What a finished `batch` tells on a terminal: how many, then a table, then where it all is."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from chipsparse.cli.batch.record import Batch, Row
from chipsparse.cli.progress import duration
from chipsparse.cli.tables import Facts, print_facts, print_table
from chipsparse.cli.views.units import shortened
from chipsparse.cli.wording import bundled_name, counted, seconds_text

MOST_ROWS = 40
LONGEST_PROMPT, LEAST_PROMPT = 60, 20


def print_batch(batch: Batch, console: Console) -> None:
    """Prints it; of many files, a row for those that are not there, and for the first others."""
    counts = (
        ("made", batch.made),
        ("already there", batch.already_there),
        ("failed", batch.failed),
        ("missing", batch.missing),
    )
    states = ", ".join(f"{count:,} {state}" for state, count in counts if count)
    facts: Facts = [
        ("model", bundled_name(batch.model) or batch.model),
        ("files", f"{states} of {len(batch.rows):,}, in {duration(batch.seconds)}"),
        ("folder", str(batch.folder)),
        ("manifest", str(batch.manifest)),
        ("page", str(batch.page)),
    ]
    print_facts(console, facts)
    console.print()
    rows = shown_rows(batch)
    print_table(console, _table(rows))
    left = len(batch.rows) - len(rows)
    if left:
        console.print(f" and {counted(left, 'file')} that the manifest has", highlight=False)


def shown_rows(batch: Batch) -> list[Row]:
    """Those for which there is room, in their order: first of all those without a file."""
    gone = {row.file for row in batch.rows if row.state in ("failed", "missing")}
    there = [row for row in batch.rows if row.file not in gone]
    room = max(0, MOST_ROWS - len(gone))
    shown = gone | {row.file for row in there[:room]}
    return [row for row in batch.rows if row.file in shown][:MOST_ROWS]


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 1), header_style="bold")
    table.add_column("file", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("time", no_wrap=True, justify="right")
    table.add_column("line", no_wrap=True, justify="right")
    table.add_column("seed", no_wrap=True, justify="right")
    table.add_column("prompt", min_width=LEAST_PROMPT)
    for row in rows:
        table.add_row(
            row.file if row.state in ("made", "already there") else "-",
            row.state,
            "-" if row.seconds is None else seconds_text(row.seconds),
            ", ".join(map(str, row.lines)),
            str(row.seed),
            row.error or shortened(row.prompt, LONGEST_PROMPT) or "(empty)",
        )
    return table
