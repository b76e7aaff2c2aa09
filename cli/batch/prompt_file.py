"""Files of prompts with settings of their own: text, CSV or JSON lines."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from chipsparse.cli.errors import UserError
from chipsparse.cli.options import GenerateOptions, read_value
from chipsparse.cli.prompts import read_text

# Options of `generate` that a line can have; the others are about the model, which is loaded once.
PER_PROMPT = (
    "seed",
    "num",
    "negative_prompt",
    "height",
    "width",
    "frames",
    "steps",
    "guidance_scale",
    "quality",
    "config",
    "image",
    "strength",
    "dense",
    "fps",
    "crf",
)
JSON_LINES = (".jsonl", ".ndjson")
TABLES = (".csv", ".tsv")
SEPARATORS = ",;\t"  # Excel's are those of the country
MOST_NAMED = 20  # bad lines


@dataclass(frozen=True)
class Line:
    """A prompt of a file.

    Attributes:
        number: of its line, from 1.
        settings: its own values, by the names of `PER_PROMPT`. Paths count from the file's folder.
        ignored: columns of the table that are no settings.
    """

    number: int
    prompt: str
    settings: Mapping[str, Any]
    ignored: Sequence[str] = ()


class LineError(ValueError):
    """What is wrong with a line."""


def read_lines(
    path: Path, mistake: Callable[[Mapping[str, Any]], str] = lambda settings: ""
) -> list[Line]:
    """The prompts of a file. Its suffix says what it is: a table, JSON lines, or a prompt a line.

    Args:
        mistake: what is wrong with a line's settings, empty where nothing is.

    Raises:
        UserError: the file cannot be read, has no prompt, or bad lines, all of which are named.
    """
    text = read_text(path, str(path))
    if path.suffix.lower() in TABLES:
        records = _table_records(path, text)
    elif path.suffix.lower() in JSON_LINES:
        records = _json_records(text)
    elif path.suffix.lower() == ".json":
        raise UserError(f"{path} is JSON; write JSON lines, an object a line, as .jsonl")
    else:
        records = _text_records(text)
    lines, problems = [], {}
    for number, record in records:
        try:
            line = _line(path.parent, number, record)
        except LineError as error:
            problems[number] = str(error)
            continue
        if wrong := mistake(line.settings):
            problems[number] = wrong
        else:
            lines.append(line)
    check_lines(path, problems, count=len(lines) + len(problems))
    if not lines:
        raise UserError(f"{path} has no prompt")
    return lines


def check_lines(path: Path, problems: Mapping[int, str], *, count: int) -> None:
    """Raises `UserError` for the problems of lines, by number; ``count`` is that of all lines."""
    if not problems:
        return
    sentences = set(problems.values())
    if len(problems) == count > 1 and len(sentences) == 1:  # it is not about the lines
        raise UserError(sentences.pop())
    numbers = sorted(problems)
    named = "; ".join(f"line {number}: {problems[number]}" for number in numbers[:MOST_NAMED])
    more = len(numbers) - MOST_NAMED
    also = f"; and {more} more" if more > 0 else ""
    verb = "is" if len(numbers) == 1 else "are"
    raise UserError(f"{len(numbers)} of {count} prompts of {path} {verb} wrong: {named}{also}")


Record = Mapping[str, Any] | LineError


def _text_records(text: str) -> Iterator[tuple[int, Record]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.strip().startswith("#"):
            yield number, {"prompt": line.strip()}


def _table_records(path: Path, text: str) -> Iterator[tuple[int, Record]]:
    """A row each, values as text; empty cells are left out, and so are columns without a name."""
    first = 1
    if text.lower().startswith("sep="):  # Excel's own line
        text, first = text.partition("\n")[2], 2
    head = text.partition("\n")[0]
    separator = max(SEPARATORS, key=head.count)
    rows = csv.reader(
        io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=True
    )
    number = first
    try:
        columns = [_name(column) for column in next(rows, [])]
        named = [column for column in columns if column]
        if "prompt" not in named:
            raise UserError(
                f"{path} has no column prompt; its columns are: {', '.join(named) or 'none'}"
            )
        if twice := _repeated(named):
            raise UserError(f"{path} has two columns {twice}")
        number = first + rows.line_num
        for row in rows:
            if any(row[len(columns) :]):
                yield (
                    number,
                    LineError(f"it has more cells than there are columns: {row[len(columns) :]}"),
                )
            elif any(row):
                cells = dict(zip(columns, row, strict=False))
                given = {column: cells.get(column, "") for column in named}
                yield (
                    number,
                    {n: _Text(cell) for n, cell in given.items() if cell or n == "prompt"},
                )
            number = first + rows.line_num
    except csv.Error as error:
        yield number, LineError(f"it is no CSV: {error}")


def _json_records(text: str) -> Iterator[tuple[int, Record]]:
    """An object a line; null counts as left out."""
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            yield number, LineError(f"it is no JSON: {error}")
            continue
        if isinstance(found, dict):
            yield number, {name: value for name, value in found.items() if value is not None}
        else:
            yield number, LineError('it is no JSON object, such as {"prompt": "..."}')


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if twice := _repeated(name for name, _ in pairs):
        raise ValueError(f"{twice} stands twice")
    return dict(pairs)


def _repeated(names: Iterable[str]) -> str | None:
    """A name that stands there twice, or None."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


class _Text(str):
    """A value that stands for whatever it can be read as."""


def _name(given: str) -> str:
    """A column or name as the field of the option is called: ``Guidance-Scale`` is one of them."""
    return "_".join(given.lower().replace("-", " ").split())


def _line(folder: Path, number: int, record: Record) -> Line:
    if isinstance(record, LineError):
        raise record
    if twice := _repeated(map(_name, record)):
        raise LineError(f"{twice} stands twice")
    settings: dict[str, Any] = {}
    values = {_name(given): value for given, value in record.items()}
    ignored = []
    for name, value in values.items():
        if name == "prompt":
            continue
        if name not in PER_PROMPT:
            # Tables have columns for their owners; what `generate` knows was meant for it.
            if isinstance(value, _Text) and name not in _types():
                ignored.append(name)
                continue
            raise LineError(f"it has {name}, and a prompt can have: {', '.join(PER_PROMPT)}")
        _check_text(name, value)
        settings[name] = _value(name, value)
        if isinstance(settings[name], Path):
            settings[name] = folder / settings[name].expanduser()
    if "prompt" not in values:
        raise LineError("it has no prompt")
    prompt = values["prompt"]
    if not isinstance(prompt, str):
        raise LineError(f"its prompt is {json.dumps(prompt)}, which is no text")
    _check_text("prompt", prompt)
    return Line(number, str(prompt).strip(), settings, ignored)


def _check_text(name: str, value: Any) -> None:
    try:
        str(value).encode("utf-8")
    except UnicodeEncodeError:
        raise LineError(f"its {name} has halves of surrogate pairs, which are no text") from None


def _value(name: str, value: Any) -> Any:
    """A value of the type of its option."""
    from pydantic import TypeAdapter, ValidationError

    wanted_type = _types()[name]
    kind: TypeAdapter[Any] = TypeAdapter(wanted_type)
    try:
        if isinstance(value, _Text) and name == "fps":
            return read_value(GenerateOptions, name, str(value))
        if isinstance(value, _Text):
            decimal = float in get_args(wanted_type)  # with a comma where separators are semicolons
            return kind.validate_strings(value.replace(",", ".") if decimal else str(value))
        return kind.validate_json(json.dumps(value), strict=True)
    except UserError as error:
        raise LineError(str(error)) from None
    except ValidationError as error:
        wanted = error.errors(include_url=False)[0]["msg"].removeprefix("Input should be ")
        shown = json.dumps(value, ensure_ascii=False)
        raise LineError(f"its {name} is {shown}, not {wanted.partition(',')[0]}") from None


@cache
def _types() -> dict[str, Any]:
    return get_type_hints(GenerateOptions)
