"""Signals wait for the end of a block, and nothing of it stays."""

import signal
import threading
from contextlib import suppress

import pytest

from chipsparse.common.deferred_signals import STOP_SIGNALS, deferred_signals


@pytest.fixture
def delivered():
    """The signals that were delivered."""
    numbers = []
    before = {
        number: signal.signal(number, lambda number, _: numbers.append(number))
        for number in STOP_SIGNALS
    }
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
@pytest.mark.parametrize("fails", [False, True])
def test_a_signal_is_delivered_once_at_the_end(delivered, number, fails):
    with suppress(ZeroDivisionError), deferred_signals():
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert delivered == []
        if fails:
            raise ZeroDivisionError
    assert delivered == [number]
    signal.raise_signal(number)
    assert delivered == [number] * 2


def test_ignored_signals_stay_ignored(delivered):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with deferred_signals():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.raise_signal(signal.SIGHUP)
    assert delivered == []


def test_another_thread_has_nothing_to_wait_for():
    done = []

    def work():
        with deferred_signals():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
