"""The results file of several processes: the first one has it, the others hear what is in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from chipsparse.cli.ranks import Rank
from chipsparse.tuning.results_file import ResultsFile


class SharedResults(ResultsFile):
    """See `ResultsFile`. What the first process measured counts for all, so all go on alike."""

    def __init__(self, path: Path, about: Mapping[str, Any], process: Rank) -> None:
        self._process = process
        super().__init__(path, about)
        if process.peers is not None:
            found = process.first(lambda: [self._measured, self._searches])
            assert found is not None
            self._measured, self._searches = found

    def measured(self, name: str, measure: Callable[[], Any]) -> Any:
        """A measurement: all make it together, and the first one's is kept."""
        if name in self:
            return self.get(name)
        made = measure()
        return super().measured(name, lambda: self._process.first(lambda: made))

    def _write(self, measured: dict[str, Any], searches: dict[str, Any]) -> None:
        if self._process.writes:
            super()._write(measured, searches)
