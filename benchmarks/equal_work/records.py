"""Records of equal work, joined where several processes wrote parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.records import Record

CALIBRATION = "calibration"  # the setting of the record that has MagCache's ratios
# What makes two records of clips the same.
IDENTITY = ("op", "model", "size", "steps", "method", "variant", "setting", "prompt", "seed")


def joined(records: Iterable[Record]) -> list[Record]:
    """Each clip once, the first time that it was made."""
    found: dict[tuple[Any, ...], Record] = {}
    for record in records:
        found.setdefault(tuple(str(record.get(name)) for name in IDENTITY), record)
    return list(found.values())
