"""Host memory for caches: whole pages, pinned where a GPU copies from them, kept for reuse.

PyTorch's own pinned allocator rounds every request up to a power of two, so 60 GiB would take 64 or
128. Here pages are mapped as they are needed and registered with CUDA afterwards.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from chipsparse.common.byte_sizes import format_bytes
from chipsparse.common.machine import keep_for_good

WASTE = 1.25  # what is free on a GPU varies a little, and with it what goes to the host
PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU


@dataclass(eq=False)
class HostBlock:
    """A piece of host memory, given back to the system when nobody holds it any more."""

    memory: torch.Tensor  # uint8 [n]
    unpin: weakref.finalize[..., HostBlock] | None = None
    pinned: bool = False  # a GPU copies from and to it at full speed, without the host's help


class HostMemory:
    """Blocks of host memory, acquired and released; shared by the experts of one pipeline.

    A block that comes back is kept for the next request that it serves without much waste, so that
    a second generation allocates nothing. A request that none serves frees what is spare first.
    """

    def __init__(self) -> None:
        self._in_use: list[HostBlock] = []
        self._spare: list[HostBlock] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, spare ones included."""
        return sum(block.memory.numel() for block in (*self._in_use, *self._spare))

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the pinned blocks, spare ones included."""
        return sum(block.memory.numel() for block in (*self._in_use, *self._spare) if block.pinned)

    @property
    def lent_bytes(self) -> int:
        """Bytes of the blocks in use."""
        return sum(block.memory.numel() for block in self._in_use)

    @property
    def untouched_bytes(self) -> int:
        """The most bytes in use that are mapped, but do not count as used in the system yet."""
        return sum(block.memory.numel() for block in self._in_use if not block.pinned)

    def acquire(self, nbytes: int, *, pin: bool, notify: Callable[[str], None]) -> HostBlock:
        """Return a block of ``nbytes``, or up to `WASTE` times as many; `MemoryError` without."""
        fitting = [b for b in self._spare if nbytes <= b.memory.numel() <= WASTE * nbytes]
        block = min(fitting, key=lambda block: block.memory.numel(), default=None)
        if block is None:
            self.free_spare()
            block = HostBlock(_map(nbytes))
        else:
            self._spare.remove(block)
        self._in_use.append(block)
        if pin and not block.pinned:
            self._pin(block, notify)
        return block

    def release(self, block: HostBlock) -> None:
        """Keeps a block for the next request. No copy from or to it may be under way."""
        self._in_use.remove(block)
        self._spare.append(block)

    def free_spare(self) -> None:
        """Give spare blocks back to the system."""
        self._spare.clear()

    def leave(self) -> None:
        """Gives up all blocks, and never frees them."""
        for block in (*self._in_use, *self._spare):
            if block.unpin is not None:
                block.unpin.detach()
            keep_for_good(block)
        self._in_use.clear()
        self._spare.clear()

    def _pin(self, block: HostBlock, notify: Callable[[str], None]) -> None:
        try:
            _register(block.memory)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            notify(
                f"{format_bytes(block.memory.numel())} of host memory for caches could not be "
                f"pinned ({reason}): copies to the GPU are slower and hold up the host",
            )
        else:
            # Holds the memory, so that its pages are unmapped after they were unpinned, not before.
            block.unpin = weakref.finalize(block, _unregister, block.memory)
            block.pinned = True


def _map(nbytes: int) -> torch.Tensor:
    flags = {}
    if hasattr(mmap, "MAP_PRIVATE"):  # shared pages, the default, are never huge ones
        flags["flags"] = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        pages = mmap.mmap(-1, nbytes, **flags)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{format_bytes(nbytes)} of host memory: {error}") from error
    with contextlib.suppress(AttributeError, OSError):  # not on every system
        pages.madvise(mmap.MADV_DONTFORK)  # or a child would get copies, and we, unpinned, too
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to fault in and to register
    with torch.inference_mode(False):  # generations in and out of that mode use it in turn
        return torch.frombuffer(pages, dtype=torch.uint8)


def _register(memory: torch.Tensor) -> None:
    cudart = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), PORTABLE))
    if code != 0:
        # CUDA would report this failure once more, to the next kernel launch: let that be ours.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise RuntimeError(f"CUDA error {code}")


def _unregister(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
