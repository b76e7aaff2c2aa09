"""Result records: what every measurement writes, and the table it prints."""

from __future__ import annotations

import json
import math
import string
import subprocess
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from chipsparse.common.machine import device_name, package_version
from chipsparse.common.text_files import write_text

Record = dict[str, Any]
ABSENT = object()  # of a field that a record does not have
DIGITS = string.digits + string.ascii_letters  # one for a number of up to so many


class Run:
    """What one run has measured so far; the file has all records after each new one."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.records: list[Record] = []
        self.failed: list[str] = []

    def add(self, *records: Record) -> None:
        """Keeps records and writes all."""
        self.records += records
        if self._path is not None:
            write(self.records, self._path)

    @contextmanager
    def attempt(self, label: str) -> Iterator[None]:
        """Reports a failure inside and lets the run go on: other cases may still be measured."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            print(f"FAILED {label}: {type(error).__name__}: {error}", flush=True)
            self.failed.append(label)


def environment(device: torch.device) -> Record:
    """The fields that every record carries; the version of what is not installed is None."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "diffusers": package_version("diffusers"),
        "commit": _commit(),
    }


def write(records: Sequence[Record], path: Path) -> None:
    """Writes records as a JSON list, infinity (the PSNR of equal clips) as null.

    The file appears whole or not at all.
    """
    finite = json.loads(json.dumps(list(records)), parse_constant=lambda _: None)
    write_text(path, json.dumps(finite, indent=1, allow_nan=False) + "\n")


def write_compact(records: Sequence[Record], path: Path) -> None:
    """Writes a file for the repository: a line for each field, with each of its values once.

    Which record has which value is a character each of `DIGITS`, ``-`` where it has none, or where
    there are more values a list of numbers. Numbers are rounded to six digits. The file appears
    whole or not at all.
    """
    names = dict.fromkeys(name for record in records for name in record)
    fields = {
        name: _field([_rounded(each[name]) if name in each else ABSENT for each in records])
        for name in names
    }
    lines = (
        f"{json.dumps(name)}: {json.dumps(fields[name], separators=(',', ':'))}" for name in names
    )
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def read(*paths: Path | None) -> list[Record]:
    """The records of files, one behind the other.

    Args:
        paths: of files of either form; there is none of a file that is not there yet.
    """
    found: list[Record] = []
    for path in paths:
        if path is not None and path.exists():
            content = json.loads(path.read_text(encoding="utf-8"))
            found += _records(content) if isinstance(content, dict) else content
    return found


def table(records: Sequence[Record], columns: dict[str, str]) -> str:
    """A Markdown table; ``columns`` maps a record's field to a format such as ``.2f``."""
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    for record in records:
        cells = []
        for name, form in columns.items():
            value = record.get(name)
            cells.append("" if value is None else format(value, form))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _field(values: list[Any]) -> list[Any] | dict[str, Any]:
    """The values of one field, or where these repeat, each of them once and which one it is."""
    keys = [None if value is ABSENT else json.dumps(value) for value in values]
    numbers = {key: number for number, key in enumerate(k for k in dict.fromkeys(keys) if k)}
    if None not in keys and 2 * len(numbers) > len(values):
        return values
    of: Any = [-1 if key is None else numbers[key] for key in keys]
    if len(numbers) <= len(DIGITS):
        of = "".join("-" if number < 0 else DIGITS[number] for number in of) if any(of) else ""
    return {"values": [json.loads(key) for key in numbers], "of": of}


def _records(fields: dict[str, Any]) -> list[Record]:
    """The records of a file of `write_compact`."""
    count = max(len(each["of"] if isinstance(each, dict) else each) for each in fields.values())
    found: list[Record] = [{} for _ in range(max(count, 1))]
    for name, field in fields.items():
        if not isinstance(field, dict):
            field = {"values": field, "of": range(len(found))}
        of = field["of"]
        numbers = map(DIGITS.find, of) if isinstance(of, str) else of  # -1 of what is absent
        for record, number in zip(found, numbers if of else len(found) * [0], strict=True):
            if number >= 0:
                record[name] = field["values"][number]
    return found


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _commit() -> str | None:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        result = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
