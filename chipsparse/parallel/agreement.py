"""What a session decides together with the processes that run the same calls."""

from __future__ import annotations

from typing import TypeVar

import torch

from chipsparse.cache.memory_plan import Capacity
from chipsparse.parallel.branch_columns import BranchColumns
from chipsparse.parallel.peers import Peers

Found = TypeVar("Found")


class Agreement:
    """Decisions that must be the same on all processes; here of a single one, which agrees.

    Attributes:
        columns: that guidance branches on other processes keep, too; None where there are none.
    """

    columns: BranchColumns | None = None

    def first(self, value: Found) -> Found:
        """What the first process found, as JSON carries it, which decides for all."""
        return value

    def capacity(self, own: Capacity, device: torch.device) -> Capacity:
        """What every process has for its caches, with this one's and where it computes."""
        return own


class Together(Agreement):
    """The agreement of several processes."""

    def __init__(self, peers: Peers, columns: BranchColumns | None = None) -> None:
        self._peers = peers
        self.columns = columns

    def first(self, value: Found) -> Found:
        """See `Agreement`."""
        found: Found = self._peers.first(value)
        return found

    def capacity(self, own: Capacity, device: torch.device) -> Capacity:
        """The least of all, since they wait for the slowest; a machine's memory is shared."""
        sharing = self._peers.on_this_host
        on_device = own.device // sharing if device.type == "cpu" else own.device
        on_device, host = self._peers.least(on_device, own.host // sharing)
        return Capacity(on_device, host, one_memory=own.one_memory)
