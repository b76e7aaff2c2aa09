"""Steps of a transformer as users run it: compiled blocks, one attention backend, timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

# Largest relative error of a dense or refresh step: the model's own rounding, in another order.
DENSE_LIMIT = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-4}
# Passed to ``compile_repeated_blocks``.
COMPILE_OPTIONS: dict[str, Any] = {}


@contextmanager
def attention_backend(transformer: Any, name: str) -> Iterator[None]:
    """Sets diffusers' attention backend of a model; the one of the process is restored."""
    from diffusers.models import attention_dispatch

    with attention_dispatch.attention_backend(name):
        transformer.set_attention_backend(name)
        yield


@contextmanager
def compiled_blocks(transformer: Any) -> Iterator[dict[str, int]]:
    """Compiles the blocks anew; the dictionary has the graphs and graph breaks in the end."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    transformer.compile_repeated_blocks(**COMPILE_OPTIONS)
    found: dict[str, int] = {}
    yield found
    found["graphs"] = counters["stats"]["unique_graphs"]
    found["graph_breaks"] = sum(counters["graph_break"].values())


def run_timed(
    calls: Sequence[Callable[[], torch.Tensor]], device: torch.device
) -> tuple[list[float], list[torch.Tensor]]:
    """One time in ms and one output per call, in order. The host runs ahead of a GPU, as it may."""
    outputs, marks = [], []
    for call in calls:
        marks.append(mark(device))
        outputs.append(call())
        marks.append(mark(device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    times = [milliseconds(*span) for span in zip(marks[::2], marks[1::2], strict=True)]
    return times, outputs


def mark(device: torch.device) -> Any:
    """This moment: on a GPU an event of its stream, which the host does not wait for."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def milliseconds(start: Any, end: Any) -> float:
    """Between two moments of `mark`, which the device has come to."""
    if isinstance(start, float):
        return (end - start) * 1e3
    elapsed: float = start.elapsed_time(end)
    return elapsed
