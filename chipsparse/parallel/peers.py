"""The messages of one generation's processes besides tensors: decisions, and failures.

They go through the key-value store of the process group, and so over the host: no GPU waits for
them, and who does not answer is known by name.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from chipsparse.common.errors import first_line

T = TypeVar("T")

TIMEOUT_SECONDS = 120.0  # of processes that take part in the same call
GRACE_SECONDS = 5.0  # until who is still there has said so, after a connection broke


class PeerError(RuntimeError):
    """Another process failed, is gone, or does something else; the text names its rank."""


class _BrokenExchangeError(RuntimeError):
    """An exchange of tensors did not come to its end."""


class Peers:
    """The processes of one generation, as one of them sees the others.

    They are given as global ranks, in order, this process among them. Every process makes these
    objects in the same order, and the same calls of each.
    """

    def __init__(self, ranks: Sequence[int], *, timeout_s: float = TIMEOUT_SECONDS) -> None:
        own = dist.get_rank()
        store = distributed_c10d._get_default_store()
        self.names = [f"rank {rank}" for rank in ranks]  # in messages
        self.rank = list(ranks).index(own)  # place in the order
        self._timeout_s = timeout_s
        made = store.add(f"chipsparse/made by {own}", 1)
        members = ",".join(map(str, ranks))
        self._store = dist.PrefixStore(f"chipsparse/{members}/{made}", store)
        self._rounds = 0
        self._warned = False  # of a failure, so that it need not be repeated
        hosts = self.gather(socket.gethostname())
        self.on_this_host = hosts.count(hosts[self.rank])

    def __len__(self) -> int:
        return len(self.names)

    def gather(self, value: T) -> list[T]:
        """Return what all say here, in order, as JSON; `PeerError` if one failed or is late."""
        self._rounds += 1
        self._say("said", value)
        said = []
        for rank, (kind, answer) in enumerate(self._answers(self._timeout_s)):
            self._warned = kind != "said"
            if self._warned:
                reasons = {
                    "failed": f"failed: {answer}",
                    "broken": "lost another process",
                    "silent": f"has not got here for {self._timeout_s:.0f} s: it is gone, hangs, "
                    "or makes other calls",
                }
                raise PeerError(f"{self.names[rank]} {reasons[kind]}")
            said.append(answer)
        # Nobody is here who has not read what was said the time before.
        self._store.delete_key(f"{self._rounds - 1}/{self.rank}")
        return said

    def first(self, value: T) -> T:
        """Return what the first process says, which so decides for all."""
        said: list[Any] = self.gather(value if self.rank == 0 else None)
        decided: T = said[0]
        return decided

    def least(self, *numbers: int) -> tuple[int, ...]:
        """Return the lowest that any process says of each number."""
        return tuple(map(min, zip(*self.gather(numbers), strict=True)))

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Raises `PeerError` where they differ in a fact, with the ranks and what each says."""
        said = self.gather(dict(facts))
        for rank, other in enumerate(said):
            for name, value in said[0].items():
                if other.get(name) != value:
                    raise PeerError(
                        f"{self.names[0]} and {self.names[rank]} differ in {name}: {value} and "
                        f"{other.get(name)}; every process must be called with the same arguments "
                        "and seed",
                    )

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Around an exchange of tensors: a failure in it is another process's."""
        try:
            yield
        except RuntimeError as error:
            raise _BrokenExchangeError(str(error)) from error

    def failed(self, error: BaseException) -> None:
        """Tell the others that this one failed; raises `PeerError` where another one did before."""
        if self._warned:
            self._warned = False
            return
        self._rounds += 1
        if not isinstance(error, _BrokenExchangeError):
            with contextlib.suppress(RuntimeError):  # whoever has the store may be gone
                self._say("failed", f"{type(error).__name__}: {first_line(error)}")
            return
        raise PeerError(self._blame(error)) from error

    def _blame(self, error: BaseException) -> str:
        """Return who broke an exchange, as far as the others say."""
        reason = f"an exchange of tensors broke off ({first_line(error)})"
        try:
            self._say("broken", None)
            answers = list(self._answers(GRACE_SECONDS))
        except RuntimeError:
            return f"{reason}, and so did the connection to the process that keeps the store"
        for rank, (kind, said) in enumerate(answers):
            if kind == "failed":
                return f"{self.names[rank]} failed: {said}"
        silent = [self.names[rank] for rank, (kind, _) in enumerate(answers) if kind == "silent"]
        if silent:
            return f"{' and '.join(silent)} is gone or hangs: {reason}"
        return reason

    def _say(self, kind: str, value: object) -> None:
        self._store.set(f"{self._rounds}/{self.rank}", json.dumps([kind, value]))

    def _answers(self, timeout_s: float) -> Iterator[tuple[str, Any]]:
        """Yield what each process says, with its kind: said, failed, broken, or silent."""
        end = time.monotonic() + timeout_s
        for rank in range(len(self)):
            key = f"{self._rounds}/{rank}"
            left = timedelta(seconds=max(0.01, end - time.monotonic()))
            try:
                self._store.wait([key], left)
            except RuntimeError:
                if not self._store.check([key]):
                    yield "silent", None
                    continue
            kind, value = json.loads(self._store.get(key))
            yield kind, value
