"""Free memory, read from the files of Linux as they look on machines and in containers."""

import pytest
import torch

from chipsparse.common import machine

MIB = 1 << 20
# Root, names of files and the droppable field of control groups, in version 2 and 1.
V2 = ("", "memory.max", "memory.current", "inactive_file")
OLD_SIZES = {"x": (20 * MIB, 16 * MIB, MIB), "": (2**63 - 4096, 0, 0)}
V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.mark.parametrize(
    ("groups", "names", "sizes", "mib"),
    [
        ("0::/", V2, {}, 50),  # of the machine
        ("0::/", V2, {"": (30 * MIB, 25 * MIB, 4 * MIB)}, 9),  # droppable pages count as free
        # The tightest group above us decides.
        ("0::/user/job", V2, {"user/job": ("max", 1, 0), "user": (8 * MIB, 3 * MIB, 0)}, 5),
        ("0::/docker/1234", V2, {"": (7 * MIB, 8 * MIB, 0)}, 0),  # a path of the host
        ("3:cpu:/x\n2:memory,hugetlb:/x", V1, OLD_SIZES, 5),
    ],
    ids=["machine", "version 2", "groups above", "path of the host", "version 1"],
)
def test_what_a_machine_or_a_container_has_free(tmp_path, groups, names, sizes, mib):
    assert machine.host_free_bytes(tmp_path) is None  # nothing is known without the files
    root, limit, used, droppable = names
    files = {
        "proc/meminfo": "MemTotal: 64 kB\nMemAvailable:   51200 kB\nBuffers: 1 kB\n",
        "proc/self/cgroup": f"{groups}\n",
    }
    for folder, numbers in sizes.items():
        base = f"sys/fs/cgroup/{root}/{folder}"
        files |= {f"{base}/{limit}": f"{numbers[0]}\n", f"{base}/{used}": f"{numbers[1]}\n"}
        files[f"{base}/memory.stat"] = f"anon 5\nfile 9\n{droppable} {numbers[2]}\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine.host_free_bytes(tmp_path) == mib * MIB


def test_the_host_keeps_a_reserve():
    budgets = {0: 0, 512 * MIB: 384 * MIB, 5 << 30: 4 << 30, 100 << 30: 90 << 30}
    assert {free: machine.host_budget(free) for free in budgets} == budgets


def test_what_the_allocator_says(monkeypatch):
    stats = {"allocated_bytes": {"all": {"current": 3, "peak": 7, "freed": 1}, "small_pool": {}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    assert machine.device_allocated_bytes(torch.device("cpu")) is None
    assert machine.device_allocated_bytes(torch.device("cuda:1")) == (3, 7)
    stats.clear()  # as before anything was allocated
    assert machine.device_allocated_bytes(torch.device("cuda:1")) == (0, 0)


@pytest.mark.gpu
def test_the_allocator_of_a_gpu_and_its_cache_which_counts_as_free():
    device = torch.device("cuda")
    held = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    now, peak = machine.device_allocated_bytes(device)
    assert now == torch.cuda.memory_allocated(device) >= held.nbytes
    assert peak == torch.cuda.max_memory_allocated(device)
    before = machine.device_free_bytes(device)
    del held
    assert machine.device_free_bytes(device) >= before + 64 * MIB


@pytest.mark.parametrize(("share", "left"), [(1.0, 70), (0.5, 40), (0.05, -5)])
def test_a_limit_of_the_process_counts(share, left, monkeypatch):
    """100 bytes, of which this process holds 10 and keeps 20, and others have 10."""
    for name, value in {
        "mem_get_info": (60, 100),
        "memory_allocated": 10,
        "memory_reserved": 20,
        "get_per_process_memory_fraction": share,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    assert machine.device_free_bytes(torch.device("cuda", 0)) == left
