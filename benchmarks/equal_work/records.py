"""Files of records of equal work: read, and joined where several processes wrote parts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.records import Record

CALIBRATION = "calibration"  # the setting of the record that has MagCache's ratios
# What makes two records of clips the same.
IDENTITY = ("op", "model", "size", "steps", "method", "variant", "setting", "prompt", "seed")


def read(*paths: Path | None) -> list[Record]:
    """The records of files, one behind the other; none of a file that is not there yet."""
    found: list[Record] = []
    for path in paths:
        if path is not None and path.exists():
            found += json.loads(path.read_text(encoding="utf-8"))
    return found


def joined(records: Iterable[Record]) -> list[Record]:
    """Each clip once, the first time that it was made."""
    found: dict[tuple[Any, ...], Record] = {}
    for record in records:
        found.setdefault(tuple(str(record.get(name)) for name in IDENTITY), record)
    return list(found.values())
