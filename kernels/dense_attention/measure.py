"""Which of several library kernels is fastest, measured once per kind of tensors."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping

import torch

WARM_UPS = 2
RUNS = 3
# A kernel gives way to one that takes less than this share of its time, and no kernel does that is
# too short to measure: another process, on a busier machine, should pick the same.
CLEARLY_LESS = 0.85
SHORTEST_MEASURED_MS = 0.1

Launch = Callable[[], object]


def cuda_milliseconds(run: Launch, device: torch.device) -> float:
    """Median time of a launch on the device's current stream, by events; the host waits for it."""
    with torch.cuda.device(device):
        for _ in range(WARM_UPS):
            run()
        times = []
        for _ in range(RUNS):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return statistics.median(times)


class FastestKernel:
    """Measures kernels on the tensors themselves and remembers the ``times`` of every kind of them.

    Tensors are of one kind if devices, dtypes, shapes and strides are the same. Whoever runs many
    steps owns one (`chipsparse.sparse.session.SparseSession` does), so that all of them use the
    same kernel: two kernels differ in rounding. So that another instance picks the same, near ties
    go to the one that comes first.
    """

    def __init__(
        self,
        milliseconds: Callable[[Launch, torch.device], float] = cuda_milliseconds,
    ) -> None:
        self.times: dict[Hashable, dict[str, float]] = {}  # milliseconds, by kind and kernel
        self._milliseconds = milliseconds

    def pick(self, kernels: Mapping[str, Launch], *tensors: torch.Tensor) -> str:
        """The name of the fastest kernel for these tensors; the first one of about as fast ones.

        Kernels are launches by name, at least one, in order of preference. Where nothing was
        measured yet and nothing may be, as a CUDA graph is being captured, it is the first one.
        """
        device = tensors[0].device
        kind = tuple((t.device, t.dtype, tuple(t.shape), t.stride()) for t in tensors)
        if kind not in self.times:
            if len(kernels) == 1 or _must_not_wait(device):
                return next(iter(kernels))
            self.times[kind] = {
                name: self._milliseconds(run, device) for name, run in kernels.items()
            }
        times = {name: self.times[kind].get(name, float("inf")) for name in kernels}
        picked = next(iter(kernels))
        if times[picked] < SHORTEST_MEASURED_MS:
            return picked
        for name, time in times.items():
            if time < CLEARLY_LESS * times[picked]:
                picked = name
        return picked


def _must_not_wait(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
