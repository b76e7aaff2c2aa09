"""What the ranks of `test_shared_commands` run: commands, as under torchrun."""

import os
from pathlib import Path

import torch.distributed as dist
from typer.testing import CliRunner

from chipsparse.cli.main import app


def commands(folder, *asked):
    """The exit status of each command on this rank, and what it printed."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    os.chdir(folder)
    told = []
    for words in asked:
        files = set(Path().rglob("*"))
        ran = CliRunner().invoke(app, words)
        dist.barrier()
        made = sorted(map(str, set(Path().rglob("*")) - files))
        told.append({"exit": ran.exit_code, "stdout": ran.stdout, "made": made})
        if ran.exit_code:
            told[-1]["stderr"] = ran.stderr
    return told
