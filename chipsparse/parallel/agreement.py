"""The decisions that a session makes together with the processes that run the same calls."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chipsparse.parallel.branch_columns import BranchColumns
from chipsparse.parallel.peers import Peers


@dataclass(frozen=True)
class Agreement:
    """Decisions that must be the same on all processes."""

    peers: Peers | None = None  # the processes; None for a single one, which agrees with itself
    # That guidance branches on other processes keep, too; None where there are none.
    columns: BranchColumns | None = None

    def capacity(self, on_device: int, on_host: int, device: torch.device) -> tuple[int, int]:
        """Return the bytes for caches, on the device and on the host, that every process has.

        The least of all, since they wait for the slowest. A machine's memory is shared.
        """
        if self.peers is None:
            return on_device, on_host
        sharing = self.peers.on_this_host
        if device.type == "cpu":
            on_device //= sharing
        on_device, on_host = self.peers.least(on_device, on_host // sharing)
        return on_device, on_host
