"""What the page talks to: it begins a generation, follows it, and stops it."""

from __future__ import annotations

import functools
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from chipsparse.cli.commands.studio import StudioOptions
from chipsparse.cli.errors import described
from chipsparse.cli.request import Request, device_and_dtype
from chipsparse.cli.studio.choices import Choices, settled
from chipsparse.cli.studio.feed import Feed, Shown, Stopped
from chipsparse.cli.studio.maker import Maker, Result


@dataclass(frozen=True)
class BrokenOff:
    """Nothing was made.

    Attributes:
        why: one sentence; None where it was stopped.
    """

    why: str | None
    last: Shown


# News of a generation; one that is not `Shown` is its end.
News = Shown | Result | BrokenOff


class Studio:
    """A context manager, at whose end nothing runs any more.

    Args:
        folder: for what is made; an empty one.

    Raises:
        UserError: the device is not here.
    """

    def __init__(self, options: StudioOptions, folder: Path) -> None:
        self.options = options
        device, dtype = device_and_dtype(options)
        self._settled = functools.partial(settled, typed=options, device=device, dtype=dtype)
        self._folder = folder
        self._maker = Maker(self._settled, folder)
        # All that touches the pipeline is done by one thread, one thing after the other.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="studio")
        self._feeds: set[Feed] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Studio:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._worker.submit(self._maker.close)
        self._worker.shutdown()

    def settle(self, choices: Choices) -> Request:
        """What would be made, from the model's configs alone; raises `UserError`."""
        return self._settled(choices, self._folder)

    def start(self, choices: Choices) -> queue.SimpleQueue[News]:
        """Begins a generation, in place of one that still runs."""
        self.stop()
        events: queue.SimpleQueue[News] = queue.SimpleQueue()
        feed = Feed(events.put)
        with self._lock:
            self._feeds.add(feed)
        self._worker.submit(self._work, choices, feed, events)
        return events

    def stop(self) -> None:
        """Stops what runs or waits, at the end of its step."""
        with self._lock:
            for feed in self._feeds:
                feed.stop()

    def _work(self, choices: Choices, feed: Feed, events: queue.SimpleQueue[News]) -> None:
        try:
            feed.check()
            events.put(self._maker.make(choices, feed))
        except Stopped:
            events.put(BrokenOff(None, feed.now))
        except Exception as error:
            events.put(BrokenOff(described(error), feed.now))
        finally:
            with self._lock:
                self._feeds.discard(feed)
