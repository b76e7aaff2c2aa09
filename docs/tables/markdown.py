"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int = 0) -> str:
    """Return a table of cells that are Markdown themselves.

    Args:
        columns: their names.
        rows: a cell for each column.
        texts: how many first columns hold text; the others hold numbers, which are aligned to the
            right. 0: all hold text.
    """
    texts = texts or len(columns)
    rules = ["---"] * texts + ["--:"] * (len(columns) - texts)
    lines = [list(columns), rules, *([escaped(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escaped(cell: str) -> str:
    """Return a cell whose text has no bars and no line breaks of its own."""
    return " ".join(cell.split()).replace("|", "\\|")


def code(text: object) -> str:
    """Return a text marked as code."""
    return f"`{text}`"
