"""The exchanges of the processes that share a sequence.

What is sent is known from the sizes: none are exchanged, and no host waits for a GPU until a window
has to grow. An exchange runs beside what the GPU computes until somebody waits for it. Where GPUs
reach each other's memory, each process copies its pieces to where the others read them; elsewhere
they are packed, sent by a collective and unpacked.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from chipsparse.common.machine import keep_for_good
from chipsparse.kernels.piece_copies import copy_pieces
from chipsparse.parallel.peers import Peers
from chipsparse.parallel.windows import Windows, gpus_reach

# PyTorch 2.13 has another name, and warns of the old one.
all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Given:
    """The pieces that a process gives to another one, and that it takes from it."""

    piece: range  # of each tensor
    taken: tuple[torch.Tensor, ...]  # what it gets from there, in its window
    there: tuple[torch.Tensor, ...]  # what it gives, in the other's window; empty: out of reach


@dataclass(frozen=True)
class Swap:
    """The pieces of some tensors ``[B, N, H, D]`` that processes give to each other.

    They find what they are given in their windows.
    """

    dim: int  # along which the tensors are cut
    partners: tuple[Given, ...]  # by rank, this one's among them


class HeadExchange:
    """The exchanges of one process with others of its group, which all make the same in order."""

    def __init__(self, group: dist.ProcessGroup, peers: Peers) -> None:
        self.peers = peers
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        # Runs around what an exchange adds to a call besides its run beside others: waiting, and
        # packing and unpacking where memory is out of reach. To measure that.
        self.watch: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        # Made once of calls of one kind; they lie in the windows.
        self.routes: dict[Any, Any] = {}
        self._group = group
        self._device: torch.device | None = None
        self._reached = False  # on that device
        self._beside: Any = None  # its stream for copies to others
        self._windows: dict[str, Windows] = {}

    def windows(
        self,
        name: str,
        shapes: Sequence[Sequence[tuple[int, ...]]],
        like: torch.Tensor,
    ) -> list[list[torch.Tensor]]:
        """Tensors of such shapes in each rank's window of a name; none in those out of reach.

        All processes ask for the same. What was in a window before is lost.
        """
        sizes = [[math.prod(shape) for shape in of_rank] for of_rank in shapes]
        device = like.device
        nbytes = max(map(sum, sizes)) * like.itemsize
        if device != self._device:
            self.close()
            self._device = device
            self._reached = gpus_reach(self._group, self.peers, device)
            if self._reached:
                self._beside = torch.cuda.Stream(device, priority=-1)
        if name not in self._windows or self._windows[name].nbytes < nbytes:
            if self._reached:
                torch.cuda.synchronize(device)
                self.peers.gather(name)  # nobody writes to the old one any more
            self.routes.clear()
            self._windows.pop(name, None)
            if self._reached:
                self.peers.gather(name)  # all have let go of it: now it is free
                torch.cuda.empty_cache()  # which PyTorch does not do for such memory
            # A bit larger, so that not every longer prompt needs a new one.
            nbytes += nbytes // 16
            self._windows[name] = Windows(
                self._group,
                self.peers,
                nbytes,
                device,
                reached=self._reached,
            )
        windows = self._windows[name]
        views: list[list[torch.Tensor]] = [[] for _ in shapes]
        for rank, of_rank in enumerate(shapes):
            if self._reached or rank == self.rank:
                window = windows.of(rank, sum(sizes[rank]), like.dtype)
                pieces = zip(window.split(sizes[rank]), of_rank, strict=True)
                views[rank] = [numbers.view(shape) for numbers, shape in pieces]
        return views

    def start(self, name: str, tensors: Sequence[torch.Tensor], swap: Swap) -> Callable[[], None]:
        """Begin a swap by a window; the function that is returned waits for what was taken.

        On a GPU the stream waits, and not the host.
        """
        if not self._reached:
            return self._collective(tensors, swap)
        now = torch.cuda.current_stream(self._device)
        self._beside.wait_stream(now)
        with torch.cuda.stream(self._beside):
            pieces = [partner.piece for partner in swap.partners]
            places = [partner.there for partner in swap.partners]
            copy_pieces(tensors, pieces, places, dim=swap.dim)
            with self.peers.exchange():
                self._windows[name].meet()
            done = self._beside.record_event()

        def wait(_kept: object = tensors) -> None:
            now.wait_event(done)

        return wait

    def _collective(self, tensors: Sequence[torch.Tensor], swap: Swap) -> Callable[[], None]:
        pieces = list[torch.Tensor]()
        given = list[int]()
        taken = list[int]()
        places = [place for partner in swap.partners for place in partner.taken]
        for partner in swap.partners:
            piece = partner.piece
            cut = [tensor.narrow(swap.dim, piece.start, len(piece)) for tensor in tensors]
            pieces += [tensor.reshape(-1) for tensor in cut]
            given.append(sum(tensor.numel() for tensor in cut))
            taken.append(sum(place.numel() for place in partner.taken))
        sent = torch.cat(pieces)
        received = sent.new_empty(sum(taken))
        with self.peers.exchange():
            work: Any = dist.all_to_all_single(
                received,
                sent,
                taken,
                given,
                group=self._group,
                async_op=True,
            )

        def wait(_kept: object = sent) -> None:
            with self.peers.exchange():
                work.wait()
            of_places = received.split([place.numel() for place in places])
            for place, numbers in zip(places, of_places, strict=True):
                place.copy_(numbers.view(place.shape))

        return wait

    @property
    def window_bytes(self) -> int:
        """Bytes of the receive buffers on this device."""
        return sum(windows.nbytes for windows in self._windows.values())

    def close(self, *, stuck: bool = False) -> None:
        """Frees the windows, but not on a GPU that is ``stuck``."""
        if stuck:
            keep_for_good([*self._windows.values()])
        self.routes.clear()
        self._windows.clear()
        self._device = None

    def gather(self, tensor: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """``[B, N, C]`` on every rank, from the tokens ``[B, n, C]`` of each."""
        batch, own, channels = tensor.shape
        most = max(tokens)  # all ranks send as much
        with self.watch():
            sent = tensor.new_zeros(most, batch, channels)
            sent[:own] = tensor.transpose(0, 1)
            parts = sent.new_empty(self.ranks, most, batch, channels)
            with self.peers.exchange():
                all_gather_tensor(parts.flatten(), sent.flatten(), group=self._group)
            pieces = [part[:count] for part, count in zip(parts, tokens, strict=True)]
            return torch.cat(pieces).transpose(0, 1)
