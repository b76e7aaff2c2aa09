"""Records what a call launches on a GPU as a CUDA graph."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

# What PyTorch says where it was asked to tell of waits, and that it was asked.
WAITING = "synchronizing CUDA operation"
ASKED = "ynchronization debug mode"


class CudaRecorder:
    """See `chipsparse.step_graph.Recorder`; on the current device."""

    device_type = "cuda"

    def on(self, device: torch.device) -> torch.cuda.device:
        """See `chipsparse.step_graph.Recorder`: the model may be on another than the first."""
        return torch.cuda.device(device)

    def watch(self, call: Callable[[], Any]) -> tuple[Any, bool]:
        """A call as usual, and whether the host waited in it: while recording, that is an error.

        PyTorch tells of waits in all threads, so one of another thread may count too.
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with _waits_are_told():
                result = call()
        waits = [each for each in caught if WAITING in str(each.message)]
        for each in caught:
            if each not in waits and ASKED not in str(each.message):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        return result, bool(waits)

    def record(self, call: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """A call that computes nothing, and what computes it; other threads may use the device.

        Raises:
            RuntimeError: where CUDA cannot record the call, or has no memory for it.
        """
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        # A stream of its own: PyTorch shares one among all recordings, on the device of the first.
        stream, before = torch.cuda.Stream(), torch.cuda.current_stream()
        recording = torch.cuda.graph(
            graph, pool=pool, stream=stream, capture_error_mode="thread_local"
        )
        try:
            with recording:
                result = call()
        except RuntimeError:
            torch.cuda.set_stream(before)
            _mend(torch.cuda.current_device(), pool)
            raise
        return result, graph.replay


@contextlib.contextmanager
def _waits_are_told() -> Iterator[None]:
    mode = torch.cuda.get_sync_debug_mode()
    if mode != 0:  # somebody else has asked, and is told as they wish
        yield
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _mend(device: int, pool: Any) -> None:
    """Where CUDA breaks a recording off, PyTorch's random generator and allocator go on with it.

    Neither is told to in public; where PyTorch has ended the recording itself, both calls refuse.
    """
    generator = torch.cuda.default_generators[device]
    with contextlib.suppress(AttributeError, RuntimeError):
        generator.graphsafe_set_state(generator.clone_state())
    with contextlib.suppress(AttributeError, RuntimeError):
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
