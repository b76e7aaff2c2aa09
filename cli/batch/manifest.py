"""The manifest of a batch: a JSON object a line, for every file that was made or given up.

Several commands may fill one folder, and a line is written in one piece at the end of the file. Of
several lines about a file the last one counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chipsparse.cli.errors import user_errors
from chipsparse.cli.results import json_values

NAME = "manifest.jsonl"


class Manifest:
    """What is known of a folder's files."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME

    def read(self) -> dict[str, dict[str, Any]]:
        """What is known of each file, by its name; a line that was broken off counts for nothing.

        Raises `UserError` for a manifest that cannot be read.
        """
        found = {}
        with user_errors(OSError, UnicodeDecodeError, what=f"{self.path} could not be read"):
            if not self.path.exists():
                return {}
            text = self.path.read_text(encoding="utf-8")
        for line in text.split("\n"):
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("file"), str):
                found[record["file"]] = record
        return found

    def add(self, record: Mapping[str, Any]) -> None:
        """Notes what became of a file; raises `UserError` where that cannot be written."""
        text = json.dumps(json_values(record), ensure_ascii=False, allow_nan=False)
        with (
            user_errors(OSError, what=f"{self.path} could not be written"),
            self.path.open("ab+", buffering=0) as file,
        ):
            # Behind a line that was broken off, a new one begins.
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            broken = end > 0 and file.read(1) != b"\n"
            file.write(b"\n" * broken + text.encode() + b"\n")
