"""Signals wait for the end of a block, and nothing of it stays."""

import signal
import threading

import pytest

from chipsparse.common.deferred_signals import STOP_SIGNALS, deferred_signals


@pytest.fixture
def came(monkeypatch):
    """The signals that were delivered."""
    numbers = []
    before = {
        each: signal.signal(each, lambda number, _: numbers.append(number)) for each in STOP_SIGNALS
    }
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_delivered_once_at_the_end(came, number):
    with deferred_signals():
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert came == []
    assert came == [number]
    signal.raise_signal(number)
    assert came == [number] * 2


def test_also_where_the_block_fails(came):
    def fails():
        with deferred_signals():
            signal.raise_signal(signal.SIGTERM)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert came == [signal.SIGTERM]


def test_what_was_ignored_stays_ignored(came):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with deferred_signals():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.raise_signal(signal.SIGHUP)
    assert came == []


def test_another_thread_has_nothing_to_wait_for():
    done = []

    def work():
        with deferred_signals():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
