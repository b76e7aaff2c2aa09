"""Result records: what every measurement writes, and the table it prints."""

from __future__ import annotations

import json
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


class Run:
    """The records of one run so far; the file has all of them after each new one."""

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
    """Writes records: a line for each field, with each of its values once.

    Behind the values stands which one each record has, -1 for none; of a field whose values are all
    different there are the values alone. Numbers are rounded to six digits; infinity (the PSNR of
    equal clips) is null. The file appears whole or not at all.
    """
    lines = []
    for name in dict.fromkeys(name for record in records for name in record):
        texts = [_text(record[name]) if name in record else None for record in records]
        values = list(dict.fromkeys(text for text in texts if text is not None))
        line = f"[{','.join(values)}]"
        if values != texts:
            places = [-1 if text is None else values.index(text) for text in texts]
            line = f'{{"values":{line},"of":{_text(places)}}}'
        lines.append(f"{json.dumps(name)}: {line}")
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def read(*paths: Path) -> list[Record]:
    """The records of files, one behind the other."""
    records: list[Record] = []
    for path in paths:
        of_file: list[Record] = []
        for name, column in json.loads(path.read_text(encoding="utf-8")).items():
            if isinstance(column, dict):
                values = column["values"]
                places = column["of"]
            else:
                values = column
                places = list(range(len(values)))
            of_file = of_file or [{} for _ in places]
            for record, place in zip(of_file, places, strict=True):
                if place >= 0:
                    record[name] = values[place]
        records += of_file
    return records


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


def _text(value: Any) -> str:
    """JSON without spaces, with numbers of six digits; null for what is not finite."""
    exact = json.loads(json.dumps(value), parse_constant=lambda _: None)
    short = json.loads(json.dumps(exact), parse_float=lambda text: float(f"{float(text):.6g}"))
    return json.dumps(short, separators=(",", ":"))


def _commit() -> str | None:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        result = subprocess.run(
            command,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
