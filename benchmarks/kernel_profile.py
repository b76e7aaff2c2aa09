"""The kernels of one call by the time they take, as PyTorch's profiler sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

SHOWN = 25


def kernel_table(call: Callable[[], Any], device: torch.device, *, shown: int = SHOWN) -> str:
    """A Markdown table of the kernels that take most time, and what all of them take together.

    On a CPU, which has no kernels, the table is of PyTorch's operations.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    if on_gpu:
        torch.cuda.synchronize(device)
    with profile(activities=activities) as profiler:
        call()
        if on_gpu:
            torch.cuda.synchronize(device)
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    events = [  # a range that compiled code marks spans kernels that are listed by themselves
        event
        for event in profiler.key_averages()
        if event.device_type == kind and not event.is_user_annotation
    ]
    rows = [(_milliseconds(event, on_gpu), event.count, event.key) for event in events]
    rows.sort(reverse=True)
    total = sum(row[0] for row in rows)
    listed = [*rows[:shown]]
    if rows[shown:]:
        others = sum(row[0] for row in rows[shown:]), sum(row[1] for row in rows[shown:])
        listed.append((*others, f"{len(rows) - shown} others"))
    listed.append((total, sum(row[1] for row in rows), "all"))
    lines = ["| ms | share | launches | kernel |", "| --- | --- | --- | --- |"]
    for milliseconds, count, name in listed:
        share = milliseconds / total if total else 0.0
        lines.append(f"| {milliseconds:.3f} | {share:.1%} | {count} | {_short(name)} |")
    return "\n".join(lines)


def _milliseconds(event: Any, on_gpu: bool) -> float:
    microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
    return float(microseconds) / 1e3


def _short(name: str, length: int = 100) -> str:
    """The name as one cell; C++ templates are long, and their ends tell less than their starts."""
    name = name.replace("|", "/")
    return name if len(name) <= length else name[: length - 3] + "..."
