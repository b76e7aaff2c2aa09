"""Hands the files of a batch to workers, and knows what became of each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import chipsparse
from chipsparse.cli.batch.claims import Claims
from chipsparse.cli.batch.engine import (
    Answer,
    Died,
    Engine,
    Failed,
    Loaded,
    Made,
    NotLoaded,
    Refused,
    Task,
    Unavailable,
)
from chipsparse.cli.batch.entries import Entry
from chipsparse.cli.batch.folder import Folder
from chipsparse.cli.batch.live import LiveLine
from chipsparse.cli.errors import UserError
from chipsparse.cli.options import GenerateOptions

POLL_SECONDS = 1.0
# How long a worker that cannot be reached is left alone, and how often, before it is given up.
REST_SECONDS, RESTS = 5.0, 12


@dataclass
class _Worker:
    """What a worker is at."""

    state: str = "loading"  # or "idle", "busy", "resting"
    work: _Work | None = None
    since: float = 0.0  # in seconds of the clock
    rests: int = 0  # how often in a row it could not be reached
    where: str = ""


@dataclass
class _Work:
    """A file to make."""

    entry: Entry
    tries: int = 0
    elsewhere: bool = False  # whether another command had it at a time


@dataclass
class Dispatch:
    """Makes all files of a batch that are not there.

    Attributes:
        claims: on them, where other commands fill the same folder.
        tries: how often a prompt is tried.
        made: gets the names of the files that were made here.
        given_up: gets the names of those that were given up.
    """

    engine: Engine
    folder: Folder
    claims: Claims
    live: LiveLine
    tries: int
    made: set[str]
    given_up: set[str]
    clock: Callable[[], float] = time.monotonic
    _todo: deque[_Work] = field(default_factory=deque, init=False)
    _elsewhere: list[_Work] = field(default_factory=list, init=False)
    _workers: dict[int, _Worker] = field(default_factory=dict, init=False)
    _looked: float = field(default=0.0, init=False)
    _failed_loads: int = field(default=0, init=False)

    def run(
        self,
        entries: Sequence[Entry],
        *,
        workers: int,
        options: GenerateOptions,
        threads: int | None,
    ) -> None:
        """Makes the files of these entries.

        Args:
            options: of `generate`, which say what a worker loads.
            threads: of each worker on a CPU; None: PyTorch's own choice.

        Raises:
            UserError: the model cannot be loaded, a machine has another version, or a file cannot
                be written.
        """
        self._todo.extend(_Work(entry) for entry in entries)
        self._options, self._threads = options, threads
        for worker in range(workers):
            self._start(worker)
        while self._todo or self._elsewhere or any(each.work for each in self._workers.values()):
            self._assign()
            for worker, answer in self.engine.wait(POLL_SECONDS):
                self._take(worker, answer)
            self.live.refresh()

    def _start(self, worker: int) -> None:
        self._workers[worker] = _Worker()
        self.engine.start(worker, self._options, self._threads)

    # What goes out.

    def _assign(self) -> None:
        now = self.clock()
        for number, worker in self._workers.items():
            if worker.state == "resting" and now - worker.since >= REST_SECONDS:
                worker.state = "idle"
            if worker.state != "idle":
                continue
            work = self._next()
            if work is None:
                return
            worker.state, worker.work, worker.since = "busy", work, now
            entry = work.entry
            self.live.began(entry)
            self.engine.submit(
                number, Task(entry.name, entry.prompt, entry.seed, entry.group.options)
            )

    def _next(self) -> _Work | None:
        """A file that nobody has made and nobody else makes."""
        if self._elsewhere and not self._todo and self.clock() - self._looked >= POLL_SECONDS:
            self._looked = self.clock()
            self._todo.extend(self._elsewhere)
            self._elsewhere.clear()
        while self._todo:
            work = self._todo.popleft()
            if not self.claims.take(work.entry.digest):
                work.elsewhere = True
                self._elsewhere.append(work)
            elif self._ended_elsewhere(work):
                self.claims.let_go(work.entry.digest)
            else:
                return work
        return None

    def _ended_elsewhere(self, work: _Work) -> bool:
        """Whether another command is done with it; asked with the claim, so that it stays true."""
        if self.folder.has(work.entry):
            self.live.ended(work.entry, "made by another command")
            return True
        why = self.folder.failure_elsewhere(work.entry) if work.elsewhere else None
        if why is not None:
            self.given_up.add(work.entry.name)
            self.live.tell(f"error: {work.entry.label}: {why} (tried by another command)")
            self.live.ended(work.entry, "failed")
        return why is not None

    # What comes back.

    def _take(self, number: int, answer: Answer) -> None:
        worker = self._workers[number]
        work, worker.work = worker.work, None
        if not isinstance(answer, Unavailable):
            worker.rests = 0
        if isinstance(answer, Loaded):
            _check_version(answer)
            self._failed_loads = 0
            worker.state, worker.where = "idle", answer.where
        elif isinstance(answer, NotLoaded):
            raise UserError(answer.sentence)
        elif isinstance(answer, Unavailable):
            self._rest(number, work, lost=answer.in_part)
        elif work is None:
            self._restart(number, answer)
        else:
            work.tries += 1
            if isinstance(answer, Died | Failed):
                self._start(number)
            else:
                worker.state = "idle"
            self._settle(work, answer, worker.where)

    def _rest(self, number: int, work: _Work | None, *, lost: bool) -> None:
        """Nobody's fault, and no try: the file goes to the next worker that is there."""
        worker = self._workers[number]
        if work is not None:
            self._todo.appendleft(work)
            self.live.gave_back(work.entry, f"{work.entry.label}: its worker cannot be reached")
        worker.rests += 1
        if work is None or lost or worker.rests > RESTS:
            self._start(number)
        else:
            worker.state, worker.since = "resting", self.clock()

    def _restart(self, number: int, answer: Answer) -> None:
        """A worker ended that made nothing; where none can load, that is not tried for ever."""
        assert isinstance(answer, Died | Failed)
        if self._workers[number].state == "loading":
            self._failed_loads += 1
        if self._failed_loads >= self.tries:
            raise RuntimeError(f"a worker ended while it loaded the model: {answer.sentence}")
        self._start(number)

    def _settle(self, work: _Work, answer: Answer, where: str) -> None:
        """Keeps what became of a file, or puts it behind the others for another try."""
        entry, facts = work.entry, {"tries": work.tries, "worker": where}
        if isinstance(answer, Made):
            self.folder.keep(entry, answer, facts)
            self.made.add(entry.name)
            self.live.ended(entry, "made", answer.seconds)
        else:
            assert isinstance(answer, Died | Failed | Refused)
            if not isinstance(answer, Refused) and work.tries < self.tries:
                self.live.gave_back(entry, f"{entry.label}: {answer.sentence}; it is tried again")
                self._todo.append(work)
                return
            often = f" (tried {work.tries} times)" if work.tries > 1 else ""
            self.live.tell(f"error: {entry.label}: {answer.sentence}{often}")
            self.folder.give_up(entry, answer.sentence, facts)
            self.given_up.add(entry.name)
            self.live.ended(entry, "failed")
        self.claims.let_go(entry.digest)


def _check_version(worker: Loaded) -> None:
    if worker.version != chipsparse.__version__:
        raise UserError(
            f"{worker.where} has chipsparse {worker.version}, and this machine "
            f"{chipsparse.__version__}; install the same one on all"
        )
