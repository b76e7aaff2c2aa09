"""Files of prompts with settings of their own: text, CSV or JSON lines."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chipsparse.cli.errors import UserError
from chipsparse.cli.options import GenerateOptions, value_type
from chipsparse.cli.prompts import read_text

# Options of `generate` that a line can have; the others are about the model, which is loaded once.
PER_PROMPT = (
    "seed", "num", "negative_prompt", "height", "width", "frames", "steps", "guidance_scale",
    "quality", "config", "image", "strength", "dense", "fps", "crf",
)  # fmt: skip
SEPARATORS = ",;\t"  # Excel's are those of the country
MOST_NAMED = 20  # bad lines


@dataclass(frozen=True)
class Line:
    """A prompt of a file.

    Attributes:
        number: of its line, from 1.
        settings: texts of its own settings, by the names of `PER_PROMPT`.
        ignored: columns of the table that are no settings.
    """

    number: int
    prompt: str
    settings: Mapping[str, str]
    ignored: Sequence[str] = ()


def read_lines(path: Path) -> tuple[list[Line], dict[int, str]]:
    """Return the prompts of a file, and by number of the line what is wrong with the others.

    The suffix tells a table, JSON lines, or a prompt a line.

    Raises:
        UserError: the file cannot be read, or has no prompt.
    """
    text, suffix = read_text(path, str(path)), path.suffix.lower()
    table = suffix in (".csv", ".tsv")
    if suffix == ".json":
        raise UserError(f"{path} is JSON; write JSON lines, an object a line, as .jsonl")
    records: Iterable[tuple[int, str | dict[Any, Any]]]
    if table:
        records = _rows(path, text)
    else:
        parts = enumerate(map(str.strip, text.split("\n")), start=1)
        records = ((number, part) for number, part in parts if part)
    lines, problems = [], {}
    for number, record in records:
        try:
            if isinstance(record, dict):
                values = record
            elif suffix in (".jsonl", ".ndjson"):
                values = _object(record)
            elif record.startswith("#"):
                continue
            else:
                values = {"prompt": record}
            lines.append(_line(path.parent, number, values, table=table))
        except UserError as error:
            problems[number] = str(error)
    if not lines and not problems:
        raise UserError(f"{path} has no prompt")
    return lines, problems


def check_lines(path: Path, problems: Mapping[int, str], *, count: int) -> None:
    """Raise `UserError` for the problems of lines, by number; ``count`` is that of all lines."""
    if not problems:
        return
    if len(problems) == count > 1 and len({*problems.values()}) == 1:  # it is not about the lines
        raise UserError(next(iter(problems.values())))
    numbers = sorted(problems)
    named = "; ".join(f"line {number}: {problems[number]}" for number in numbers[:MOST_NAMED])
    more = len(numbers) - MOST_NAMED
    also = f"; and {more} more" if more > 0 else ""
    verb = "is" if len(numbers) == 1 else "are"
    raise UserError(f"{len(numbers)} of {count} prompts of {path} {verb} wrong: {named}{also}")


def _rows(path: Path, text: str) -> Iterator[tuple[int, dict[Any, Any]]]:
    """Give the cells of each row with the number of its last line; empty ones are left out."""
    separator = max(SEPARATORS, key=text.partition("\n")[0].count)
    rows = csv.DictReader(
        io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=True
    )
    columns = [column for column in rows.fieldnames or () if column]
    if "prompt" not in map(_name, columns):
        names = ", ".join(columns) or "none"
        raise UserError(f"{path} has no column prompt; its columns are: {names}")
    try:
        for row in rows:
            cells = {column: cell for column, cell in row.items() if column != "" and cell}
            if cells:
                yield rows.line_num, {"prompt": "", **cells}
    except csv.Error as error:
        raise UserError(f"{path} is no CSV behind line {rows.line_num}: {error}") from None


def _object(line: str) -> dict[str, Any]:
    """Return what a JSON object has; null counts as left out."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"it is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError('it is no JSON object, such as {"prompt": "..."}')
    return {name: value for name, value in values.items() if value is not None}


def _name(given: str) -> str:
    """Return a column's name as the field of the option: ``Guidance-Scale`` is one of them."""
    return "_".join(given.lower().replace("-", " ").split())


def _line(folder: Path, number: int, record: Mapping[Any, Any], *, table: bool) -> Line:
    options = {field.name for field in dataclasses.fields(GenerateOptions)}
    values: dict[str, str] = {}
    ignored = []
    for given, value in record.items():
        if given is None:
            raise UserError(f"it has more cells than columns: {value}")
        name = _name(given)
        if table and name not in options:  # tables have columns for their owners
            ignored.append(name)
            continue
        if name not in (*PER_PROMPT, "prompt"):
            raise UserError(f"it has {name}, and a prompt can have: {', '.join(PER_PROMPT)}")
        if values.get(name):
            raise UserError(f"{name} stands twice")
        values[name] = _text(folder, name, value, table=table)
    if "prompt" not in values:
        raise UserError("it has no prompt")
    return Line(number, values.pop("prompt").strip(), values, ignored)


def _text(folder: Path, name: str, value: Any, *, table: bool) -> str:
    """Return a value as it would be typed; a path counts from the folder of the file."""
    if isinstance(value, (list, dict)) or (name == "prompt" and not isinstance(value, str)):
        raise UserError(f"its {name} is {json.dumps(value)}, which is no text")
    text = value if isinstance(value, str) else json.dumps(value)
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UserError(f"its {name} has halves of surrogate pairs, which are no text")
    kind = value_type(GenerateOptions, name)
    if table and kind is float:  # with a comma where separators are semicolons
        text = text.replace(",", ".")
    return str(folder / Path(text).expanduser()) if kind is Path else text
