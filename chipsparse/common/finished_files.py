"""Finished files get their names: all of them, or none."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from chipsparse.common.deferred_signals import deferred_signals
from chipsparse.common.scratch import scratch_folder


def write_whole(path: Path, text: str) -> None:
    """Writes a text file, all of it or nothing; an error leaves an earlier file as it was.

    Raises:
        OSError: it cannot be written, or reads back as something else.
    """
    with scratch_folder(path.parent) as scratch:
        file = scratch / path.name
        write_checked(file, text)
        place({path: file}, scratch=scratch)


def write_checked(file: Path, text: str) -> None:
    """Writes a text file under a name that does not count yet, and reads it back."""
    content = readable(text).encode("utf-8")
    file.write_bytes(content)
    if file.read_bytes() != content:
        raise OSError(f"{file.name} reads back as something else than was written")


def readable(text: str) -> str:
    """A text that UTF-8 can take: names of files may hold bytes that are none."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def place(files: Mapping[Path, Path], *, stale: Iterable[Path] = (), scratch: Path) -> None:
    """Moves files to their names, over earlier ones, and removes stale ones.

    An error, also one that comes from a signal, undoes what was done before it.

    Args:
        files: finished ones, by the paths that they are to have, in one folder.
        stale: of the same folder; none of those.
        scratch: a folder on the same file system, for what is replaced.

    Raises:
        OSError: something cannot be moved or removed.
    """
    for file in files.values():
        _settle(file)
    earlier: dict[Path, Path | None] = {}
    with deferred_signals() as deliver:
        try:
            for number, path in enumerate((*files, *stale)):
                earlier[path] = _set_aside(path, scratch / f"earlier-{number}")
                if path in files:
                    os.replace(files[path], path)
                else:
                    path.unlink(missing_ok=True)
            deliver()
        except BaseException:
            for path, kept in earlier.items():
                with suppress(OSError):
                    if kept is None:
                        path.unlink()
                    else:
                        os.replace(kept, path)
            raise


def _settle(file: Path) -> None:
    """Waits until a file is on the disk: some file systems tell only then that they are full."""
    descriptor = os.open(file, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _set_aside(path: Path, kept: Path) -> Path | None:
    """Keeps a file under another name, too, if it exists; returns where."""
    if path.is_dir() and not path.is_symlink():
        raise IsADirectoryError(f"{path} is a folder")
    if not os.path.lexists(path):
        return None
    try:
        os.link(path, kept, follow_symlinks=False)
    except (OSError, NotImplementedError):  # a file system without hard links
        os.replace(path, kept)
    return kept
