"""What one run of the benchmarks has measured so far."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.records import Record, write


class Run:
    """Collects records and failures; the file has all records so far after each new one."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.records: list[Record] = []
        self.failed: list[str] = []

    def add(self, *records: Record) -> None:
        """Keeps records and writes all."""
        self.records += records
        self.save()

    def save(self, unfinished: Sequence[Record] = ()) -> None:
        """Writes all records, and those of a benchmark that is not done yet."""
        if self._path is not None:
            write([*self.records, *unfinished], self._path)

    @contextmanager
    def attempt(self, label: str) -> Iterator[None]:
        """Reports a failure inside and lets the run go on: other cases may still be measured."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            print(f"FAILED {label}: {type(error).__name__}: {error}", flush=True)
            self.failed.append(label)
