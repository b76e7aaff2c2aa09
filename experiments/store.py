"""A JSON file of measurements and a folder of dense clips, so that nothing is made twice.

A measurement has a name and is kept as soon as it is made: this run and a later one read it from
the file. Beside the measurements the file holds notes, such as what a search chose.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from chipsparse.common.errors import UserError, reason
from chipsparse.experiments.progress import Ranks

T = TypeVar("T")

FORMAT = 3


class Store:
    """Measurements by name, all of one kind of experiment on one model, with facts ``about`` all.

    The first process writes the file with the first measurement; without a path all is kept in
    memory. ``dense`` is the folder for dense clips, by default beside the file. Raises `UserError`
    where the file cannot be read, or is about something else.
    """

    def __init__(
        self,
        path: Path | None = None,
        about: Mapping[str, Any] | None = None,
        *,
        kind: str = "clips",
        dense: Path | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.path = path
        self.kind = kind
        self.about: dict[str, Any] = json.loads(json.dumps(about or {}))
        self.ranks = ranks or Ranks()
        self._dense = dense or (None if path is None else path.with_name(f"{path.stem}-dense"))
        content = self.ranks.first(self._read) or {}
        self.measured: dict[str, Any] = content.get("measured", {})
        self.notes: dict[str, Any] = content.get("notes", {})

    def _read(self) -> dict[str, Any]:
        path = self.path
        if path is None or not path.exists():
            return {}
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{path} cannot be read ({reason(error)})") from None
        except ValueError:
            raise UserError(f"{path} is not a results file: it is no JSON") from None
        stamp = content if isinstance(content, dict) else {}
        if (stamp.get("kind"), stamp.get("format")) != (self.kind, FORMAT):
            raise UserError(
                f"{path} is not a results file of this version: it is of kind "
                f"{stamp.get('kind')} and format {stamp.get('format')}, not {self.kind} and "
                f"{FORMAT}; name another file, or move it away",
            )
        theirs = content["about"]
        for name in {**theirs, **self.about}:
            if theirs.get(name) != self.about.get(name):
                raise UserError(
                    f"{path} was measured with {name} {_short(theirs.get(name))}, not "
                    f"{_short(self.about.get(name))}; name another file, or move it away",
                )
        return stamp

    def keep(self, name: str, make: Callable[[], T]) -> T:
        """The measurement of this name, made now by the first process if it is not there.

        ``make`` gives JSON values with finite numbers. Raises `UserError` where the file could not
        be written.
        """
        if name not in self.measured:
            value = self.ranks.first(lambda: json.loads(json.dumps(make(), allow_nan=False)))
            self.write({**self.measured, name: value}, self.notes)
            self.measured[name] = value
        kept: T = self.measured[name]
        return kept

    def note(self, name: str, value: object) -> None:
        """Keeps a note in place of the one of this name; a JSON value."""
        value = json.loads(json.dumps(value, allow_nan=False))
        if self.notes.get(name) != value:
            notes = {key: old for key, old in self.notes.items() if key != name}
            self.write(self.measured, {**notes, name: value})
            self.notes = {**notes, name: value}

    def forget(self, unwanted: Callable[[Any], bool]) -> None:
        """Drops unwanted measurements, in the file with the next one that is made."""
        self.measured = {name: each for name, each in self.measured.items() if not unwanted(each)}

    def write(self, measured: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        """Writes the file in one step, in the first process."""
        if self.path is None or not self.ranks.writes:
            return
        stamp = {"kind": self.kind, "format": FORMAT, "about": self.about}
        text = json.dumps({**stamp, "measured": measured, "notes": notes}, indent=1) + "\n"
        _replace(self.path, lambda half: half.write_text(text, encoding="utf-8"))

    def dense_file(self, name: str) -> Path | None:
        """The file for the frames of a dense clip; None where they are kept in memory."""
        return None if self._dense is None else self._dense / f"{name}.npy"


def write_frames(file: Path, frames: np.ndarray) -> None:
    """Writes frames in one step; raises `UserError` where they cannot be written."""

    def write(half: Path) -> None:
        with half.open("wb") as opened:
            np.save(opened, frames)

    _replace(file, write)


def _replace(file: Path, write: Callable[[Path], object]) -> None:
    """Writes a file under a temporary name, then gives it its own."""
    half = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(half)
        half.replace(file)
    except OSError as error:
        raise UserError(f"{file} could not be written: {reason(error)}") from error
    finally:
        half.unlink(missing_ok=True)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
