"""The decisions that a session makes together with the processes that run the same calls."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from chipsparse.config import Action
from chipsparse.layout import ModelLayout
from chipsparse.parallel.peers import PeerError, Peers


class BranchColumns:
    """Hands the columns that the first branch chose to those on other processes, layer by layer."""

    def __init__(self, group: dist.ProcessGroup, peers: Peers) -> None:
        self._group = group
        self._peers = peers
        self._source = dist.get_process_group_ranks(group)[0]
        self._shared = False

    def open(self, step: int, action: Action, layout: ModelLayout) -> None:
        """Begin a call on every process of the branches.

        Raises:
            PeerError: if they do not do the same.
        """
        said = self._peers.gather([step, action.value, str(layout)])
        for rank, (other_step, other_action, _) in enumerate(said):
            if [other_step, other_action] != said[0][:2]:
                raise PeerError(
                    f"{self._peers.names[0]} is at step {said[0][0]} ({said[0][1]}) and "
                    f"{self._peers.names[rank]} at step {other_step} ({other_action})",
                )
        # Prompts of other lengths in the sequence choose for themselves.
        alike = all(other_layout == said[0][2] for *_, other_layout in said)
        self._shared = alike and action is Action.REFRESH

    def give(self, columns: torch.Tensor) -> None:
        """If this is the first, send the columns of a layer's refresh, uint8 ``[B, H, G, n]``."""
        if self._shared and self._peers.rank == 0:
            self._broadcast(columns.contiguous())

    @property
    def given(self) -> bool:
        """True where the first process sends this one the columns of every layer."""
        return self._shared and self._peers.rank > 0

    def take(self, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Return the columns of a layer that are `given`."""
        columns = torch.empty(shape, dtype=torch.uint8, device=device)
        self._broadcast(columns)
        return columns

    def _broadcast(self, columns: torch.Tensor) -> None:
        with self._peers.exchange():
            dist.broadcast(columns, self._source, group=self._group)


@dataclass(frozen=True)
class Agreement:
    """Decisions that must be the same on all processes."""

    peers: Peers | None = None  # the processes; None for a single one, which agrees with itself
    # That guidance branches on other processes keep, too; None where there are none.
    columns: BranchColumns | None = None

    def capacity(self, on_device: int, on_host: int, device: torch.device) -> tuple[int, int]:
        """Return the least bytes for caches of any process, on device and host; all wait for it."""
        if self.peers is None:
            return on_device, on_host
        sharing = self.peers.on_this_host
        if device.type == "cpu":
            on_device //= sharing
        on_device, on_host = self.peers.least(on_device, on_host // sharing)
        return on_device, on_host
