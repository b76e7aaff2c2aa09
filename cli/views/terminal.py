"""Results on the standard output: as tables for people, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from chipsparse.cli.errors import printing
from chipsparse.cli.views.sections import Alert, Facts, Items, Part, Result, Section, Table, Tile

LEAST_TEXT = 16  # columns of the terminal for a text beside its name


def print_result(result: Result, *, as_json: bool, verbose: bool = False) -> None:
    """Print a result on the standard output."""
    with printing():
        if as_json:
            print(json.dumps(result.to_json(), indent=2, ensure_ascii=False, allow_nan=False))
        else:
            print_sections(Console(), result.sections(verbose=verbose))


def print_sections(console: Console, sections: Sequence[Section]) -> None:
    """Print sections one below the other, with an empty line around tables."""
    blank = True
    for section in sections:
        if section.where == "page":
            continue
        blocks = _blocks(section.parts, console.width)
        if not blocks:
            continue
        if section.title:
            if not blank:
                console.print()
            console.print(Text(f" {section.title}", "bold"))
        for block in blocks:
            is_table = block.show_header  # facts have no header
            if is_table and not blank:
                console.print()
            console.print(block, highlight=False, markup=False)
            if is_table:
                console.print()
            blank = is_table


def _blocks(parts: Sequence[Part | None], width: int) -> list[Grid]:
    """Return what is printed; neighbouring facts share one table, so that their columns agree."""
    blocks: list[Grid] = []
    rows: list[tuple[str, str]] = []

    def close() -> None:
        if rows:
            blocks.append(_facts(rows, width))
            rows.clear()

    for part in parts:
        if isinstance(part, Tile):
            detail = f" ({part.detail})" if part.detail else ""
            rows.append((part.label, f"{part.value}{detail}"))
        elif isinstance(part, Facts):
            rows.extend((name, text) for name, text in part.rows if text)
        elif isinstance(part, Alert):
            rows.append(("error" if part.role == "error" else "warning", part.text))
        elif isinstance(part, Items):
            rows.extend((part.heading or "note", text) for text in part.texts)
        elif isinstance(part, Table) and part:
            close()
            blocks.append(_table(part, width))
    close()
    return blocks


def _facts(rows: Sequence[tuple[str, str]], width: int) -> Grid:
    """Return names with texts beside them, or below them where there is no room beside."""
    grid = Grid.grid(padding=(0, 2))
    names = max(len(name) for name, _ in rows)
    if width - names - 5 < LEAST_TEXT:
        grid.add_column(overflow="fold")
        for name, text in rows:
            if name:
                grid.add_row(Text(f" {name}", "bold"))
            grid.add_row(Padding(Text(text), (0, 0, 0, 2)))
        return grid
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(f" {name}", text)
    return grid


def _table(table: Table, width: int) -> Grid:
    """Return a table; where it is too wide, texts fold, or else wide columns at their spaces.

    Where words would be cut, each row becomes facts, named by the columns.
    """
    columns = [*zip(table.columns, *table.rows, strict=True)]
    longest = [max(len(word) for cell in cells for word in cell.split()) for cells in columns]
    texts = [min(length, LEAST_TEXT) for length in longest[: table.texts]]
    if sum(texts) + sum(longest[table.texts :]) + len(columns) > width:
        facts: list[tuple[str, str]] = []
        for row in table.rows:
            facts += [*zip(table.columns, row, strict=True), ("", " ")]
        return _facts(facts[:-1], width)
    widths = [max(map(len, cells)) for cells in columns]
    places = sorted(range(len(widths)), key=widths.__getitem__) if table.texts == 1 else []
    while places and sum(widths) + len(widths) > width:
        cells = columns[place := places.pop()]
        words = (len(word) for cell in cells for word in cell.split())
        widths[place] = max([(widths[place] + 1) // 2, *words])
    gap = min(2, max(table.texts > 1, (width - sum(widths)) // len(widths) - 1))
    grid = Grid(box=None, padding=(0, gap, 0, 1), header_style="bold")
    for place, heading in enumerate(table.columns):
        text = place < table.texts
        fixed = None if text and table.texts > 1 else widths[place]
        grid.add_column(heading, justify="left" if text else "right", width=fixed, overflow="fold")
    for row in table.rows:
        grid.add_row(*row)
    return grid
