"""The work of `chipsparse batch`: from a file of prompts to a folder, its manifest and its page."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import closing

import torch

from chipsparse.cli.batch.claims import Claims
from chipsparse.cli.batch.dispatch import Dispatch
from chipsparse.cli.batch.engine import Engine
from chipsparse.cli.batch.entries import Entry, find_entries
from chipsparse.cli.batch.folder import Folder
from chipsparse.cli.batch.launched import Place
from chipsparse.cli.batch.live import LiveLine
from chipsparse.cli.batch.processes import Processes
from chipsparse.cli.batch.record import Batch, batch_record
from chipsparse.cli.batch.worker import PipelineWorker
from chipsparse.cli.commands.batch import RAY, BatchOptions
from chipsparse.cli.errors import user_errors
from chipsparse.cli.generate.job import WARNING
from chipsparse.cli.model.description import choose_device, choose_dtype, quiet_libraries
from chipsparse.cli.pages.batch_page import batch_page
from chipsparse.cli.planning.request import look_up
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.common.finished_files import write_whole


def run_batch(options: BatchOptions, here: Place) -> Batch:
    """Checks all lines, then makes the files that are missing.

    Args:
        options: what the user typed.
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
        missing = here.in_turn([entry for entry in entries if not folder.has(entry)])
        made: set[str] = set()
        given_up: set[str] = set()
        try:
            if missing:
                _make(options, engine, folder, missing, made, given_up, here)
        finally:  # what was finished of a batch that is broken off
            if any(folder.has(entry) for entry in entries) or given_up:
                seconds = time.monotonic() - start
                batch = batch_record(folder, entries, made, given_up, seconds)
                if here.tells:
                    with user_errors(OSError, what=f"{batch.page} could not be written"):
                        write_whole(batch.page, batch_page(batch, options.prompts))
            else:
                folder.leave()
    return batch


def _engine(options: BatchOptions, here: Place) -> Engine:
    if options.engine == RAY:
        from chipsparse.cli.batch.ray_actors import RayActors

        return RayActors(options.device, options.workers, PipelineWorker)
    device = choose_device(options.device)
    if device.type == "cuda" and here.count > 1:
        device = choose_device(f"cuda:{here.local_rank}")
    if device.type == "cuda" and device.index is None:
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        return Processes(devices, PipelineWorker)
    return Processes([str(device)], PipelineWorker)


def _entries(options: BatchOptions, engine: Engine, here: Place) -> list[Entry]:
    device = torch.device(engine.device)
    options.check_vram(device)
    dtype = choose_dtype(options.dtype, device)
    with ProgressDisplay(here.console()) as display, quiet_libraries(debug=options.debug):
        model = look_up(options, display)
        entries = find_entries(options, options.check_lines(), model, device, dtype)
        told = [each for entry in entries for each in entry.group.job.warnings]
        for warning in dict.fromkeys(told):
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
    here: Place,
) -> None:
    workers = min(options.workers or engine.most, len(missing))
    on_cpu = engine.device == "cpu"
    with (
        user_errors(OSError, what=f"the folder {folder.path} cannot be used"),
        Claims(folder.path) as claims,
        LiveLine(missing, workers, console=here.console()) as live,
    ):
        Dispatch(engine, folder, claims, live, options.tries, made, given_up).run(
            missing,
            workers=workers,
            options=missing[0].group.options,
            threads=max(1, (os.cpu_count() or 1) // workers) if on_cpu else None,
        )
