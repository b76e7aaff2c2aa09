"""The work of `chipsparse batch`: from a file of prompts to a folder, its manifest and its page."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import typer

from chipsparse.cli.batch.entries import Entry, find_entries
from chipsparse.cli.batch.maker import Maker, Outcome, tried
from chipsparse.cli.batch.options import BatchOptions
from chipsparse.cli.batch.record import (
    MANIFEST,
    PAGE,
    BatchClip,
    BatchResult,
    State,
    note,
    read_manifest,
)
from chipsparse.cli.errors import EXIT_FAILED, results_alone
from chipsparse.cli.generate.record import ROW_PROMPT
from chipsparse.cli.media.write import written_whole
from chipsparse.cli.model.description import choose_device, choose_dtype, quiet_libraries
from chipsparse.cli.progress import ProgressDisplay, clock_text, duration
from chipsparse.cli.request import look_up
from chipsparse.cli.views.page import page
from chipsparse.cli.views.terminal import print_result
from chipsparse.cli.views.units import shortened


def run(options: BatchOptions) -> None:
    """Check all lines, make the files that are missing, and tell."""
    start, folder = time.monotonic(), options.output
    states: dict[str, State] = {}
    with (
        results_alone(),
        quiet_libraries(debug=options.debug),
        ProgressDisplay() as display,
        ExitStack() as stack,
    ):
        actors = None
        if options.on_ray:
            from chipsparse.cli.batch.ray_actors import RayActors

            actors = stack.enter_context(RayActors(options))
        device = choose_device(options.device) if actors is None else actors.device
        options.check_vram(device)
        dtype, model = choose_dtype(options.dtype, device), look_up(options, display)
        entries = find_entries(options, model, device, dtype, display)
        todo = [entry for entry in entries if not (folder / entry.name).is_file()]
        try:
            if todo and actors is not None:
                _fill(folder, todo, actors.make(todo, display), states, display, actors.count)
            elif todo:
                maker = stack.enter_context(Maker(display))
                outcomes = (tried(maker, entry, folder, options.tries) for entry in todo)
                _fill(folder, todo, outcomes, states, display)
        finally:  # what was finished of a batch that is broken off
            if folder.is_dir():
                known = read_manifest(folder)
                result = BatchResult(
                    folder=str(folder),
                    manifest=str(folder / MANIFEST),
                    page=str(folder / PAGE),
                    model=model.location,
                    seconds=time.monotonic() - start,
                    clips=[
                        _clip(folder, entry, known.get(entry.name), states) for entry in entries
                    ],
                )
                with written_whole("--output", folder / PAGE) as file:
                    text = page([(options.prompts, result)], images="'self' file:")
                    file.write_text(text, encoding="utf-8", errors="replace")
    print_result(result, as_json=options.json)
    if result.counts["failed"]:
        raise typer.Exit(EXIT_FAILED)


def _fill(
    folder: Path,
    entries: Sequence[Entry],
    outcomes: Iterable[Outcome],
    states: dict[str, State],
    display: ProgressDisplay,
    workers: int = 1,
) -> None:
    """Note and tell what becomes of each file; ``states`` gets it, by the files' names."""
    start, seconds = time.monotonic(), []
    for done, (entry, made, tries) in enumerate(outcomes, start=1):
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        if isinstance(made, str):
            clip = entry.clip(folder, "failed", error=made, tries=tries, time=when)
            often = f" (tried {tries} times)" if tries > 1 else ""
            display.tell(f"chipsparse: error: {entry.item(folder).label}: {made}{often}")
        else:
            result = {"seconds": made.seconds, "remarks": made.remarks, "tries": tries}
            clip = entry.clip(folder, "made", made.warnings, time=when, **result)
            seconds.append(made.seconds)
            left = statistics.fmean(seconds) * (len(entries) - done) / workers
            clock = clock_text(time.monotonic() - start, left)
            prompt = shortened(entry.prompt, ROW_PROMPT)
            took = f"{done} of {len(entries)}: {entry.name} in {duration(made.seconds)}"
            display.tell(f"chipsparse: {took}: {prompt} ({clock})")
        states[entry.name] = clip.state
        folder.mkdir(exist_ok=True)
        note(folder, clip)


def _clip(
    folder: Path, entry: Entry, known: BatchClip | None, states: dict[str, State]
) -> BatchClip:
    """Return what became of a file; one that the manifest does not know is noted."""
    there = (folder / entry.name).is_file()
    state = states.get(entry.name, "already there" if there else "missing")
    if known is None or state == "missing" or (known.state == "made") != there:
        known = entry.clip(folder, "made" if there else state)
        if there:
            note(folder, known)
    small = entry.thumbnail(folder)
    shown = small.relative_to(folder).as_posix() if there and small.is_file() else None
    return known.model_copy(update={"state": state, "lines": entry.lines, "thumbnail": shown})
