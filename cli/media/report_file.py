"""Files of text that a command writes beside its clips: all of them or nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.media.output_names import check_writable
from chipsparse.common.finished_files import place, write_checked
from chipsparse.common.scratch import scratch_folder


def check_file(option: str, path: Path, *suffixes: str) -> None:
    """Raises `UserError` where a file could not be written; leaves nothing.

    Args:
        suffixes: one of which it must have; the first is named.
    """
    if path.suffix.lower() not in suffixes:
        raise UserError(f"{option} {path} must end in {suffixes[0]}")
    check_writable(option, path)


@contextmanager
def staged_report(path: Path, content: dict[str, Any]) -> Iterator[None]:
    """As `staged_file`, for the JSON of ``--report``."""
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    with staged_file("--report", path, text + "\n"):
        yield


@contextmanager
def staged_file(option: str, path: Path, text: str) -> Iterator[Path]:
    """Writes a file beside its path, and moves it there when what follows has succeeded.

    Gives the file before it is moved. A failure, here or there, leaves neither a new file nor a
    changed one; `UserError` names the option.
    """
    with (
        user_errors(OSError, what=f"{option} {path} could not be written"),
        scratch_folder(path.parent) as scratch,
    ):
        file = scratch / path.name
        write_checked(file, text)
        yield file
        place({path: file}, scratch=scratch)
