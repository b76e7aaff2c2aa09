"""Where the time of one transformer call goes: attention, MLP, other products, the rest.

Kernels are told apart by the custom op that launched them, and by their names outside of one.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

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
COPIES = ("memcpy",)
SHOWN, NAME_LENGTH = 24, 120


def breakdown(
    call: Callable[[], Any], device: torch.device
) -> tuple[dict[str, float], list[list[Any]]]:
    """Where the time of one call goes.

    On a CPU the time of each operation itself counts in place of kernels.

    Returns:
        Milliseconds by part, ``transfers`` (copies, beside the rest) and ``all``; and the kernels
        that take most time, each as [part, milliseconds, launches, name].
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    if on_gpu:
        torch.cuda.synchronize(device)
    with profile(activities=activities, acc_events=True) as profiler:
        call()
        if on_gpu:
            torch.cuda.synchronize(device)
    found = dict.fromkeys((*PARTS, "transfers"), 0.0)
    kernels: dict[tuple[str, str], list[float]] = {}
    spans = kernel_spans(profiler) if on_gpu else operation_spans(profiler)
    for name, op, _, microseconds in spans:
        part = part_of(name, op)
        found[part] += microseconds / 1e3
        kernels.setdefault((part, name), []).append(microseconds / 1e3)
    first = min((start for _, _, start, _ in spans), default=0.0)
    last = max((start + length for _, _, start, length in spans), default=0.0)
    found["all"] = (last - first) / 1e3
    found["idle"] = max(0.0, found["all"] - sum(found[part] for part in PARTS))
    longest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:SHOWN]
    rows = [
        [part, round(sum(times), 3), len(times), name[:NAME_LENGTH]]
        for (part, name), times in longest
    ]
    return found, rows


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
    if name.startswith(COPIES) and ("htod" in name or "dtoh" in name):
        return "transfers"
    if op is not None:
        return "index work" if any(word in name for word in INDEX_WORK) else OPS[op]
    if "sdpa" in name or "flash" in name:  # cross-attention
        return "attention"
    return "other GEMM" if any(word in name for word in PRODUCTS) else "elementwise"
