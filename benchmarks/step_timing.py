"""Steps of a transformer as users run it: compiled blocks, timed as a whole or part by part."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

PARTS = ("attention", "MLP", "other GEMM", "elementwise", "index work", "idle")
OPS = {
    "chipsparse::self_attention": "attention",
    "chipsparse::feed_forward": "MLP",
    "chipsparse::parallel_feed_forward": "MLP",
}
# Kernels that choose columns and neurons, and that pack, unpack and list what was chosen.
INDEX_WORK = tuple(
    f"_{name}_kernel"
    for name in ("means", "product", "top", "select", "pack", "unpack", "count", "list")
)
PRODUCTS = ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk")
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
    calls: Sequence[Callable[[], torch.Tensor]],
    device: torch.device,
) -> tuple[list[float], list[torch.Tensor]]:
    """One time in ms and one output per call, in order. The host runs ahead of a GPU, as it may."""
    outputs = []
    marks = []
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


def breakdown(call: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Milliseconds of one call on a GPU by part, with ``transfers`` beside them.

    Kernels are told apart by the custom op that launched them, and by their names outside of one.
    """
    torch.cuda.synchronize(device)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as profiler:
        call()
        torch.cuda.synchronize(device)
    parts = dict.fromkeys((*PARTS, "transfers"), 0.0)
    for name, op, nanoseconds in kernels_with_ops(profiler):
        parts[part_of(name, op)] += nanoseconds / 1e6
    return parts


def kernels_with_ops(profiler: Any) -> list[tuple[str, str | None, int]]:
    """Every kernel and copy with the op of ours in which the host launched it, and nanoseconds."""
    events = profiler.profiler.kineto_results.events()
    cpu = torch.autograd.DeviceType.CPU
    on_host = [event for event in events if event.device_type() == cpu]
    ops = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in on_host
        if event.name() in OPS
    )
    starts = [start for start, _, _ in ops]
    launches = {
        event.correlation_id(): event.start_ns()
        for event in on_host
        if event.name().startswith("cu")  # of CUDA's runtime and driver
    }

    def op_of(event: Any) -> str | None:
        launched = launches.get(event.correlation_id(), -1)
        place = bisect.bisect_right(starts, launched) - 1
        return ops[place][2] if place >= 0 and launched <= ops[place][1] else None

    return [
        (event.name(), op_of(event), event.duration_ns())
        for event in events
        if event.device_type() != cpu and not event.is_user_annotation()
    ]


def part_of(kernel: str, op: str | None) -> str:
    """The part that a kernel launched inside an op, or outside of all, belongs to."""
    name = kernel.lower()
    if name.startswith("memcpy") and ("htod" in name or "dtoh" in name):
        return "transfers"
    if op is not None:
        return "index work" if any(word in name for word in INDEX_WORK) else OPS[op]
    if "sdpa" in name or "flash" in name:  # cross-attention
        return "attention"
    return "other GEMM" if any(word in name for word in PRODUCTS) else "elementwise"
