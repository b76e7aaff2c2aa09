"""The end of a command that a signal asks to stop: soon, with one line, and nothing half-written.

Python raises what a signal asks for between two of its own instructions only, so that one long call
of PyTorch would hold it up, and some libraries swallow it. So a thread of `listening` hears signals
too, and ends the process where the main thread has not come to its end in time.

Nothing here may take long to import: whatever is imported before cannot be interrupted well.
"""

from __future__ import annotations

import atexit
import math
import os
import select
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress

TYPE_CHECKING = False  # `typing` takes longer to import than all else here
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

# What asks a program to stop besides Ctrl-C: `kill`, a closed terminal. Windows has no SIGHUP.
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
SECONDS_TO_END = 2.0  # of the main thread, before it is ended where it stands
SECONDS_TO_LOOK = 0.05


class Stopped(KeyboardInterrupt):
    """A signal that asks to stop; it cleans up on its way, as Ctrl-C does."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number


class _State:
    """What is known of a stop in this process, which has only one."""

    def __init__(self, *, listening: bool = False) -> None:
        self.listening = listening
        self.asked: int | None = None  # the signal, once there was one
        self.settled = threading.Event()  # the main thread reports it, and needs no more hurry
        self.patient = 0  # blocks that may take their time
        self.said = False  # the line was printed
        self.ending = threading.RLock()
        self.ender: int | None = None  # the thread that ends the process
        self.kept: Callable[[], str] = lambda: "nothing was written"
        self.undone: list[Callable[[], object]] = []  # to be done where the process ends at once


_state = _State()


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """Return the code that shells expect of a stopped program: 130 for Ctrl-C, 143, 129."""
    return 128 + getattr(interrupt, "signal", signal.SIGINT)


def asked_to_stop() -> KeyboardInterrupt | None:
    """Return what a signal asked for, as an exception; None where there was none."""
    if _state.asked is None:
        return None
    return KeyboardInterrupt() if _state.asked == signal.SIGINT else Stopped(_state.asked)


def stop(number: int, _: FrameType | None) -> None:
    """Raise `KeyboardInterrupt` or `Stopped` for a signal; a second one ends the process."""
    if _state.ender == threading.get_ident():  # a further signal: the end goes on
        return
    if _state.listening:
        if _state.asked is not None and not _state.patient:
            end(number)
        _state.asked = number
    raise KeyboardInterrupt if number == signal.SIGINT else Stopped(number)


def settle() -> None:
    """Let the main thread take its time from here on: it comes to its own end."""
    _state.settled.set()


def say_stopped(interrupt: KeyboardInterrupt, kept: str) -> None:
    """Print, once, the line that a stopped command ends with."""
    if not _state.said:
        _state.said = _state.listening
        verb = f"ended by {interrupt}" if isinstance(interrupt, Stopped) else "interrupted"
        print(f"chipsparse: {verb}, {kept}", file=sys.stderr, flush=True)


@contextmanager
def kept_is(kept: Callable[[], str]) -> Iterator[None]:
    """Let ``kept`` say, after a stop, what that leaves."""
    before = _state.kept
    _state.kept = kept
    try:
        yield
    finally:
        _state.kept = before


@contextmanager
def done_at_least(undone: Callable[[], object]) -> Iterator[None]:
    """Have a function called where the process ends within the block without leaving it."""
    _state.undone.append(undone)
    try:
        yield
    finally:
        _state.undone.remove(undone)


@contextmanager
def patiently() -> Iterator[None]:
    """Let the block come to its own end after a signal, however long that takes."""
    _state.patient += 1
    try:
        yield
    finally:
        _state.patient -= 1


def end(number: int) -> None:
    """End the process at once, after what is to be done at least, with the line and the code."""
    _state.ending.acquire()  # never released: another thread that comes here waits for the end
    if _state.ender is not None:  # this thread, within what a signal interrupted
        return
    _state.ender = threading.get_ident()
    sys.stdout = sys.__stdout__
    for undone in reversed(_state.undone):
        with suppress(BaseException):
            undone()
    with suppress(BaseException):
        interrupt = KeyboardInterrupt() if number == signal.SIGINT else Stopped(number)
        say_stopped(interrupt, _state.kept())
    leave(128 + number)


def leave(code: int) -> None:
    """End the process without what interpreters and libraries do at their ends."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


class Ending:
    """Leaves the process of a command once all `atexit` functions that are registered later ran.

    The interpreter's own end frees each object of PyTorch and diffusers, which takes seconds, and
    nobody gains by it. Threads that are no daemons have ended before, and files are flushed. Where
    another program called the command, that one's end stays as it is.
    """

    def __init__(self) -> None:
        self.code: int | None = None  # of the process; None as long as it is not known
        if _is_own_process():
            atexit.register(self._leave)

    def _leave(self) -> None:
        if self.code is not None:
            leave(self.code)


def _is_own_process() -> bool:
    """Return whether Python was started as `chipsparse` or by `python -m chipsparse`."""
    folder, name = os.path.split(getattr(sys.modules["__main__"], "__file__", None) or "")
    stem = os.path.splitext(name)[0]
    is_module = stem == "__main__" and os.path.basename(folder) == "chipsparse"
    return is_module or stem == "chipsparse"


@contextmanager
def listening() -> Iterator[None]:
    """Mind the signals within the block; those that were ignored stay ignored."""
    global _state  # noqa: PLW0603 - signals are the process's
    _state = _State(listening=True)
    numbers = [signal.SIGINT, *STOP_SIGNALS]
    before = {number: signal.getsignal(number) for number in numbers}
    before = {n: handler for n, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    heard, written = os.pipe()
    os.set_blocking(written, False)
    hook = sys.unraisablehook
    wakeup = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    watch = threading.Thread(target=_watch, args=(heard, {*before}), daemon=True)

    def unraisable(args: sys.UnraisableHookArgs) -> None:
        """End where Python could not raise it, as within a destructor, and would go on."""
        if issubclass(args.exc_type, KeyboardInterrupt):
            end(_state.asked or signal.SIGINT)
        hook(args)

    sys.unraisablehook = unraisable
    try:
        for number in before:
            signal.signal(number, stop)
        watch.start()
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        sys.unraisablehook = hook
        os.close(written)  # which ends the thread
        _state = _State()


def _watch(heard: int, numbers: set[int]) -> None:
    """End the process where the main thread is not at its end soon, or at a second signal."""
    first: int | None = None
    limit = math.inf
    while True:
        ready, _, _ = select.select([heard], [], [], None if first is None else SECONDS_TO_LOOK)
        if ready:
            content = os.read(heard, 1)
            if not content:
                break
            if content[0] in numbers:
                if first is not None and not _state.patient:
                    end(content[0])
                first = content[0]
                limit = time.monotonic() + SECONDS_TO_END
        hurried = not (_state.patient or _state.settled.is_set())
        if first is not None and hurried and time.monotonic() > limit:
            end(first)
    os.close(heard)
