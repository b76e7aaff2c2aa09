"""Captures what a call launches on a GPU as a CUDA graph."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

_CAPTURING = threading.Lock()  # as PyTorch can capture one call at a time


class CudaCapture:
    """A captured call: `replay` computes it again on the current stream."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph
        self._replayed = torch.cuda.Event()

    def replay(self) -> None:
        """Launch the captured work on the current stream, and mark its end."""
        self._graph.replay()
        self._replayed.record()

    def release(self) -> None:
        """Frees the memory behind the last replay: PyTorch may give it back at once."""
        self._replayed.synchronize()
        self._graph.reset()


class CudaCapturer:
    """The capture of calls on the current device."""

    device_type = "cuda"

    def on(self, device: torch.device) -> torch.cuda.device:
        """Make the device current: the model may be on another than the first."""
        return torch.cuda.device(device)

    def capture(self, call: Callable[[], Any]) -> tuple[Any, CudaCapture]:
        """Make a call that computes nothing: its result, and what computes it.

        Raises `RuntimeError` for a call in which the host waits for the device or random numbers
        are drawn, and `torch.OutOfMemoryError` where there is no memory for it now. Other threads
        may use the device. They may not wait for all of it (``torch.cuda.synchronize``): CUDA
        refuses that, and breaks the capture off.
        """
        with _CAPTURING, _own_workspaces():
            graph = torch.cuda.CUDAGraph()
            pool = torch.cuda.graph_pool_handle()
            # A stream of its own: PyTorch shares one among all captures, on the first device.
            stream = torch.cuda.Stream()
            before = torch.cuda.current_stream()
            capturing = torch.cuda.graph(
                graph,
                pool=pool,
                stream=stream,
                capture_error_mode="thread_local",
            )
            cause: BaseException | None = None
            try:
                with capturing:
                    _release_random_numbers(before)
                    try:
                        result = call()
                    except BaseException as error:
                        cause = error
                        raise
            except BaseException as error:
                torch.cuda.set_stream(before)
                _end_allocation(torch.cuda.current_device(), pool)
                if cause is not None and cause is not error:
                    raise cause from None  # PyTorch tells how the capture ended, not why
                raise
            return result, CudaCapture(graph)


# What PyTorch does not offer in public. Each does nothing where a release has no such function.


@contextlib.contextmanager
def _own_workspaces() -> Iterator[None]:
    """Lets products that are captured make their workspaces in the memory of the capture.

    PyTorch keeps one for each stream, for good. A capture must not use one from elsewhere, which
    may be freed before it, nor leave one behind.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
    clear()
    try:
        yield
    finally:
        clear()


def _release_random_numbers(stream: torch.cuda.Stream) -> None:
    """Lets other threads draw from the device's default generator while a capture goes on.

    PyTorch gives the generator's state to the capture; the generator goes on with a copy. The
    stream must not be the one that is captured, on which PyTorch refuses to copy.
    """
    generator = torch.cuda.default_generators[stream.device_index]
    with contextlib.suppress(AttributeError), torch.cuda.stream(stream):
        generator.graphsafe_set_state(generator.clone_state())


def _end_allocation(device: int, pool: tuple[int, int]) -> None:
    """Takes the allocator out of a broken capture's memory pool, where PyTorch has not done so."""
    with contextlib.suppress(AttributeError, RuntimeError):
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
