"""The time of a call: CUDA events on a GPU, the wall clock elsewhere.

Calls repeat on the same tensors, baselines and candidates alike, so what fits in the last-level
cache stays in it. The tensors of large layers exceed the 50 to 60 MB of today's largest GPU caches,
so nothing is rotated; a smaller shape measures a warm cache, as a layer that has just written its
inputs finds it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from chipsparse.kernels.dense_attention import dense_attention
from chipsparse.kernels.dense_attention.measure import FastestKernel
from chipsparse.sparse.cost_model.layer_times import Rates
from chipsparse.sparse.graphs.cuda_capture import CudaCapture, CudaCapturer

REPEATS = 10
LONG_MS = 100.0
LONG_REPEATS = 3
# Below this a launch from Python may take as long as the kernel.
SHORT_MS = 1.0
# Long enough for the clocks of a GPU to rise, and for a replay to hide its own start.
WARM_UP_MS = 50.0
REPLAY_MS = 2.0
MOST_LAUNCHES = 100

# What rates are measured on: sides of square matrices and tokens of attention, heads, bytes.
SIDE = 8192
HEADS = 8
HEAD_DIM = 128
COPIED = 256 << 20

Call = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """The median time of one call."""

    latency_ms: float
    method: str  # "events", "graph" or "clock"


def time_call(call: Call, device: torch.device) -> Timing:
    """Times a call by the median of at least 10, of 3 where it takes more than 100 ms.

    On CUDA a call under 1 ms is timed as replays of a graph of several launches, since otherwise
    the launch would be timed. Where it cannot be captured (the host waits for the device in it),
    that wait is part of it, and events time it.
    """
    call()  # compiles, tunes, allocates
    if device.type != "cuda":
        repeats = _repeats(_clock_ms(call))
        return Timing(statistics.median(_clock_ms(call) for _ in range(repeats)), "clock")
    with torch.cuda.device(device):
        first_ms = _events_ms(call, 1)[0]
        warm_up = min(MOST_LAUNCHES, ceil(WARM_UP_MS / max(first_ms, 1e-3)))
        estimate_ms = statistics.median(_events_ms(call, warm_up))
        if estimate_ms < SHORT_MS:
            launches = min(MOST_LAUNCHES, ceil(REPLAY_MS / max(estimate_ms, 1e-3)))
            graph = _captured(call, launches)
            if graph is not None:
                _events_ms(graph.replay, 2)
                replays = _events_ms(graph.replay, REPEATS)
                return Timing(statistics.median(replays) / launches, "graph")
        times = _events_ms(call, _repeats(estimate_ms))
        return Timing(statistics.median(times), "events")


def measure_rates(device: torch.device) -> Rates:
    """The rates of PyTorch's attention, linears and copies in bfloat16 on a GPU that is here."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    def seconds(run: Call) -> float:
        return time_call(run, device).latency_ms / 1e3

    with torch.inference_mode():
        left, right = random(2, SIDE, SIDE)
        linear = 2.0 * SIDE**3 / seconds(lambda: left @ right)
        query, key, value = random(3, 1, HEADS, SIDE, HEAD_DIM)
        kernels = FastestKernel()
        operations = 4.0 * SIDE**2 * HEADS * HEAD_DIM
        attention = operations / seconds(
            lambda: dense_attention(query, key, value, kernels=kernels, backend="library"),
        )
        source, target = torch.zeros(2, COPIED, dtype=torch.uint8, device=device)
        memory = 2.0 * COPIED / seconds(lambda: target.copy_(source))
        host = torch.zeros(COPIED, dtype=torch.uint8).pin_memory()
        link = COPIED / seconds(lambda: target.copy_(host, non_blocking=True))
    return Rates(
        device=torch.cuda.get_device_name(device),
        measured=True,
        attention=attention,
        linear=linear,
        memory=memory,
        link=link,
    )


def _repeats(milliseconds: float) -> int:
    return LONG_REPEATS if milliseconds > LONG_MS else REPEATS


def _clock_ms(call: Call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _events_ms(call: Call, repeats: int) -> list[float]:
    """One time per call. The host runs ahead, so that launches do not leave gaps."""
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def _captured(call: Call, launches: int) -> CudaCapture | None:
    """A graph of several calls, or None where the call cannot be captured."""
    try:
        return CudaCapturer().capture(lambda: [call() for _ in range(launches)])[1]
    except RuntimeError:
        torch.cuda.synchronize()
        return None
