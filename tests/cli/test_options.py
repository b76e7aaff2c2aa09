"""Options that are declared once, as fields of a dataclass."""

import dataclasses
import inspect
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from chipsparse.cli.errors import UserError
from chipsparse.cli.options import (
    REQUIRED,
    LastCounts,
    PrintOptions,
    argument,
    as_command,
    check_positive,
    option,
    output_option,
    panel_options,
)


@dataclass(frozen=True, kw_only=True)
class Base(PrintOptions):
    size: int | None = option(help="Size.", shown="small", panel="Shape", check=check_positive)
    colour: str = option(help="Colour.", default="red", panel="Shape")


@dataclass(frozen=True, kw_only=True)
class Own(Base):
    what: str | None = argument(help="What.", metavar="WHAT", read=str.upper)
    output: Path = output_option("-o", help="File.", default=REQUIRED)
    late_one: bool = option(help="Late.", default=False, panel="Shape", before="colour")
    colour: str = option(help="Another colour.", default="blue", panel="Shape")
    debug: bool = False


@pytest.fixture
def called():
    """The app with one command, and what that was given."""
    given = []

    def paint(options: Own) -> None:
        """Paint something."""
        given.append(options)

    app = typer.Typer()
    app.command(cls=LastCounts)(as_command(paint))
    return app, given


def invoke(app, *words):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})


def test_own_options_lead_unless_they_say_otherwise():
    command = as_command(annotated)
    names = list(inspect.signature(command).parameters)
    assert names == ["what", "output", "size", "late_one", "colour", "json"]


def annotated(options: Own) -> None:
    """A command."""


def test_a_record_of_what_was_typed(called):
    app, given = called
    ran = invoke(app, "cat", "-o", "a.png", "--size", "3", "--late-one")
    assert ran.exit_code == 0, ran.output
    assert given == [Own(what="CAT", output=Path("a.png"), size=3, late_one=True)]
    assert (given[0].colour, given[0].json, given[0].debug) == ("blue", False, False)


def test_help(called):
    shown = " ".join(invoke(called[0], "--help").stdout.split())
    for text in ("Paint something.", "Another colour.", "[default: blue]", "(small)", "[required]"):
        assert text in shown
    assert "--debug" not in shown
    assert "--no-late-one" not in shown


def test_checks_come_before_the_command(called):
    app, given = called
    ran = invoke(app, "-o", "a.png", "--size", "0")
    assert (ran.exit_code, given) == (2, [])
    assert "--size 0 is too small; it must be at least 1" in ran.stderr


def test_of_an_option_that_stands_twice_the_last_counts_and_it_is_said(called):
    app, given = called
    twice = invoke(app, "-o", "a.png", "--late-one", "--late-one", "--output", "b.png")
    assert twice.stderr == "chipsparse: warning: --output is given 2 times; the last one counts\n"
    assert given == [Own(output=Path("b.png"), late_one=True)]


def test_what_cannot_be_read_is_an_error_of_the_user():
    def refuse(_: str) -> str:
        raise UserError("no word")

    @dataclass(frozen=True, kw_only=True)
    class Words(PrintOptions):
        word: str | None = option(help="A word.", read=refuse)

    def say(options: PrintOptions) -> None:
        raise AssertionError("it ran")

    say.__annotations__["options"] = Words
    app = typer.Typer()
    app.command()(as_command(say))
    ran = invoke(app, "--word", "x")
    assert ran.exit_code == 2
    assert ran.stderr == "chipsparse: error: no word\n"


def test_what_was_given():
    assert Own(output=Path("a"), what="x", size=3).given() == ["WHAT", "--output", "--size"]
    assert Base(colour="red").given() == []


def test_the_options_of_a_panel():
    assert panel_options(Own, "Shape") == ["size", "late_one", "colour"]


def test_records_can_be_made_anew():
    options = dataclasses.replace(Own(output=Path("a")), size=-1)
    with pytest.raises(UserError, match="--size -1 is too small"):
        options.check()
