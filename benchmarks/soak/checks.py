"""What a generation may leave behind in the process, and whether it did."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import random
import signal
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from diffusers.models import attention_dispatch
from torch._subclasses.fake_tensor import is_fake

from chipsparse.kernels.dispatch import Backend
from chipsparse.pipelines import bridge


@dataclass(frozen=True)
class ProcessState:
    """The state of the process that users rely on, by name.

    Attributes:
        facts: printable values that can be compared.
    """

    facts: dict[str, Any]

    @classmethod
    def now(cls, device: torch.device) -> ProcessState:
        """As it is now."""
        gc.collect()  # patched models that are garbage are not alive
        facts: dict[str, Any] = {
            "threads": sorted(
                thread.name for thread in threading.enumerate() if not _belongs_to_torch(thread)
            ),
            "warning filters": list(warnings.filters),
            "showwarning": warnings.showwarning,
            "random state of torch": hash(torch.get_rng_state().numpy().tobytes()),
            "random state of Python": hash(random.getstate()),
            "random state of numpy": hash(repr(np.random.get_state())),
            "default dtype": torch.get_default_dtype(),
            "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
            "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
            "autocast dtypes": [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")],
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "precision of products": torch.get_float32_matmul_precision(),
            "dispatch modes": torch._C._len_torch_dispatch_stack(),
            "compiler stance": torch._dynamo.eval_frame._stance.stance,
            "attention backend of diffusers": str(
                attention_dispatch._AttentionBackendRegistry._active_backend
            ),
            "launch of kernels": type(vars(Backend)["launch"]).__name__,
            "patched models": len(bridge._runners),
            "open files": _open_files(),
            "temporary files": sorted(path.name for path in _temporary_files()),
            "working folder": os.getcwd(),
            "environment": dict(os.environ),
            "signal handlers": [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)],
            "exception hook": sys.excepthook,
            "trace": (sys.gettrace(), sys.getprofile()),
        }
        if device.type == "cuda":
            facts |= {
                "random state of the device": hash(
                    torch.cuda.get_rng_state(device).numpy().tobytes()
                ),
                "synchronization debug mode": torch.cuda.get_sync_debug_mode(),
                "stream": str(torch.cuda.current_stream(device)),
                "current device": torch.cuda.current_device(),
                "capturing": torch.cuda.is_current_stream_capturing(),
            }
        return cls(facts)

    def changes(self, after: ProcessState) -> list[str]:
        """What is other later, one sentence each."""
        return [
            f"{name}: {_short(value)} before, {_short(after.facts.get(name))} after"
            for name, value in self.facts.items()
            if after.facts.get(name) != value
        ]


# To look at all objects of the process takes a while.
RUNS_PER_FULL_COLLECTION = 8


# Bytes that PyTorch keeps for itself: a constant that an operation makes when it first runs, the
# number that a recording was about to read when it broke off for that. A tensor of Python's shows
# anyway, and all other memory of ours is larger.
MOST_LOOSE = 1 << 10
MOST_LOOSE_IN_ALL = 8 << 10


class Memory:
    """What is allocated, to see what stays.

    Objects that are alive when it is made count as there for good.

    Args:
        device: of the pipelines.

    Attributes:
        loose_bytes: what PyTorch kept for itself, by where it is.
        resident_bytes: of the process, after each run.
        reserved_bytes: what PyTorch's allocator holds of the GPU, after each run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.unfreeze()  # what another one froze is not among the collector's objects
        # Of diffusers' functions that remember tensors, and the modules that made them.
        self._remembering = [
            each
            for each in gc.get_objects()
            if type(each) is functools._lru_cache_wrapper
            and str(getattr(each, "__module__", "")).startswith("diffusers")
        ]
        self.loose_bytes: dict[str, int] = {}
        self.resident_bytes: list[int] = []
        self.reserved_bytes: list[int] = []
        self._repeats: dict[str, list[int]] = {}
        self.settle()

    def settle(self) -> None:
        """Counts all that is alive now as there for good."""
        if len(self.resident_bytes) % RUNS_PER_FULL_COLLECTION == 0:
            gc.unfreeze()  # what was frozen in an earlier run may be garbage by now
        self._collect()
        gc.freeze()
        self._device_bytes = self._on_device()

    def left(self, known: Iterable[Any] = ()) -> list[str]:
        """What has come since and stays; it is then counted as there for good.

        Args:
            known: what may stay.
        """
        self._collect()
        known = {id(each) for each in known}
        tensors = [each for each in _new_tensors() if id(each) not in known]
        device_bytes, found = self._on_device(), []
        if tensors:
            kinds = Counter(f"{each.dtype} {list(each.shape)}" for each in tensors)
            listed = ", ".join(f"{count} of {kind}" for kind, count in kinds.most_common(8))
            found.append(f"{len(tensors)} tensors stay alive: {listed}")
        for name, count in device_bytes.items():
            more = count - self._device_bytes[name]
            if more > MOST_LOOSE:
                found.append(f"{name}: {more} bytes more than before")
            elif more > 0:
                self.loose_bytes[name] = self.loose_bytes.get(name, 0) + more
        self.resident_bytes.append(resident_bytes())
        if self._device.type == "cuda":
            self.reserved_bytes.append(torch.cuda.memory_reserved(self._device))
        del tensors
        self.settle()
        return found

    def repeated(self) -> None:
        """Notes that the last run was the one before it once more."""
        for name, sizes in self._series().items():
            self._repeats.setdefault(name, []).append(sizes[-1] - sizes[-2])

    def growth(self) -> list[str]:
        """What grows with each run, one sentence each: by the median over the repeated ones.

        The first run of a kind also grows what is loaded, compiled or remembered once.
        """
        loose = [
            f"{name}: {count} bytes more than before, bit by bit"
            for name, count in self.loose_bytes.items()
            if count > MOST_LOOSE_IN_ALL
        ]
        return loose + [
            f"{name} grows by {grown / 1024:.0f} KiB with each run"
            for name, sizes in self._repeats.items()
            if (grown := median(sizes)) > MOST_GROWTH and len(sizes) >= FEWEST_REPEATS
        ]

    def _series(self) -> dict[str, list[int]]:
        series = {"resident memory": self.resident_bytes}
        if self._device.type == "cuda":
            series["memory reserved on the GPU"] = self.reserved_bytes
        return series

    def _collect(self) -> None:
        for each in self._remembering:
            each.cache_clear()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            torch._C._host_emptyCache()

    def _on_device(self) -> dict[str, int]:
        if self._device.type != "cuda":
            return {}
        return {
            "allocated on the GPU": torch.cuda.memory_allocated(self._device),
            "pinned on the host": torch.cuda.host_memory_stats()["allocated_bytes.current"],
        }


def _new_tensors() -> list[torch.Tensor]:
    """Those made since the last `gc.freeze`, but for those with which the compiler thinks."""
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return [each for each in found if not is_fake(each)]


# A run that is repeated leaves some tens of KiB more or less; caches of a tiny model are larger.
MOST_GROWTH = 64 << 10
FEWEST_REPEATS = 5


def resident_bytes() -> int:
    """Of this process, what it has freed left out; 0 where the system does not tell."""
    with contextlib.suppress(OSError, AttributeError):  # of other systems than Linux
        ctypes.CDLL(None).malloc_trim(0)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _open_files() -> list[str]:
    folder = Path("/proc/self/fd")
    found = []
    for each in folder.iterdir() if folder.is_dir() else ():
        try:
            found.append(os.readlink(each))
        except OSError:  # the one that lists the folder
            continue
    return sorted(name for name in found if name.startswith("/") and not name.endswith("/fd"))


def _temporary_files() -> list[Path]:
    return [each for each in Path(tempfile.gettempdir()).iterdir() if "chipsparse" in each.name]


def _belongs_to_torch(thread: threading.Thread) -> bool:
    return thread.name.startswith(("Thread-inductor", "QueueFeeder"))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:200] + "..."
