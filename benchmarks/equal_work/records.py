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
# What makes two records of clips the same.
IDENTITY = ("op", "model", "size", "steps", "method", "variant", "setting", "prompt", "seed")


def write_compact(records: Sequence[Record], path: Path) -> None:
    """Writes a file for the repository: what all records have in common once, then a line for each.

    Numbers are rounded to six digits. The file appears whole or not at all.
    """
    rounded = [{name: _rounded(value) for name, value in record.items()} for record in records]
    first = rounded[0]
    common = {
        name: value
        for name, value in first.items()
        if all(name in each and each[name] == value for each in rounded)
    }
    lines = [
        json.dumps({name: value for name, value in each.items() if name not in common})
        for each in rounded
    ]
    text = ",\n".join(lines)
    write_whole(path, f'{{"common": {json.dumps(common)},\n"records": [\n{text}\n]}}\n')


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
            if isinstance(content, dict):  # of `write_compact`
                content = [content["common"] | record for record in content["records"]]
            found += content
    return found


def joined(records: Iterable[Record]) -> list[Record]:
    """Each clip once, the first time that it was made."""
    found: dict[tuple[Any, ...], Record] = {}
    for record in records:
        found.setdefault(tuple(str(record.get(name)) for name in IDENTITY), record)
    return list(found.values())
