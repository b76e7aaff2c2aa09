"""How commands lay out facts and numbers on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

Facts = list[tuple[str, str]]


def print_facts(console: Console, facts: Facts) -> None:
    """Prints facts as a table."""
    console.print(facts_table(facts), highlight=False, markup=False)


def facts_table(facts: Facts) -> Table:
    """Names in bold, and what is to be said of each beside it."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in facts:
        table.add_row(f" {name}", text)
    return table


def print_table(console: Console, table: Table) -> None:
    """Prints a table as it is, and an empty line."""
    console.print(table, highlight=False, markup=False)
    console.print()
