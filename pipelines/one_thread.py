"""One thread at a time: what a patched pipeline keeps belongs to one generation."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

FOR_CALLS = (
    "chipsparse keeps the caches of one generation at a time: call one after the other, or give "
    "each thread a pipeline with a transformer of its own"
)


class OneThread:
    """Lets one thread at a time in, as often as it likes; refuses others instead of waiting.

    A second generation that waited would share the first one's scheduler, and spoil both.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._thread: int | None = None

    @contextlib.contextmanager
    def only(self, name: str, remedy: str = FOR_CALLS) -> Iterator[None]:
        """Keeps other threads out of the block: a `RuntimeError` names what they call."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(f"this {name} is in use by another thread; {remedy}")
        before = self._thread
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = before
            self._lock.release()

    def is_inside(self) -> bool:
        """Return True if the calling thread is the one that was let in."""
        return self._thread == threading.get_ident()
