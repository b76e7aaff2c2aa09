"""Files of records of equal work: read, and joined where several processes wrote parts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import Record
from chipsparse.common.finished_files import write_whole

CALIBRATION = "calibration"  # the setting of the record that has MagCache's ratios
DENSE: dict[str, Any] = {"separators": (",", ":")}
ABSENT = object()  # of a field that a record does not have
# What makes two records of clips the same.
IDENTITY = ("op", "model", "size", "steps", "method", "variant", "setting", "prompt", "seed")


def write_compact(records: Sequence[Record], path: Path) -> None:
    """Writes a file for the repository: a line for each field, texts once and then by number.

    Numbers are rounded to six digits. The file appears whole or not at all.
    """
    names = dict.fromkeys(name for record in records for name in record)
    fields = {
        name: _field([_rounded(each[name]) if name in each else ABSENT for each in records])
        for name in names
    }
    lines = (f"{json.dumps(name)}: {json.dumps(fields[name], **DENSE)}" for name in names)
    write_whole(path, "{\n" + ",\n".join(lines) + "\n}\n")


def _field(values: list[Any]) -> list[Any] | dict[str, list[Any]]:
    """The values of one field, or where these repeat, each of them once and which one it is."""
    keys = [None if value is ABSENT else json.dumps(value) for value in values]
    numbers = {key: number for number, key in enumerate(k for k in dict.fromkeys(keys) if k)}
    if None not in keys and 2 * len(numbers) > len(values):
        return values
    of = [-1 if key is None else numbers[key] for key in keys]
    return {"values": [json.loads(key) for key in numbers], "of": of if any(of) else []}


def _records(fields: dict[str, Any]) -> list[Record]:
    """The records of a file of `write_compact`."""
    count = max(len(each["of"] if isinstance(each, dict) else each) for each in fields.values())
    found: list[Record] = [{} for _ in range(max(count, 1))]
    for name, field in fields.items():
        if not isinstance(field, dict):
            field = {"values": field, "of": range(len(found))}
        for record, number in zip(found, field["of"] or len(found) * [0], strict=True):
            if number >= 0:
                record[name] = field["values"][number]
    return found


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def read(*paths: Path | None) -> list[Record]:
    """The records of files, one behind the other; none of a file that is not there yet."""
    found: list[Record] = []
    for path in paths:
        if path is not None and path.exists():
            content = json.loads(path.read_text(encoding="utf-8"))
            found += _records(content) if isinstance(content, dict) else content
    return found


def joined(records: Iterable[Record]) -> list[Record]:
    """Each clip once, the first time that it was made."""
    found: dict[tuple[Any, ...], Record] = {}
    for record in records:
        found.setdefault(tuple(str(record.get(name)) for name in IDENTITY), record)
    return list(found.values())
