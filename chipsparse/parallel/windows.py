"""Memory that the processes of a group write to, where their GPUs reach each other's."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from chipsparse.parallel.peers import Peers

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _SymmetricMemory

# A GPU that waits so long for another gives up, as NCCL does; its process can then only end.
TIMEOUT_MS = 600_000
# Of a pair of GPUs, in CUDA's driver: one reads and writes the other's memory, and counts there.
ACCESS = 2
ATOMICS = 3
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"  # nothing here needs it, and it may hang


class Windows:
    """A buffer of every process of a group; all of them make it at the same call.

    Each has its own. Those of the others are there as tensors where they are ``reached``. Raises
    `RuntimeError` on all processes where one has no room.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peers: Peers,
        nbytes: int,
        device: torch.device,
        *,
        reached: bool,
    ) -> None:
        self.nbytes = nbytes
        self._handle: Any = None
        if not reached:
            self._own = torch.empty(nbytes, dtype=torch.uint8, device=device)
            return
        memory = _symmetric_memory()
        assert memory is not None  # where it is missing, no GPU reaches another one
        error = None
        try:
            # Not as `empty` does, which may take it from a pool: then it is of different sizes.
            self._own = memory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
        except RuntimeError as failure:
            error = failure
        if not peers.least(int(error is None))[0]:
            raise error or RuntimeError(f"another process has no {nbytes:,} bytes to exchange in")
        before = os.environ.get(NO_MULTICAST, "0")
        os.environ[NO_MULTICAST] = "1"
        try:
            self._handle = memory.rendezvous(self._own, group.group_name)
        finally:
            os.environ[NO_MULTICAST] = before

    def of(self, rank: int, numbers: int, dtype: torch.dtype) -> torch.Tensor:
        """The first numbers of a rank's buffer ``[n]``; where it is out of reach, of this one's."""
        if self._handle is None:
            return self._own[: numbers * dtype.itemsize].view(dtype)
        window: torch.Tensor = self._handle.get_buffer(rank, (numbers,), dtype)
        return window

    def meet(self) -> None:
        """Lets the current stream wait until all processes have come so far in theirs."""
        self._handle.barrier(timeout_ms=TIMEOUT_MS)


def gpus_reach(group: dist.ProcessGroup, peers: Peers, device: torch.device) -> bool:
    """Return True where all GPUs of a group write to each other's memory; processes agree."""
    own = _number(device)
    numbers: list[Any] = peers.gather(own)
    # Processes of other hosts, or of one GPU each that all call 0, have equal numbers.
    here = None not in numbers and len(set(numbers)) == len(numbers) == peers.on_this_host
    able = own is not None and here
    able = able and all(number == own or _reaches(own, number) for number in numbers)
    if not peers.least(int(able))[0]:
        return False
    try:
        Windows(group, peers, 1024, device, reached=True)
    except RuntimeError:  # a container may forbid it
        able = False
    return bool(peers.least(int(able))[0])


def _number(device: torch.device) -> int | None:
    """The GPU's, where PyTorch can share its memory and nobody forbids it."""
    if device.type != "cuda" or os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return None
    memory = _symmetric_memory()
    if memory is None or memory.get_backend(device) != "CUDA":
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def _reaches(own: int | None, other: int) -> bool:
    if other >= torch.cuda.device_count():
        return False
    value = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        ask = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute
        answers = [
            (ask(ctypes.byref(value), what, own, other), value.value) for what in (ACCESS, ATOMICS)
        ]
        return answers == [(0, 1), (0, 1)]
    return False


def _symmetric_memory() -> type[_SymmetricMemory] | None:
    """PyTorch's class of such memory; None where it has none."""
    try:
        from torch._C._distributed_c10d import _SymmetricMemory
    except ImportError:
        return None
    return _SymmetricMemory
