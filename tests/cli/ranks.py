"""The commands that the processes of `test_ranks` run, as under torchrun."""

import os
from pathlib import Path

import torch.distributed as dist
from typer.testing import CliRunner

from chipsparse.cli.main import app


def commands(folder, *asked):
    """The exit status of each command on this rank, and what it printed.

    The word ``RANK`` stands for the rank's number.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    os.chdir(folder)
    ends = []
    for words in asked:
        files = set(Path().rglob("*"))
        ran = CliRunner().invoke(app, [str(rank) if word == "RANK" else word for word in words])
        dist.barrier()
        made = sorted(map(str, set(Path().rglob("*")) - files))
        stderr = [line for line in ran.stderr.splitlines() if line.startswith("chipsparse: error")]
        ends.append({"exit": ran.exit_code, "stdout": ran.stdout, "stderr": stderr, "made": made})
    return ends
