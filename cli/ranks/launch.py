"""Starts the processes of `--gpus` by torch.distributed's launcher, and says which one failed."""

from __future__ import annotations

import logging
import sys
import tempfile
import uuid
from pathlib import Path

import typer

from chipsparse.cli.errors import EXIT_FAILED, EXIT_USER_ERROR

OURS = "chipsparse: "


def launch(words: list[str], gpus: int) -> None:
    """Runs ``python -m chipsparse`` with these words in so many processes on this machine.

    The first one's output is this one's; what the others say shows only where one of them fails.

    Raises:
        typer.Exit: with the status of the process that failed first.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="chipsparse-ranks-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=gpus,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # a port that is free
            max_restarts=0,
            monitor_interval=0.2,
            logs_specs=DefaultLogsSpecs(
                log_dir=folder, redirects=dict.fromkeys(range(1, gpus), Std.ALL)
            ),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "chipsparse", *words)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if rank != 0:
                print(f"{OURS}error: rank {rank}: {_said(Path(folder), rank)}", file=sys.stderr)
            ours = failure.exitcode in (EXIT_FAILED, EXIT_USER_ERROR)
            raise typer.Exit(failure.exitcode if ours else EXIT_FAILED) from error


def _said(folder: Path, rank: int) -> str:
    """The last sentence of ours that a process wrote."""
    for file in folder.rglob(f"{rank}/stderr.log"):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in reversed(lines):
            if line.startswith(OURS):
                return line.removeprefix(OURS).removeprefix("error: ")
    return "it ended without a word, as where it is killed"
