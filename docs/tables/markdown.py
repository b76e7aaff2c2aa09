"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int | None = None
) -> str:
    """A table of cells that are Markdown themselves.

    Args:
        columns: their names.
        rows: a cell for each column.
        texts: how many first columns hold text; those behind hold numbers, which are aligned to the
            right. None: all.
    """
    texts = len(columns) if texts is None else texts
    rules = ["---"] * texts + ["--:"] * (len(columns) - texts)
    lines = [list(columns), rules, *([escaped(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escaped(cell: str) -> str:
    """A cell whose text has no bars and no line breaks of its own."""
    return " ".join(cell.split()).replace("|", "\\|")


def code(text: object) -> str:
    """As code."""
    return f"`{text}`"
