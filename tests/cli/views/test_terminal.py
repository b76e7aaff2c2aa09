"""Help and tables on narrow terminals: readable, and no name is cut."""

import re
from io import StringIO
from typing import get_type_hints

import pytest
from rich.console import Console

from chipsparse.cli.commands import COMMANDS
from chipsparse.cli.options import _declared, option_name
from chipsparse.cli.views.sections import Facts, Section, Table
from chipsparse.cli.views.terminal import print_sections
from tests.cli.conftest import command

NARROW = ("20", "40", "60")


def words(text):
    """Return all words, those that are broken off at the end of a line joined."""
    return "".join(text.split())


@pytest.mark.parametrize("columns", NARROW)
@pytest.mark.parametrize("run", COMMANDS, ids=lambda run: run.__name__)
def test_no_option_of_the_help_is_cut(monkeypatch, run, columns):
    monkeypatch.setenv("COLUMNS", columns)
    shown = command(run.__name__, "--help").fine().stdout
    kind = get_type_hints(run)["options"]
    declared = [name for name, item in _declared(kind).items() if item.words["metavar"] is None]
    names = [option_name(name) for name in declared if option_name(name) in shown]
    assert len(names) >= len(declared) - 3  # arguments are no options
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown


@pytest.mark.parametrize("columns", NARROW)
@pytest.mark.parametrize("line", ["models", "explain", "explain --quality fast"])
def test_no_name_of_a_result_is_cut(workdir, monkeypatch, line, columns):
    wide = command(*line.split()).fine().stdout
    monkeypatch.setenv("COLUMNS", columns)
    shown = command(*line.split()).fine().stdout
    assert max(map(len, shown.splitlines())) <= int(columns)
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    for name in re.findall(r"(?m)^ ?(\w{3,})  ", wide):
        assert name in words(shown)


def printed(width, *parts):
    stream = StringIO()
    print_sections(Console(file=stream, width=width), [Section("", [*parts])])
    return stream.getvalue()


TABLE = Table(["written", "seed", "speed-up"], [["out-000.png", "7", "1.25x"]] * 2, texts=1)


def test_a_table_without_room_has_its_rows_below_each_other():
    assert [line.split() for line in printed(20, TABLE).splitlines() if line.strip()] == [
        ["written"],
        ["out-000.png"],
        ["seed"],
        ["7"],
        ["speed-up"],
        ["1.25x"],
    ] * 2
    assert [line.split() for line in printed(40, TABLE).split("\n") if line.strip()] == [
        TABLE.columns,
        *TABLE.rows,
    ]


def test_facts_stand_beside_their_names_or_below():
    facts = Facts([("transformer", "a text of some words")])
    assert printed(60, facts).strip() == "transformer  a text of some words"
    assert [line.strip() for line in printed(30, facts).splitlines()] == [
        "transformer",
        "a text of some words",
    ]
