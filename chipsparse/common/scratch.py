"""Folders for half-written files: gone after use, also where the process that used them was killed.

A folder is locked for as long as it is in use, and the system lets go of the lock when a process
ends, however it ends. So whoever makes a folder can tell which ones beside it nobody uses any more.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from chipsparse.common.deferred_signals import deferred_signals

try:
    import fcntl
except ImportError:  # Windows: nothing is locked, and so nothing swept
    fcntl = None  # type: ignore[assignment]


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """An empty folder in `parent`, and so on its file system; removed at the end.

    Also removes those that killed processes left in `parent`.

    Raises:
        OSError: no folder can be made there.
    """
    _sweep(parent)
    folder: Path | None = None
    lock: int | None = None
    try:
        with deferred_signals():
            folder, lock = _make(parent)
        yield folder
    finally:
        with deferred_signals():
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            if lock is not None:
                os.close(lock)


def _prefix() -> str:
    """With a name for this machine: the locks of others may not be seen on a shared file system."""
    return f".chipsparse-{hashlib.sha256(platform.node().encode()).hexdigest()[:8]}-"


def _make(parent: Path) -> tuple[Path, int | None]:
    """A folder with its lock; None where the file system has no locks."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_prefix(), dir=parent))
        try:
            lock = _lock(folder)
        except (BlockingIOError, FileNotFoundError):
            continue  # swept by another process before it was locked
        if lock is None or _is_there(folder, lock):
            return folder, lock
        os.close(lock)


def _is_there(folder: Path, lock: int) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), folder.stat())
    except FileNotFoundError:
        return False


def _lock(folder: Path) -> int | None:
    """The file descriptor that holds the lock of a folder; None where there are no locks.

    Raises:
        BlockingIOError: it is in use.
        FileNotFoundError: it is gone.
    """
    if fcntl is None:
        return None
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise
    except OSError:
        os.close(lock)
        return None
    return lock


def _sweep(parent: Path) -> None:
    """Removes what nobody uses; what cannot be read or removed stays."""
    with suppress(OSError):
        for folder in parent.glob(f"{_prefix()}*"):
            with suppress(OSError):
                lock = _lock(folder)
                if lock is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                    os.close(lock)
