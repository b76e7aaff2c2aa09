"""Memory that the processes of a group write to, where their GPUs reach each other's."""

from __future__ import annotations

import os
from typing import Any

import torch

from chipsparse.parallel.peers import Peers

TIMEOUT_MS = 600_000  # of a process that waits for another on the GPU, as NCCL's


class Windows:
    """A buffer of every process of a group; all of them make it at the same call.

    Each has its own. Those of the others are there as tensors where ``reached``.
    """

    def __init__(self, group: Any, nbytes: int, device: torch.device, *, reached: bool) -> None:
        self.nbytes, self.device = nbytes, device
        self._handle: Any = None
        if reached:
            symmetric_memory = _symmetric_memory()
            buffer = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
            self._handle = symmetric_memory.rendezvous(buffer, group)
        else:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._own = buffer

    def of(self, rank: int, numbers: int, dtype: torch.dtype) -> torch.Tensor:
        """The first numbers of a rank's buffer ``[n]``; where it is out of reach, of this one's."""
        if self._handle is None:
            return self._own[: numbers * dtype.itemsize].view(dtype)
        window: torch.Tensor = self._handle.get_buffer(rank, (numbers,), dtype)
        return window

    def meet(self) -> None:
        """Lets the current stream wait until all processes have come so far in theirs."""
        self._handle.barrier(timeout_ms=TIMEOUT_MS)


def gpus_reach(group: Any, peers: Peers, device: torch.device) -> bool:
    """Whether the GPUs of all processes of a group write to each other's memory; they agree."""
    own = None
    if device.type == "cuda" and torch.version.hip is None and _symmetric_memory() is not None:
        own = torch.cuda.current_device() if device.index is None else device.index
    found = peers.gather(own)  # equal ones are of other hosts, or seen by other numbers
    able = own is not None and len(set(found)) == len(found) == peers.on_this_host
    able = able and os.environ.get("NCCL_P2P_DISABLE", "0") == "0"  # or known to fail here
    able = able and all(
        other is not None
        and other < torch.cuda.device_count()
        and (other == own or torch.cuda.can_device_access_peer(own, other))
        for other in found
    )
    if not peers.least(int(able))[0]:
        return False
    try:
        Windows(group, 1024, device, reached=True)
    except RuntimeError:  # a container may forbid it
        able = False
    return bool(peers.least(int(able))[0])


def _symmetric_memory() -> Any:
    """PyTorch's module, of which only `Windows` and its tests know; None where there is none."""
    try:
        from torch.distributed import _symmetric_memory
    except ImportError:
        return None
    return _symmetric_memory
