"""Moments in which the user's wish to stop has to wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# What asks a program to stop: Ctrl-C, kill, a closed terminal. Windows has no SIGHUP.
STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


@contextmanager
def deferred_signals() -> Iterator[Callable[[], None]]:
    """Delivers signals that ask to stop at the end of the block instead of within it.

    For the few steps that must be done together, such as making a folder and noting that it must
    go. Ignored signals stay ignored. Python delivers signals to the main thread alone, so that
    there is nothing to do in another one.

    Gives a function that delivers what has come until then, for a block that can still undo what it
    did.
    """
    came: list[int] = []
    before: dict[int, Any] = {}

    def deliver() -> None:
        while came:
            number = came.pop(0)
            if callable(before[number]):
                before[number](number, None)
            else:
                signal.signal(number, before[number])
                signal.raise_signal(number)

    if threading.current_thread() is not threading.main_thread():
        yield deliver
        return
    try:
        for number in STOP_SIGNALS:
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):
                before[number] = handler
                signal.signal(number, lambda number, _: came.append(number))
        yield deliver
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        del came[1:]  # the first one is enough to stop
        deliver()
