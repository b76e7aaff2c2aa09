"""Moments in which the user's wish to stop has to wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# What asks a program to stop: Ctrl-C, kill, a closed terminal. Windows has no SIGHUP.
STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Delivers signals that ask to stop at the end of the block instead of within it.

    For the few steps that must be done together, such as making a folder and noting that it must
    go. Ignored signals stay ignored. Python delivers signals to the main thread alone, so that
    there is nothing to do in another one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {}
    try:
        for number in STOP_SIGNALS:
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):
                before[number] = handler
                signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(came):
            signal.raise_signal(number)
