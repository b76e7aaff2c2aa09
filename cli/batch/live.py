"""How far a batch is: a live line on a terminal, else a plain line for each file."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import chain

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from chipsparse.cli.batch.entries import Entry
from chipsparse.cli.progress import clock_text, duration
from chipsparse.cli.views.units import shortened

LONGEST_PROMPT = 60


class LiveLine:
    """The live line, or the plain ones, on a console; a context manager."""

    def __init__(
        self,
        entries: Sequence[Entry],
        workers: int,
        *,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._clock = clock
        self._start = clock()
        self._workers = workers
        self._waiting = {entry.name: entry for entry in entries}
        self._busy: dict[str, tuple[Entry, float]] = {}
        self._took: dict[Hashable, list[float]] = defaultdict(list)
        self._ended: Counter[str] = Counter()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[clock]}"),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("loading the model", total=len(entries), clock="")

    def __enter__(self) -> LiveLine:
        if self._console.is_terminal:
            self._bar.start()
        else:
            self.tell("loading the model")
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def began(self, entry: Entry) -> None:
        """A worker makes this file now."""
        self._busy[entry.name] = self._waiting.pop(entry.name), self._clock()

    def gave_back(self, entry: Entry, why: str) -> None:
        """It does not make it; somebody will."""
        self._waiting[entry.name], _ = self._busy.pop(entry.name)
        self.tell(why)

    def ended(self, entry: Entry, state: str, seconds: float | None = None) -> None:
        """Nothing more is to be done about a file, which took ``seconds`` if it was made here."""
        self._waiting.pop(entry.name, None)
        self._busy.pop(entry.name, None)
        self._ended[state] += 1
        if seconds is not None:
            self._took[entry.group].append(seconds)
        if not self._console.is_terminal:
            took = "" if seconds is None else f" in {duration(seconds)}"
            prompt = shortened(entry.prompt, LONGEST_PROMPT)
            done = f"{self._ended.total()} of {self._total}"
            self.tell(f"{done}: {state}{took}: {prompt} ({self._clock_text()})")
        self.refresh()

    def refresh(self) -> None:
        """Shows what is true now."""
        failed = f", {self._ended['failed']} failed" if self._ended["failed"] else ""
        busy = f", {len(self._busy)} in work" if self._busy else ""
        done = self._ended.total()
        if done or busy:
            text = f"{done - self._ended['failed']} of {self._total} made{failed}{busy}"
            self._bar.update(self._task, description=text)
        self._bar.update(self._task, completed=done, clock=self._clock_text())

    def tell(self, text: str) -> None:
        """A line that stays."""
        self._console.print(f"chipsparse: {text}", highlight=False, markup=False, soft_wrap=True)

    def seconds_left(self) -> float | None:
        """An estimate; None before anything was made."""
        now = self._clock()
        waiting = [self._expected(entry) for entry in self._waiting.values()]
        busy = [self._expected(entry) - (now - since) for entry, since in self._busy.values()]
        if not self._took:
            return None
        return max(
            sum([*waiting, *(max(0.0, each) for each in busy)]) / self._workers, max([0.0, *busy])
        )

    def _expected(self, entry: Entry) -> float:
        """Seconds that it takes: as others with its settings did, else as all did."""
        found = self._took.get(entry.group) or list(chain(*self._took.values()))
        return sum(found) / len(found) if found else 0.0

    @property
    def _total(self) -> int:
        return self._ended.total() + len(self._waiting) + len(self._busy)

    def _clock_text(self) -> str:
        return clock_text(self._clock() - self._start, self.seconds_left())
