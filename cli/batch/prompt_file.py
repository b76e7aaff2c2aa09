"""Files of prompts with settings of their own: text, CSV or JSON lines."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from chipsparse.cli.errors import UserError, first_line
from chipsparse.cli.options import GenerateOptions, read_value
from chipsparse.cli.prompts import prompts_text

# Options of `generate` that a line can have; the others are about the model, which is loaded once.
SETTINGS = (
    "seed", "num", "negative_prompt", "height", "width", "frames", "steps", "guidance_scale",
    "quality", "config", "image", "strength", "dense", "fps", "crf",
)  # fmt: skip
SEPARATORS = ",;\t"  # Excel's are those of the country
MOST_NAMED = 20  # bad lines


class Line(NamedTuple):
    """A prompt of a file, the number of its line, from 1, and its own settings, unchecked."""

    number: int
    prompt: str
    settings: dict[str, Any]


def read_lines(path: Path, warn: Callable[[str], None]) -> tuple[list[Line], dict[int, str]]:
    """Return the prompts of a file, and by number of the line what is wrong with the others.

    The suffix tells a table, JSON lines, or a prompt a line. ``warn`` gets a sentence about columns
    of a table that are no settings. Raises `UserError` where the file has no prompt.
    """
    text = prompts_text(path, str(path))
    suffix = path.suffix.lower()
    if suffix == ".json":
        raise UserError(f"{path} is JSON; write JSON lines, an object a line, as .jsonl")
    parts = [(number, part) for number, part in enumerate(text.split("\n"), 1) if part.strip()]
    records: Iterator[tuple[int, Any]]
    if suffix in (".csv", ".tsv"):
        records = _rows(path, text, warn)
    elif suffix in (".jsonl", ".ndjson"):
        records = iter(parts)
    else:
        prompts = [(number, part) for number, part in parts if not part.strip().startswith("#")]
        records = ((number, {"prompt": part}) for number, part in prompts)
    lines = list[Line]()
    problems = dict[int, str]()
    for number, record in records:
        try:
            values = json.loads(record) if isinstance(record, str) else record
            lines.append(_line(path.parent, number, values))
        except UserError as error:
            problems[number] = str(error)
        except ValueError as error:
            problems[number] = f"it is no JSON: {first_line(error)}"
    if not lines and not problems:
        raise UserError(f"{path} has no prompt")
    return lines, problems


def check_lines(path: Path, problems: Mapping[int, str], *, count: int) -> None:
    """Raise `UserError` for the problems of lines, by number; ``count`` is that of all lines."""
    if len(problems) == count > 1 and len({*problems.values()}) == 1:  # it is not about the lines
        raise UserError(next(iter(problems.values())))
    if problems:
        named = [f"line {number}: {problems[number]}" for number in sorted(problems)]
        more = [f"and {len(named) - MOST_NAMED} more"] if len(named) > MOST_NAMED else []
        text = "; ".join([*named[:MOST_NAMED], *more])
        raise UserError(f"{len(named)} of {count} prompts of {path} are wrong: {text}")


def _rows(path: Path, text: str, warn: Callable[[str], None]) -> Iterator[tuple[int, Any]]:
    """Give the cells of each row with the number of its last line; empty ones are left out."""
    separator = max(SEPARATORS, key=text.partition("\n")[0].count)
    rows = csv.DictReader(
        io.StringIO(text, newline=""),
        delimiter=separator,
        skipinitialspace=True,
        strict=True,
    )
    columns = [column for column in rows.fieldnames or () if column]
    if "prompt" not in map(_name, columns):
        names = ", ".join(columns) or "none"
        raise UserError(f"{path} has no column prompt; its columns are: {names}")
    options = {field.name for field in dataclasses.fields(GenerateOptions)}
    ignored = {column: _name(column) for column in columns if _name(column) not in options}
    if ignored:  # tables have columns for their owners
        warn(f"{path}: no setting, and ignored: {', '.join(ignored.values())}")
    try:
        for row in rows:
            cells = {c: cell for c, cell in row.items() if c != "" and c not in ignored and cell}
            if cells:
                yield rows.line_num, {"prompt": "", **cells}
    except csv.Error as error:
        raise UserError(f"{path} is no CSV behind line {rows.line_num}: {error}") from None


def _name(given: str) -> str:
    """Return a column's name as the field of the option: ``Guidance-Scale`` is one of them."""
    return "_".join(given.lower().replace("-", " ").split())


def _value(name: str, value: object, folder: Path) -> object:
    """Return a setting of a line as the option reads it."""
    if isinstance(value, bool):
        return str(value).lower()  # no number
    if not isinstance(value, str):
        return value
    text = value.strip()
    return str(folder / Path(text).expanduser()) if name in ("config", "image") else text


def _line(folder: Path, number: int, record: object) -> Line:
    """Return a line; a path counts from the folder of the file."""
    if not isinstance(record, dict):
        raise UserError("it is no JSON object")
    values: dict[str, Any] = {}
    for given, value in record.items():
        if given is None:
            raise UserError(f"it has more cells than columns: {value}")
        name = _name(given)
        if name not in ("prompt", *SETTINGS):
            raise UserError(f"{name} is no setting of a line, which has {', '.join(SETTINGS)}")
        if values.get(name):
            raise UserError(f"{name} stands twice")
        values[name] = _value(name, value, folder)
    if values.get("prompt") is None:
        raise UserError("it has no prompt")
    prompt = read_value(GenerateOptions, "prompt", values.pop("prompt"))
    return Line(number, prompt, {name: v for name, v in values.items() if v is not None})
