"""The names of the machine and its devices, and their free memory."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path("/")


def device_name(device: torch.device) -> str:
    """Return the name of a device that results quote; that of a CPU with its cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = _lines(ROOT / "proc/cpuinfo")
    models = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    model = models[0] if models else platform.processor() or platform.machine()
    return f"{model}, {core_count()} cores"


def core_count() -> int:
    """Return the cores of the CPU that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def busy_text() -> str | None:
    """Return how busy other programs keep the CPU, in words; None where half of it is idle.

    To be asked before this process computes: the load average of the last minute has it, too.
    """
    if not hasattr(os, "getloadavg"):  # as on Windows
        return None
    load = os.getloadavg()[0]
    cores = core_count()
    if 2 * load <= cores:
        return None
    return f"a load of {load:.1f} on {cores} cores: times differ from an idle machine's"


def package_version(package: str) -> str | None:
    """Return the version of an installed package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def with_index(device: torch.device) -> torch.device:
    """Return the device by the name that tensors on it have."""
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def device_free_bytes(device: torch.device) -> int:
    """Return the bytes that PyTorch can still allocate on a GPU, its own cache included.

    No more than its limit leaves, where `torch.cuda.set_per_process_memory_fraction` has set one.
    """
    device = with_index(device)
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    limit = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free + torch.cuda.memory_reserved(device), limit) - allocated


def device_allocated_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return the bytes that PyTorch has allocated on a GPU now, and the most since the last reset.

    None where the device is not CUDA. Does not wait for the device.
    """
    if device.type != "cuda":
        return None
    # One look; `memory_allocated` and its like each flatten and sort all that the allocator counts.
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    total = stats.get("allocated_bytes", {}).get("all", {})
    return total.get("current", 0), total.get("peak", 0)


def is_stuck(device: torch.device, *, seconds: float = 30) -> bool:
    """Return True where a GPU's current work does not come to its end in time, or cannot."""
    if device.type != "cuda":
        return False
    end = time.monotonic() + seconds
    try:
        last = torch.cuda.current_stream(device).record_event()
        while not last.query() and time.monotonic() < end:
            time.sleep(0.01)
        return not last.query()
    except RuntimeError:  # an error of before, which CUDA never forgets
        return True


def keep_for_good(thing: object) -> None:
    """Never frees what a GPU that is stuck may use: that would wait for the GPU."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def host_free_bytes(root: Path = ROOT) -> int | None:
    """Return the least that the machine and all control groups above us have free of host memory.

    It is in bytes; None where the system does not tell. ``proc`` and ``sys`` are in ``root``.
    """
    free = _free_in_groups(root)
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):  # free memory, and what the kernel can drop at once
            free.append(int(line.split()[1]) * 1024)
    return min(free, default=None)


def host_budget(free: int) -> int:
    """Return the free host memory that caches may take unless a budget says otherwise.

    A tenth is left to the system and the process itself, or 1 GiB, but never more than a quarter.
    """
    reserve = max(1 << 30, round(free * 0.1))
    return free - min(reserve, round(free * 0.25))


def _free_in_groups(root: Path) -> list[int]:
    """Return the memory that each control group, version 1 or 2, leaves under its limit."""
    free = []
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base = root / "sys/fs/cgroup"
            limit = "memory.max"
            used = "memory.current"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            limit = "memory.limit_in_bytes"
            used = "memory.usage_in_bytes"
        else:
            continue
        # In a container the path may be the host's; its own limit then stands at the base.
        here = base / path.strip("/")
        for folder in [here, *here.parents] if here.is_dir() else [base]:
            with suppress(OSError, ValueError):  # without such a file, or where the limit is "max"
                left = int((folder / limit).read_text()) - int((folder / used).read_text())
                # Pages of files count as used, but are given up for anything else.
                stat = dict(line.split() for line in _lines(folder / "memory.stat"))
                pages = stat.get("total_inactive_file") or stat.get("inactive_file") or 0
                free.append(max(0, left + int(pages)))
            if folder == base:
                break
    return free


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
