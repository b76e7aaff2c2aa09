"""Which of several commands that fill one folder makes which file.

A claim is a lock on one byte of a file that all of them open; the byte's place is the digest in the
name of what is claimed. The system lets go of a lock when the process ends, however it ends.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: what two commands make at a time is made twice, and whole
    fcntl = None  # type: ignore[assignment]

NAME = ".claims"
PLACES = 1 << 60  # below the largest offset of a file


class Claims:
    """The claims of this process on files of a folder; a context manager.

    Raises:
        OSError: on entry, where nothing can be written there.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._file = -1

    def __enter__(self) -> Claims:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def take(self, digest: str) -> bool:
        """Whether a claim is this process's now; on a file system without locks it always is."""
        if fcntl is None:
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(digest))
        except (BlockingIOError, PermissionError):  # EAGAIN and EACCES both say that it is taken
            return False
        except OSError:
            return True
        return True

    def let_go(self, digest: str) -> None:
        """Gives a claim back."""
        if fcntl is not None:
            with suppress(OSError):
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _place(digest))


def _place(digest: str) -> int:
    return int(digest, 16) % PLACES
