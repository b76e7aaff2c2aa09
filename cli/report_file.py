"""The file of `--report`: all of it or nothing."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chipsparse.cli.errors import UserError, first_line


def check_report(path: Path) -> None:
    """Raises `UserError` where `path` could not be written; writes nothing."""
    if path.suffix.lower() != ".json":
        raise UserError(f"--report {path} must end in .json")
    if path.is_dir():
        raise UserError(f"--report {path} is a folder; name a file in it")
    folder = path.parent
    if not folder.is_dir():
        raise UserError(f"the folder {folder} of --report {path} does not exist; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"the folder {folder} of --report {path} cannot be written to")


@contextmanager
def staged_report(path: Path, content: dict[str, Any]) -> Iterator[None]:
    """Writes JSON beside its path, and moves it there when what follows has succeeded.

    A failure, here or there, leaves neither a new file nor a changed one.
    """
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    try:
        with tempfile.TemporaryDirectory(prefix=".chipsparse-", dir=path.parent) as scratch:
            file = Path(scratch) / path.name
            file.write_text(text + "\n", encoding="utf-8")
            yield
            os.replace(file, path)
    except OSError as error:
        raise UserError(f"--report {path} could not be written: {first_line(error)}") from error
