"""Files of text that a command writes beside its pictures: all of them or nothing."""

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
    """Raises `UserError` where the file of ``--report`` could not be written; writes nothing."""
    check_file("--report", path, ".json")


def check_file(option: str, path: Path, *suffixes: str) -> None:
    """Raises `UserError` where a file could not be written; writes nothing.

    Args:
        option: which names it.
        path: of the file.
        suffixes: one of which it must have; the first is told.
    """
    if path.suffix.lower() not in suffixes:
        raise UserError(f"{option} {path} must end in {suffixes[0]}")
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; name a file in it")
    folder = path.parent
    if not folder.is_dir():
        raise UserError(f"the folder {folder} of {option} {path} does not exist; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"the folder {folder} of {option} {path} cannot be written to")


@contextmanager
def staged_report(path: Path, content: dict[str, Any]) -> Iterator[None]:
    """As `staged_file`, for the JSON of ``--report``."""
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    with staged_file("--report", path, text + "\n"):
        yield


@contextmanager
def staged_file(option: str, path: Path, text: str) -> Iterator[None]:
    """Writes a file beside its path, and moves it there when what follows has succeeded.

    A failure, here or there, leaves neither a new file nor a changed one; `UserError` names the
    option.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".chipsparse-", dir=path.parent) as scratch:
            file = Path(scratch) / path.name
            file.write_text(text, encoding="utf-8")
            yield
            os.replace(file, path)
    except OSError as error:
        raise UserError(f"{option} {path} could not be written: {first_line(error)}") from error
