"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[dict[str, str]], *, texts: int = 0) -> str:
    """Return a table of rows by column; the cells are Markdown themselves.

    Args:
        rows: the cells by the names of the columns, which all rows share.
        texts: how many first columns hold text; the others hold numbers, which are aligned to the
            right. 0: all hold text.
    """
    columns = list(rows[0])
    rules = ["---" if not texts or index < texts else "--:" for index in range(len(columns))]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, rules, *cells))
