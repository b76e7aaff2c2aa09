"""The work of `chipsparse batch`: from a file of prompts to a folder, its manifest and its page."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing

import torch
import typer

from chipsparse.cli.batch import record
from chipsparse.cli.batch.entries import Entry, Maker, find_entries
from chipsparse.cli.batch.options import MANIFEST, PAGE, THUMBNAILS, BatchOptions
from chipsparse.cli.batch.record import BatchClip, State
from chipsparse.cli.errors import EXIT_FAILED
from chipsparse.cli.generate.record import ROW_PROMPT
from chipsparse.cli.media.write import write_text
from chipsparse.cli.model.description import choose_device
from chipsparse.cli.progress import clock_text, duration
from chipsparse.cli.request import place_on, quiet_display
from chipsparse.cli.views.page import page
from chipsparse.cli.views.terminal import print_result
from chipsparse.cli.views.units import shortened
from chipsparse.common import stopping
from chipsparse.common.files import Write, check_inputs_stay


def run(options: BatchOptions) -> None:
    """Check all lines, make the files that are missing, and tell."""
    start, folder = time.monotonic(), options.output
    states: dict[str, State] = {}
    with quiet_display(debug=options.debug) as display, ExitStack() as stack:
        actors = None
        if options.on_ray:
            from chipsparse.cli.batch.ray_actors import RayActors

            actors = stack.enter_context(closing(RayActors(options)))
        device = choose_device(options.device) if actors is None else actors.device
        here = device.type == "cpu" or torch.cuda.is_available()
        place = place_on(device, options, display, here=here)
        entries = find_entries(options, place, display)
        todo = [entry for entry in entries if not (folder / entry.name).is_file()]
        small = [Write("--output", entry.thumbnail(folder)) for entry in todo]
        check_inputs_stay(small, options.reads())
        if actors is not None:
            clips = actors.make(todo, display)
        else:
            maker = stack.enter_context(closing(Maker(display)))
            clips = (maker.tried(entry, folder, options.tries) for entry in todo)
        begun = time.monotonic()
        try:
            for done, clip in enumerate(clips if todo else (), start=1):
                elapsed = time.monotonic() - begun
                clock = clock_text(elapsed, elapsed / done * (len(todo) - done))
                display.tell(f"chipsparse: {_outcome(clip)} ({done} of {len(todo)}, {clock})")
                states[clip.file] = clip.state
                folder.mkdir(exist_ok=True)
                now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                record.note(folder, clip.model_copy(update={"time": now}))
        finally:  # what was finished of a batch that is broken off
            stopping.settle()
            if folder.is_dir():
                known = record.read_manifest(folder)
                result = record.BatchResult(
                    folder=str(folder),
                    manifest=str(folder / MANIFEST),
                    page=str(folder / PAGE),
                    model=place.model.location,
                    seconds=time.monotonic() - start,
                    clips=[_clip(entry, known.get(entry.name), states) for entry in entries],
                )
                text = page([(options.prompts, result)], images="'self' file:")
                write_text("--output", folder / PAGE, text)
    print_result(result, as_json=options.json)
    if result.counts["failed"]:
        raise typer.Exit(EXIT_FAILED)


def _outcome(clip: BatchClip) -> str:
    if clip.seconds is not None:
        prompt = shortened(clip.request.prompt, ROW_PROMPT)
        return f"{clip.file} in {duration(clip.seconds)}: {prompt}"
    often = f" (tried {clip.tries} times)" if clip.tries != 1 else ""
    return f"error: line {clip.lines[0]}, seed {clip.request.seed}: {clip.error}{often}"


def _clip(entry: Entry, known: BatchClip | None, states: dict[str, State]) -> BatchClip:
    """Return what became of a file; one that the manifest does not know is noted."""
    there = (entry.folder / entry.name).is_file()
    state = states.get(entry.name, "already there" if there else "missing")
    if known is None or known.state != ("made" if there else state):
        known = entry.clip("made" if there else state)
        if there:
            record.note(entry.folder, known)
    small = entry.thumbnail(entry.folder)
    shown = f"{THUMBNAILS}/{small.name}" if there and small.is_file() else None
    return known.model_copy(update={"state": state, "lines": entry.lines, "thumbnail": shown})
