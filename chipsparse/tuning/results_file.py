"""One JSON file with everything that was measured, so that nothing is measured twice.

A measurement has a name and is kept as soon as it is made: whoever asks for it again, in this run
or in one after an interruption, gets what is in the file. Beside the measurements stands what each
search chose, which nothing is read from but the page of `chipsparse report`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from chipsparse.common.finished_files import write_whole

FORMAT = 2


class ResultsError(ValueError):
    """A results file that cannot be used for what is to be measured."""


class ResultsWriteError(OSError):
    """A results file that cannot be written; what it held before is still in it."""


class ResultsFile:
    """Measurements by name, about one model and one kind of generation.

    Args:
        path: the file; made with the first measurement.
        about: what all its measurements have in common, by name, as JSON values.

    Raises:
        ResultsError: if there is a file already that is none, or about something else.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self._about = json.loads(json.dumps(about))
        self._measured: dict[str, Any] = {}
        self._searches: dict[str, Any] = {}
        if path.exists():
            content = self._read()
            self._measured = dict(content["measured"])
            self._searches = dict(content.get("searches", {}))

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ResultsError(f"{self.path} cannot be read ({error.strerror})") from None
        except ValueError:
            raise ResultsError(f"{self.path} is not a results file: it is no JSON") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            found = content.get("format") if isinstance(content, dict) else None
            raise ResultsError(
                f"{self.path} is not a results file of this version: its format is {found}, "
                f"not {FORMAT}"
            )
        theirs = content["about"]
        for name in {**theirs, **self._about}:
            if theirs.get(name) != self._about.get(name):
                raise ResultsError(
                    f"{self.path} was measured with {name} {_short(theirs.get(name))}, not "
                    f"{_short(self._about.get(name))}; name another results file"
                )
        return content

    def __contains__(self, name: str) -> bool:
        """Whether this was measured."""
        return name in self._measured

    def get(self, name: str) -> Any:
        """A measurement, or None."""
        return self._measured.get(name)

    def forget(self, unwanted: Callable[[Any], bool]) -> None:
        """Leaves out unwanted measurements, in the file with the next one that is made."""
        self._measured = {
            name: value for name, value in self._measured.items() if not unwanted(value)
        }

    def measured(self, name: str, measure: Callable[[], Any]) -> Any:
        """A measurement, made now and kept in the file if it is not there yet.

        Args:
            name: of the measurement.
            measure: makes it, as JSON values with finite numbers.

        Raises:
            ResultsWriteError: it could not be kept.
        """
        if name not in self._measured:
            value = json.loads(json.dumps(measure(), allow_nan=False))
            self._write({**self._measured, name: value}, self._searches)
            self._measured[name] = value
        return self._measured[name]

    def keep_search(self, name: str, search: Mapping[str, Any]) -> None:
        """Keeps what a search chose, in JSON values of finite numbers, in place of what it had."""
        value = json.loads(json.dumps(search, allow_nan=False))
        if self._searches.get(name) != value:
            searches = {each: old for each, old in self._searches.items() if each != name}
            self._write(self._measured, {**searches, name: value})
            self._searches = {**searches, name: value}

    def search(self, name: str) -> Any:
        """What a search kept, or None."""
        return self._searches.get(name)

    def _write(self, measured: dict[str, Any], searches: dict[str, Any]) -> None:
        content = {"format": FORMAT, "about": self._about, "measured": measured}
        if searches:
            content["searches"] = searches
        try:
            write_whole(self.path, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            raise ResultsWriteError(
                f"the results file {self.path} could not be written: {error.strerror or error}"
                + ("; what was measured before is in it" if self._measured else "")
            ) from error


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
