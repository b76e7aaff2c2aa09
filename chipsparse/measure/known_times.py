"""Times that were measured on this machine before: small files in a folder, one for each.

What two processes measure at once differs a little, so the first to write is right for both, and
each reads what is there after it wrote.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from chipsparse.common.scratch import scratch_folder

Facts = Mapping[str, Any]  # what a measurement depends on, as JSON carries it


class KnownTimes:
    """Milliseconds by what was measured.

    Args:
        folder: where they are; made with the first one. None: nothing is kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def find(self, facts: Facts) -> dict[str, float] | None:
        """Milliseconds by name; None where nothing, or no whole and right file, is known."""
        path = self._path(facts)
        if path is None:
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(found, dict) or found.get("facts") != _as_json(facts):
            return None
        times = found.get("milliseconds")
        if not times or not isinstance(times, dict) or not all(map(_is_time, times.values())):
            return None
        return times

    def keep(self, facts: Facts, times: Mapping[str, float]) -> dict[str, float]:
        """Writes down what was measured, unless it is known by now; returns what is known.

        Where the folder cannot be written to, nothing is kept.
        """
        path = self._path(facts)
        if path is not None and self.find(facts) is None:
            text = json.dumps({"facts": _as_json(facts), "milliseconds": times}, indent=1)
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                with scratch_folder(path.parent) as scratch:
                    file = scratch / path.name
                    file.write_text(text, encoding="utf-8")
                    self._give_name(file, path, facts)
        return self.find(facts) or dict(times)

    def _give_name(self, file: Path, path: Path, facts: Facts) -> None:
        """Moves a file to its name; a right one that came there in the meantime stays."""
        try:
            os.link(file, path)
        except OSError:  # something is there, or the file system has no hard links
            if self.find(facts) is None:
                os.replace(file, path)

    def _path(self, facts: Facts) -> Path | None:
        if self._folder is None:
            return None
        text = json.dumps(_as_json(facts), sort_keys=True)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _as_json(facts: Facts) -> Any:
    return json.loads(json.dumps(facts))


def _is_time(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0
