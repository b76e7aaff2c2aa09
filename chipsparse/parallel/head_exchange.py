"""The exchanges of the processes that share a sequence, in buffers of numbers.

What is sent is known from the sizes: none are exchanged, and no host waits for a GPU. An exchange
runs beside what the GPU computes until somebody waits for it; NCCL has a stream of its own for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from chipsparse.parallel.peers import Peers

# In so many parts heads are exchanged, where each process has as many: the attention of one part
# hides the exchange of the next. More would leave a GPU too few blocks at a time.
PARTS = 3

# PyTorch 2.13 has another name, and warns of the old one.
all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class SharingGroups:
    """Process groups of those that share the tokens of a call."""

    tokens: Any  # all of them
    heads: Any | None  # those with the same query rows, which share the heads; None: this one alone
    rows: Any | None  # those with the same heads, which share the query rows; None: this one alone

    @property
    def ring(self) -> int:
        """The number of processes that share the query rows of a head."""
        return 1 if self.rows is None else dist.get_world_size(self.rows)


@dataclass(frozen=True)
class Pending:
    """An exchange under way."""

    work: Any  # its handle
    received: torch.Tensor  # the buffer that it fills
    sent: torch.Tensor  # what it sends, which must live until then


class HeadExchange:
    """The exchanges of one process with others of its groups, which all make the same in order."""

    def __init__(self, groups: SharingGroups, peers: Peers) -> None:
        self.groups, self.peers = groups, peers
        # Of this process, and of all that share the tokens.
        self.rank, self.ranks = dist.get_rank(groups.tokens), dist.get_world_size(groups.tokens)
        # Runs around what an exchange adds to a call besides its run beside others: packing,
        # waiting, unpacking. To measure that.
        self.watch: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def gather(self, tensor: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """``[B, N, C]`` on every rank, from the tokens ``[B, n, C]`` of each."""
        batch, own, channels = tensor.shape
        most = max(tokens)  # all ranks send as much
        with self.watch():
            sent = tensor.new_zeros(most, batch, channels)
            sent[:own] = tensor.transpose(0, 1)
            received = self.wait(self.start_gather(sent.flatten(), self.groups.tokens))
            parts = received.view(self.ranks, most, batch, channels)
            pieces = [part[:count] for part, count in zip(parts, tokens, strict=True)]
            return torch.cat(pieces).transpose(0, 1)

    def start_gather(self, sent: torch.Tensor, group: Any) -> Pending:
        """Begin to send a buffer ``[n]`` to all of a group, which all send as much."""
        received = sent.new_empty(dist.get_world_size(group) * sent.numel())
        with self.peers.exchange():
            work = all_gather_tensor(received, sent, group=group, async_op=True)
        return Pending(work, received, sent)

    def start_swap(self, sent: torch.Tensor, given: list[int], taken: list[int]) -> Pending:
        """Begin to send each process that shares the heads its piece of a buffer ``[n]``."""
        received = sent.new_empty(sum(taken))
        with self.peers.exchange():
            work = dist.all_to_all_single(
                received, sent, taken, given, group=self.groups.heads, async_op=True
            )
        return Pending(work, received, sent)

    def wait(self, pending: Pending) -> torch.Tensor:
        """Return the buffer of an exchange; on a GPU the stream waits, and not the host."""
        with self.peers.exchange():
            pending.work.wait()
        return pending.received
