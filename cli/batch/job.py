"""The work of `chipsparse batch`: from a file of prompts to a folder, its manifest and its page."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import closing
from typing import TypeVar

import torch
from rich.console import Console

from chipsparse.cli.batch.claims import Claims
from chipsparse.cli.batch.dispatch import Dispatch
from chipsparse.cli.batch.engine import Engine
from chipsparse.cli.batch.entries import Entry, find_entries
from chipsparse.cli.batch.folder import Folder
from chipsparse.cli.batch.live import LiveLine
from chipsparse.cli.batch.processes import Processes
from chipsparse.cli.batch.record import Batch, batch_record
from chipsparse.cli.batch.worker import PipelineWorker
from chipsparse.cli.commands.batch import RAY, BatchOptions
from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.generate.job import WARNING
from chipsparse.cli.model.description import choose_device, choose_dtype, quiet_libraries
from chipsparse.cli.pages.page import batch_page
from chipsparse.cli.progress import ProgressDisplay, silent_display
from chipsparse.cli.ranks import Rank, check_gpus
from chipsparse.cli.request import look_up
from chipsparse.common.finished_files import write_whole

Some = TypeVar("Some")


def run_batch(options: BatchOptions, here: Rank) -> Batch:
    """Checks all lines, then makes the files that are missing.

    Args:
        here: which of the processes of a launcher this is.

    Raises:
        UserError: lines that cannot be made, a model that cannot be loaded, a folder that cannot be
            filled.
    """
    start = time.monotonic()
    with closing(_engine(options, here)) as engine:
        entries = _entries(options, engine, here)
        folder = Folder(options.output)
        folder.note([entry for entry in entries if folder.has(entry)])
        missing = in_turn([entry for entry in entries if not folder.has(entry)], here)
        made: set[str] = set()
        given_up: set[str] = set()
        try:
            if missing:
                _make(options, engine, folder, missing, made, given_up, here)
        finally:  # what was finished of a batch that is broken off
            if any(folder.has(entry) for entry in entries) or given_up:
                seconds = time.monotonic() - start
                batch = batch_record(folder, entries, made, given_up, seconds)
                if here.writes:
                    with user_errors(OSError, what=f"{batch.page} could not be written"):
                        write_whole(batch.page, batch_page(batch, options.prompts))
            else:
                folder.leave()
    return batch


def in_turn(things: Sequence[Some], here: Rank) -> list[Some]:
    """This process's share first, then the others', which it takes over where it is done early."""
    shares = [things[rank :: here.ranks] for rank in range(here.ranks)]
    return [each for share in shares[here.rank :] + shares[: here.rank] for each in share]


def _engine(options: BatchOptions, here: Rank) -> Engine:
    count = options.gpus_per_job
    if count > 1 and here.ranks > 1:
        raise UserError(
            f"--gpus-per-job {count} takes several GPUs of a machine, and a launcher started "
            f"{here.ranks} processes with one each; run the command by itself"
        )
    if options.engine == RAY:
        from chipsparse.cli.batch.ray_actors import RayActors

        return RayActors(options.device, options.workers, PipelineWorker, per_worker=count)
    if count > 1:
        check_gpus(count, choose_device(options.device), option="--gpus-per-job")
    device = choose_device(options.device)
    if device.type == "cuda" and here.ranks > 1:
        device = choose_device(f"cuda:{here.local_rank}")
    devices = [str(device)]
    if device.type == "cuda" and (device.index is None or count > 1):
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return Processes(devices, PipelineWorker, per_worker=count)


def _entries(options: BatchOptions, engine: Engine, here: Rank) -> list[Entry]:
    device = torch.device(engine.device)
    options.check_vram(device)
    dtype = choose_dtype(options.dtype, device)
    with (
        ProgressDisplay() if here.writes else silent_display() as display,
        quiet_libraries(debug=options.debug),
    ):
        model = look_up(options, display)
        entries = find_entries(options, options.lines, model, device, dtype)
        warnings = [text for each in entries for text in each.group.job.warnings]
        if ignored := dict.fromkeys(name for line in options.lines for name in line.ignored):
            warnings.append(f"{options.prompts}: no setting, and ignored: {', '.join(ignored)}")
        for warning in dict.fromkeys(warnings):
            display.tell(WARNING + warning)
        if engine.page:
            display.tell(f"chipsparse: Ray's dashboard is at {engine.page}")
    return entries


def _make(
    options: BatchOptions,
    engine: Engine,
    folder: Folder,
    missing: Sequence[Entry],
    made: set[str],
    given_up: set[str],
    here: Rank,
) -> None:
    workers = min(options.workers or engine.most, len(missing))
    on_cpu = engine.device == "cpu"
    processes = workers * options.gpus_per_job
    with (
        user_errors(OSError, what=f"the folder {folder.path} cannot be used"),
        Claims(folder.path) as claims,
        LiveLine(missing, workers, console=Console(stderr=True, quiet=not here.writes)) as live,
    ):
        Dispatch(engine, folder, claims, live, options.tries, made, given_up).run(
            missing,
            workers=workers,
            options=missing[0].group.options,
            threads=max(1, (os.cpu_count() or 1) // processes) if on_cpu else None,
        )
