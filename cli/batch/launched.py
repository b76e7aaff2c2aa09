"""The place of this process among those that `accelerate launch` or `torchrun` started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console

from chipsparse.cli.errors import UserError

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")

Some = TypeVar("Some")


@dataclass(frozen=True)
class Place:
    """One of several processes, each of which is a command of its own on the same folder.

    They need not talk to each other: what each of them makes is settled by claims on the folder.

    Attributes:
        rank: among all, from 0.
        local_rank: among those of this machine.
        count: of all.
    """

    rank: int
    local_rank: int
    count: int

    @property
    def tells(self) -> bool:
        """Whether it is this one that shows progress and the summary."""
        return self.rank == 0

    def console(self) -> Console:
        """Where it shows progress: one of several processes is enough to look at."""
        return Console(stderr=True, quiet=not self.tells)

    def in_turn(self, things: Sequence[Some]) -> list[Some]:
        """Its own share first, then the others', which it takes over where it is done early."""
        shares = [things[rank :: self.count] for rank in range(self.count)]
        return [each for share in shares[self.rank :] + shares[: self.rank] for each in share]


def place() -> Place:
    """Read from the environment; raises `UserError` where that says nothing sensible."""
    given = [os.environ.get(name) for name in VARIABLES]
    if None in given:
        return Place(0, 0, 1)
    try:
        return Place(*(int(each or "") for each in given))
    except ValueError:
        raise UserError(
            "RANK, LOCAL_RANK and WORLD_SIZE must be numbers, as a launcher sets them; they are "
            + ", ".join(map(repr, given))
        ) from None


def forget_place() -> None:
    """For what this process starts, which is none of the launcher's."""
    for name in VARIABLES:
        os.environ.pop(name, None)
