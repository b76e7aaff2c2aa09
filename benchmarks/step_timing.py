"""Steps of a transformer as users run it: compiled blocks, timed as a whole or part by part."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# Largest relative error of a dense or refresh step: the model's own rounding, in another order.
DENSE_LIMIT = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-4}
PARTS = ("attention", "MLP", "other GEMM", "elementwise", "index work", "idle")
OPS = {
    "chipsparse::self_attention": "attention",
    "chipsparse::feed_forward": "MLP",
    "chipsparse::fp8_feed_forward": "MLP",
    "chipsparse::parallel_feed_forward": "MLP",
    "chipsparse::fp8_parallel_feed_forward": "MLP",
}
# Kernels that choose columns and neurons, and that pack, unpack and list what was chosen.
INDEX_WORK = tuple(
    f"_{name}_kernel"
    for name in ("means", "product", "top", "select", "draw", "pack", "unpack", "count", "list")
)
PRODUCTS = ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk", "aten::mm", "aten::addmm")
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


def breakdown(call: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Milliseconds of one call by part, with ``transfers`` beside them, and ``all``.

    Kernels are told apart by the custom op that launched them, and by their names outside of one.
    On a CPU the time of each operation itself counts in place of kernels.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    if on_gpu:
        torch.cuda.synchronize(device)
    with profile(activities=activities, acc_events=True) as profiler:
        call()
        if on_gpu:
            torch.cuda.synchronize(device)
    parts = dict.fromkeys((*PARTS, "transfers"), 0.0)
    spans = kernel_spans(profiler) if on_gpu else operation_spans(profiler)
    for name, op, _, microseconds in spans:
        parts[part_of(name, op)] += microseconds / 1e3
    first = min((start for _, _, start, _ in spans), default=0.0)
    last = max((start + length for _, _, start, length in spans), default=0.0)
    parts["all"] = (last - first) / 1e3
    parts["idle"] = max(0.0, parts["all"] - sum(parts[part] for part in PARTS))
    return parts


Span = tuple[str, str | None, float, float]  # name, op around it, begin and length in us


def kernel_spans(profiler: Any) -> list[Span]:
    """Every kernel and copy once, with the op of ours in which the host launched it."""
    events, cpu = profiler.profiler.kineto_results.events(), torch.autograd.DeviceType.CPU
    on_host = [event for event in events if event.device_type() == cpu]
    ops = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in on_host
        if event.name() in OPS
    )
    launches = {
        event.correlation_id(): event.start_ns()
        for event in on_host
        if event.name().startswith(("cuda", "cu"))
    }
    starts = [start for start, _, _ in ops]

    def op_of(event: Any) -> str | None:
        launched = launches.get(event.correlation_id(), -1)
        place = bisect.bisect_right(starts, launched) - 1
        return ops[place][2] if place >= 0 and launched <= ops[place][1] else None

    return [
        (event.name(), op_of(event), event.start_ns() / 1e3, event.duration_ns() / 1e3)
        for event in events
        if event.device_type() != cpu and not event.is_user_annotation()
    ]


def operation_spans(profiler: Any) -> list[Span]:
    """PyTorch's operations with the time of each itself, where there are no kernels."""
    spans = []
    for event in profiler.events():
        op, around = None, event
        while around is not None:  # the outermost of our ops
            op, around = around.name if around.name in OPS else op, around.cpu_parent
        spans.append((event.name, op, event.time_range.start, event.self_cpu_time_total))
    return spans


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
