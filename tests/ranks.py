"""Runs a function of the tests in several processes of one process group, on CPUs over gloo."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COLLECTIVE_SECONDS = 60


@dataclass(frozen=True)
class Ended:
    """How one rank ended: its exit status, what the function returned, and what it wrote."""

    status: int
    result: Any
    text: str


def run_ranks(ranks, function, *args, folder, seconds=240, check=True):
    """Calls ``module:function(*args)`` on each rank; the arguments and results are JSON.

    The group meets in a file, so that no port is taken. With ``check`` a rank that fails raises.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    commands = [
        [sys.executable, "-m", "tests.ranks", str(folder), str(rank), str(ranks), function]
        for rank in range(ranks)
    ]
    processes = [
        subprocess.Popen(
            [*command, json.dumps(args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        for command in commands
    ]
    ended = []
    try:
        for rank, process in enumerate(processes):
            text, _ = process.communicate(timeout=seconds)
            file = folder / f"result-{rank}.json"
            result = json.loads(file.read_text()) if file.exists() else None
            ended.append(Ended(process.returncode, result, text))
    finally:
        for process in processes:
            process.kill()
    if check:
        for rank, each in enumerate(ended):
            assert each.status == 0, f"rank {rank}: {each.text}"
    return ended


def main():
    import torch
    import torch.distributed as dist

    folder, rank, ranks, function, args = sys.argv[1:]
    torch.set_num_threads(1)
    # diffusers 0.42 divides by the number of accelerators.
    if torch.accelerator.device_count() == 0:
        torch.accelerator.device_count = lambda: 1
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=int(rank),
        world_size=int(ranks),
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )
    module, name = function.split(":")
    result = getattr(importlib.import_module(module), name)(*json.loads(args))
    (Path(folder) / f"result-{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
