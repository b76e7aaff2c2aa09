"""What the machine is called, and how much memory it and its devices have to give."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from chipsparse.common.byte_sizes import parse_bytes

# Left to the system and to what the process itself still asks for: a share of what is free, at
# least so much, but not most of what a small machine has.
HOST_RESERVE_SHARE, HOST_RESERVE_MOST_SHARE = 0.1, 0.25
HOST_RESERVE_LEAST = parse_bytes("1G")

ROOT = Path("/")


def device_name(device: torch.device) -> str:
    """The marketing name of a device, as results quote it; of a CPU with its cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cpu_model()}, {cores} cores"


def package_version(package: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def with_index(device: torch.device) -> torch.device:
    """The device as tensors on it name it."""
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def device_free_bytes(device: torch.device) -> int:
    """Bytes that PyTorch can still allocate on a GPU; what it holds in its own cache included.

    No more than its limit leaves, where `torch.cuda.set_per_process_memory_fraction` has set one.
    """
    device = with_index(device)
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    limit = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free + torch.cuda.memory_reserved(device), limit) - allocated


def device_allocated_bytes(device: torch.device) -> tuple[int, int] | None:
    """Bytes that PyTorch has allocated on a GPU now, and the most at a time since its last reset.

    None where the device is not CUDA. Does not wait for the device.
    """
    if device.type != "cuda":
        return None
    # One look; `memory_allocated` and its like each flatten and sort all that the allocator counts.
    found = torch.cuda.memory_stats_as_nested_dict(device)
    total = found.get("allocated_bytes", {}).get("all", {})
    return total.get("current", 0), total.get("peak", 0)


def host_free_bytes(root: Path = ROOT) -> int | None:
    """Bytes of host memory that the machine and every control group above us have free.

    Args:
        root: where ``proc`` and ``sys`` are.

    Returns:
        The least of them; None where the system does not tell.
    """
    known = [_available(root), *_group_rooms(root)]
    return min((room for room in known if room is not None), default=None)


def host_budget(free: int) -> int:
    """What of the free host memory caches may take unless a budget says otherwise."""
    reserve = max(HOST_RESERVE_LEAST, round(free * HOST_RESERVE_SHARE))
    return free - min(reserve, round(free * HOST_RESERVE_MOST_SHARE))


def _available(root: Path) -> int | None:
    """``MemAvailable``: free memory and what the kernel can drop at once."""
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _group_rooms(root: Path) -> list[int]:
    """What the control groups of this process, version 1 and 2, leave under their limits."""
    rooms = []
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # In a container the path may be the host's; its own limit then stands at the base.
        here = base / path.strip("/")
        folders = [here, *here.parents] if here.is_dir() else [base]
        for folder in folders:
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None and used is not None:
                rooms.append(max(0, limit - used + _droppable(folder)))
            if folder == base:
                break
    return rooms


def _droppable(folder: Path) -> int:
    """Bytes of file pages that count as used, but are given up for anything else."""
    for line in _lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    """The number in a file; None where there is none, as for ``max``."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def cpu_model() -> str:
    """The marketing name of this machine's processor."""
    lines = _lines(ROOT / "proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()
