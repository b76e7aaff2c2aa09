"""Which kind of file it is that a page is to be made of, told by what is in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chipsparse.cli.errors import UserError
from chipsparse.cli.pages.json_values import Values
from chipsparse.report.as_json import SCHEMA
from chipsparse.tuning.results_file import FORMAT

KNOWN = (
    "generate --report, a results file of tune, compare --json, the suite.json of compare --suite "
    "and bench --json are what it reads"
)


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        name: what it is called here.
        names: of values which only this kind has all of.
    """

    name: str
    names: frozenset[str]


KINDS = (
    Kind("generation", frozenset({"schema", "steps", "totals"})),
    Kind("tuning", frozenset({"format", "about", "measured"})),
    Kind("configs", frozenset({"mode", "configs", "prompts", "interval"})),
    Kind("suite", frozenset({"mode", "rows", "thresholds"})),
    Kind("files", frozenset({"mode", "a", "b", "per_frame"})),
    Kind("benchmark", frozenset({"layers", "branches", "command", "settings"})),
)
# What other commands print, and which file has what is wanted of them.
OTHERS: tuple[tuple[frozenset[str], Callable[[Values], str]], ...] = (
    (
        frozenset({"mode", "prompt", "sparse", "dense"}),
        lambda _: "what generate --json prints; give the file of its --report instead",
    ),
    (
        frozenset({"profile", "results", "tuned", "configs_tried"}),
        lambda values: (
            "what tune --json prints; give the results file that it names, "
            f"{values.text('results')}, instead"
        ),
    ),
)


def kind_of(values: Values) -> str:
    """The name of one of `KINDS`.

    Raises:
        UserError: the file is none of them, or of a version that is not known.
    """
    names = values.content.keys()
    for kind in KINDS:
        if kind.names <= names:
            _check_version(values, kind)
            return kind.name
    for others, describe in OTHERS:
        if others <= names:
            raise UserError(f"{values.file} is {describe(values)}")
    raise UserError(f"{values.file} is of no kind that report knows: {KNOWN}")


def _check_version(values: Values, kind: Kind) -> None:
    for field, known in (("schema", SCHEMA), ("format", FORMAT)):
        if field in kind.names and values.content[field] != known:
            raise UserError(
                f"{values.file} has the {field} {values.content[field]!r}, and this version of "
                f"chipsparse reads {known}; use the version that wrote it"
            )
