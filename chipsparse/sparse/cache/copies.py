"""Copies between a device and host memory, during the computation: streams and events.

A `Mark` is a point in the work of a device. Copies start after marks and end with one; the
computation waits for marks. On a CPU everything is done when it is asked for, and marks are None.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

Mark = Any  # a torch.cuda.Event, or None where there is nothing to wait for


class HostCopies:
    """Copies on a CPU: at once. Host memory and slots are uint8 ``[n]``."""

    def to_device(self, device: torch.Tensor, host: torch.Tensor, after: Iterable[Mark]) -> Mark:
        """Copy from host memory to a slot after these marks; return the mark at its end."""
        device.copy_(host)

    def to_host(self, host: torch.Tensor, device: torch.Tensor, after: Iterable[Mark]) -> Mark:
        """Copy from a slot to host memory after these marks; return the mark at its end."""
        host.copy_(device)

    def mark(self) -> Mark:
        """Return a mark of all that is queued on the device by now."""
        return None

    def wait(self, marks: Iterable[Mark]) -> None:
        """Nothing that is queued from now on starts before these marks; the host goes on."""

    def synchronize(self) -> None:
        """Lets the host wait until every copy is done."""


class StreamCopies(HostCopies):
    """Copies on a GPU, asynchronous where host memory is pinned: a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in = torch.cuda.Stream(device)
        self._out = torch.cuda.Stream(device)

    def to_device(self, device: torch.Tensor, host: torch.Tensor, after: Iterable[Mark]) -> Mark:
        """Queue the copy on the stream to the device; the host goes on if `host` is pinned."""
        return self._copy(self._in, device, host, after)

    def to_host(self, host: torch.Tensor, device: torch.Tensor, after: Iterable[Mark]) -> Mark:
        """Queue the copy on the stream to the host; the host goes on if `host` is pinned."""
        return self._copy(self._out, host, device, after)

    def mark(self) -> Mark:
        """Return an event on the current stream, where the model computes."""
        return torch.cuda.current_stream(self._device).record_event()

    def wait(self, marks: Iterable[Mark]) -> None:
        """Let the current stream wait for these marks; the host does not wait."""
        self._order(torch.cuda.current_stream(self._device), marks)

    def synchronize(self) -> None:
        """Let the host wait until both streams are done."""
        self._in.synchronize()
        self._out.synchronize()

    def _copy(
        self,
        stream: torch.cuda.Stream,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Iterable[Mark],
    ) -> Mark:
        self._order(stream, after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    @staticmethod
    def _order(stream: torch.cuda.Stream, marks: Iterable[Mark]) -> None:
        for mark in marks:
            if mark is not None:
                stream.wait_event(mark)


def copies_for(device: torch.device) -> HostCopies:
    """The copies of a device."""
    return StreamCopies(device) if device.type == "cuda" else HostCopies()
