"""What a session decides together with the processes that run the same calls."""

from __future__ import annotations

import torch

from chipsparse.parallel.branch_columns import BranchColumns
from chipsparse.parallel.peers import Peers


class Agreement:
    """Decisions that must be the same on all processes; here of a single one, which agrees.

    Attributes:
        columns: that guidance branches on other processes keep, too; None where there are none.
    """

    columns: BranchColumns | None = None

    def capacity(self, on_device: int, on_host: int, device: torch.device) -> tuple[int, int]:
        """The bytes for caches, on the device and on the host, that every process has.

        Args:
            on_device: of this process.
            on_host: of this process.
            device: where it computes.
        """
        return on_device, on_host


class Together(Agreement):
    """The agreement of several processes."""

    def __init__(self, peers: Peers, columns: BranchColumns | None = None) -> None:
        self._peers = peers
        self.columns = columns

    def capacity(self, on_device: int, on_host: int, device: torch.device) -> tuple[int, int]:
        """The least of all, since they wait for the slowest; a machine's memory is shared."""
        sharing = self._peers.on_this_host
        if device.type == "cpu":
            on_device //= sharing
        on_device, on_host = self._peers.least(on_device, on_host // sharing)
        return on_device, on_host
