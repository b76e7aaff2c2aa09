"""The folder that a batch fills: finished files, their thumbnails, and the manifest."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from chipsparse.cli.batch.claims import NAME as CLAIMS
from chipsparse.cli.batch.engine import Made
from chipsparse.cli.batch.entries import Entry
from chipsparse.cli.batch.manifest import Manifest
from chipsparse.cli.errors import user_errors
from chipsparse.common.finished_files import place
from chipsparse.common.scratch import scratch_folder

THUMBNAILS = "thumbnails"
MADE, FAILED = "made", "failed"


class Folder:
    """See above; made where it is not there. Raises `UserError` where that fails."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = Manifest(path)
        self._new = not path.exists()
        with user_errors(OSError, what=f"the folder {path} could not be made"):
            (path / THUMBNAILS).mkdir(parents=True, exist_ok=True)
        self._before = self.manifest.read()

    def leave(self) -> None:
        """Takes the folder away again if it was not there before, and nothing came into it."""
        if self._new:
            with suppress(OSError):  # somebody else's files are in it
                (self.path / THUMBNAILS).rmdir()
                (self.path / CLAIMS).unlink(missing_ok=True)
                self.path.rmdir()

    def has(self, entry: Entry) -> bool:
        """Whether its file is there; files are whole or not there."""
        return (self.path / entry.name).is_file()

    def failure_elsewhere(self, entry: Entry) -> str | None:
        """Why another command gave its file up since this one began; None where none did."""
        found = self.manifest.read().get(entry.name, {})
        if found.get("state") != FAILED or found == self._before.get(entry.name):
            return None
        return str(found.get("error"))

    def thumbnail(self, entry: Entry) -> Path:
        """Where its thumbnail is, if there is one."""
        return self.path / THUMBNAILS / f"{entry.digest}.jpg"

    def keep(self, entry: Entry, made: Made, facts: Mapping[str, Any]) -> None:
        """Writes its file and notes it; raises `UserError` where that fails."""
        self._write(self.thumbnail(entry), made.thumbnail)
        self._write(self.path / entry.name, made.content)
        result = {"seconds": made.seconds, "remarks": made.notes}
        self._note(entry, {"state": MADE, **result, **facts}, made.warnings)

    def give_up(self, entry: Entry, sentence: str, facts: Mapping[str, Any]) -> None:
        """Notes why there is no file."""
        self._note(entry, {"state": FAILED, "error": sentence, **facts})

    def note(self, entries: Sequence[Entry]) -> None:
        """Notes files that the manifest does not know, as where a command was killed."""
        known = self.manifest.read()
        for entry in entries:
            if known.get(entry.name, {}).get("state") != MADE:
                self._note(entry, {"state": MADE})

    def _note(self, entry: Entry, result: Mapping[str, Any], warnings: Sequence[str] = ()) -> None:
        facts = entry.facts(self.path)
        facts["warnings"] = [*facts["warnings"], *warnings]
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.manifest.add({**result, "time": when, **facts})

    def _write(self, path: Path, content: bytes) -> None:
        with (
            user_errors(OSError, what=f"{path} could not be written"),
            scratch_folder(path.parent) as scratch,
        ):
            file = scratch / path.name
            file.write_bytes(content)
            place({path: file}, scratch=scratch)
