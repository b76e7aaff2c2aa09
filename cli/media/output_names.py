"""Whether files can be written under the names that the user gave, before anything is computed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from chipsparse.cli.errors import UserError, user_errors
from chipsparse.common.scratch import scratch_folder


def check_writable(
    option: str, path: Path, also: Sequence[Path] = (), *, longest: Sequence[Path] = ()
) -> None:
    """Raises `UserError` where files could not be written; leaves nothing.

    Args:
        option: which names the first one.
        also: further files that are written beside it.
        longest: names of which only the length matters.
    """
    if os.path.isdir(path):
        raise UserError(f"{option} {path} is a folder; name a file in it")
    for each in also:
        if os.path.isdir(each):
            raise UserError(f"{each}, which is written beside {option} {path}, is a folder")
    folder = path.parent
    if not os.path.isdir(folder):
        above = next(filter(os.path.exists, path.parents), None)
        if above is not None and not os.path.isdir(above):
            raise UserError(f"{option} {path} is below {above}, which is no folder")
        raise UserError(f"the folder {folder} of {option} {path} does not exist; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"the folder {folder} of {option} {path} cannot be written to")
    with (
        user_errors(OSError, what=f"{option} {path} cannot be written"),
        scratch_folder(folder) as scratch,
    ):
        for each in (path, *also, *longest):
            (scratch / each.name).write_bytes(b"0")


def check_inputs_stay(option: str, output: Path, inputs: Iterable[Path | None]) -> None:
    """Raises `UserError` where an output would replace a file that the command reads.

    Args:
        inputs: what is read; None where an option was left out.
    """
    for file in inputs:
        if file is not None and os.path.realpath(file) == os.path.realpath(output):
            raise UserError(f"{option} {output} would replace {file}, which is read")
