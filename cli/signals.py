"""Ctrl-C, `kill` and a closed terminal, all as one exception that cleans up on its way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from chipsparse.common.deferred_signals import STOP_SIGNALS


class Stopped(KeyboardInterrupt):
    """The user, or the system, wants the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = signal.Signals(number)


@contextmanager
def stop_signals() -> Iterator[None]:
    """Raises `Stopped` in the main thread for what asks to stop.

    Ignored signals stay ignored, as `nohup` and shell scripts want it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    try:
        for number in STOP_SIGNALS:
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):
                before[number] = handler
                signal.signal(number, _stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """What shells expect of a program that was stopped: 130 for Ctrl-C, 143, 129."""
    return 128 + _number(interrupt)


def verb(interrupt: KeyboardInterrupt) -> str:
    """What happened, in words."""
    number = _number(interrupt)
    return "interrupted" if number == signal.SIGINT else f"ended by {number.name}"


def _number(interrupt: KeyboardInterrupt) -> signal.Signals:
    return interrupt.signal if isinstance(interrupt, Stopped) else signal.SIGINT


def _stop(number: int, _: FrameType | None) -> None:
    raise Stopped(number)
