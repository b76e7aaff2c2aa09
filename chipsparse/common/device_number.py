"""A number that a device computes and the host reads later."""

from __future__ import annotations

import torch


class DeviceNumber:
    """A number that a device computes, for the host to read later.

    It is copied to pinned memory right behind the computation. To read it waits for that copy
    alone, and not for what was queued since, as ``item()`` would.

    Args:
        number: tensor of one element.
    """

    def __init__(self, number: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._value: float | None = None
        self._number = number
        if number.device.type == "cuda":
            self._number = torch.empty_like(number, device="cpu", pin_memory=True)
            self._number.copy_(number, non_blocking=True)
            self._copied = torch.cuda.current_stream(number.device).record_event()

    def __float__(self) -> float:
        if self._value is None:
            if self._copied is not None:
                self._copied.synchronize()
            self._value = float(self._number)
            del self._number, self._copied
        return self._value
