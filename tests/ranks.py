"""Runs a function of the tests in several processes of one process group, on CPUs over gloo."""

import importlib
import json
import os
import subprocess
import sys
from collections import namedtuple
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).parents[1]
# How one rank ended: its exit status, what the function returned, and what it wrote.
Ended = namedtuple("Ended", ["status", "result", "text"])
PATIENCE = timedelta(seconds=60)  # with a collective


def run_ranks(ranks, function, *args, folder, seconds=240, check=True):
    """Calls ``module:function(*args)`` on each rank; the arguments and results are JSON.

    The group meets in a file, so that no port is taken. With ``check`` a rank that fails raises.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    words = [sys.executable, "-m", "tests.ranks", str(folder)]
    asked = [str(ranks), function, json.dumps(args)]
    processes = [
        subprocess.Popen([*words, str(rank), *asked], env=environment, cwd=ROOT, **options)
        for rank in range(ranks)
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
    group = {"rank": int(rank), "world_size": int(ranks), "timeout": PATIENCE}
    dist.init_process_group("gloo", f"file://{folder}/store", **group)
    module, name = function.split(":")
    result = getattr(importlib.import_module(module), name)(*json.loads(args))
    (Path(folder) / f"result-{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
