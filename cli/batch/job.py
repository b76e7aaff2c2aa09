"""The work of `chipsparse batch`: from a file of prompts to a folder, its manifest and its page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial

import torch
import typer

from chipsparse.cli.batch import record
from chipsparse.cli.batch.entries import Entry, Maker, find_entries
from chipsparse.cli.batch.options import PAGE, THUMBNAILS, BatchOptions
from chipsparse.cli.batch.record import BatchClip, BatchResult, State
from chipsparse.cli.batch.scores import Score, load_score
from chipsparse.cli.errors import EXIT_FAILED
from chipsparse.cli.generate.record import ROW_PROMPT
from chipsparse.cli.generate.repeat import MANIFEST
from chipsparse.cli.media.read import read_clip
from chipsparse.cli.media.write import write_text
from chipsparse.cli.model.description import choose_device
from chipsparse.cli.progress import ProgressDisplay, clock_text, duration
from chipsparse.cli.request import place_on, quiet_display
from chipsparse.cli.views.page import page
from chipsparse.cli.views.terminal import print_result
from chipsparse.cli.views.units import counted, shortened
from chipsparse.common import stopping
from chipsparse.common.files import Write, check_inputs_stay


def run(options: BatchOptions) -> None:
    """Check all lines, make the files that are missing, and tell."""
    start = time.monotonic()
    with quiet_display(debug=options.debug) as display, ExitStack() as stack:
        actors = None
        if options.on_ray:
            from chipsparse.cli.batch.ray_actors import RayActors

            actors = stack.enter_context(closing(RayActors(options)))
        device = choose_device(options.device) if actors is None else actors.device
        here = device.type == "cpu" or torch.cuda.is_available()
        place = place_on(device, options, display, here=here)
        jobs = find_entries(options, place, display)
        chosen = jobs.chosen(options.finish_keys, options.output)
        work = _Work(options, display)
        work.check([*jobs.entries, *jobs.finishes])
        score = None if options.best is None else _load_score(options.best, display)
        if actors is not None:
            work.make_with = partial(actors.make, display=display)
        else:
            maker = stack.enter_context(closing(Maker(display)))
            work.make_with = partial(maker.each, folder=options.output, tries=options.tries)
        # `--finish` alone makes no drafts: some may have been deleted.
        only_finishes = options.drafting and options.drafts is None
        try:
            work.make(chosen if only_finishes else [*jobs.entries, *chosen])
            if score is not None:
                chosen = jobs.best(work.scores(jobs.entries, score))
                work.make(chosen)
        finally:  # what was finished of a batch that is broken off
            stopping.settle()
            if options.output.is_dir():
                shown = jobs.shown(chosen, missing=not only_finishes)
                result = work.result(shown, place.model.location, start)
                text = page([(options.prompts, result)], images="'self' file:")
                write_text("--output", options.output / PAGE, text)
    print_result(result, as_json=options.json)
    if result.counts["failed"]:
        raise typer.Exit(EXIT_FAILED)


def _load_score(name: str, display: ProgressDisplay) -> Score:
    with display.stage(f"loading the score {name}"):
        return load_score(name)


class _Work:
    """The files that one run of the command makes, and what becomes of each."""

    make_with: Callable[[list[Entry]], Iterator[BatchClip]]

    def __init__(self, options: BatchOptions, display: ProgressDisplay) -> None:
        self._options = options
        self._folder = options.output
        self._display = display
        self._states: dict[str, State] = {}

    def check(self, entries: Sequence[Entry]) -> None:
        """Raise `UserError` where the thumbnail of a new file would replace what is read."""
        missing = [entry for entry in entries if not entry.is_there]
        small = [Write("--output", entry.thumbnail(self._folder)) for entry in missing]
        check_inputs_stay(small, self._options.reads())

    def make(self, entries: Sequence[Entry]) -> None:
        """Make the files that are missing, and note each in the manifest."""
        todo = [entry for entry in entries if not entry.is_there]
        begun = time.monotonic()
        for done, clip in enumerate(self.make_with(todo) if todo else (), start=1):
            elapsed = time.monotonic() - begun
            clock = clock_text(elapsed, elapsed / done * (len(todo) - done))
            self._display.tell(f"chipsparse: {_outcome(clip)} ({done} of {len(todo)}, {clock})")
            self._states[clip.file] = clip.state
            self._folder.mkdir(exist_ok=True)
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            record.note(self._folder, clip.model_copy(update={"time": now}))

    def scores(self, drafts: Sequence[Entry], score: Score) -> dict[str, float]:
        """Return the scores of the drafts that are there, by name, and note new ones.

        Every draft is read from its file: so the score does not depend on where it was made.
        """
        known = record.read_manifest(self._folder)
        scores: dict[str, float] = {}
        there = [entry for entry in drafts if entry.is_there]
        with self._display.stage(f"scoring {counted(len(there), 'draft')}"):
            for entry in there:
                clip = known.get(entry.name) or entry.clip("made")
                before = clip.score if clip.scored_by == score.name else None
                value = before
                if value is None or not score.is_fixed:
                    file = self._folder / entry.name
                    value = score.of(read_clip(file).frames, entry.prompt, file)
                scores[entry.name] = value
                if value != before:
                    scored = {"score": value, "scored_by": score.name}
                    record.note(self._folder, clip.model_copy(update=scored))
        return scores

    def result(self, entries: Sequence[Entry], model: str, start: float) -> BatchResult:
        """Return what became of all files; ``start`` is when the command began."""
        known = record.read_manifest(self._folder)
        return BatchResult(
            folder=str(self._folder),
            manifest=str(self._folder / MANIFEST),
            page=str(self._folder / PAGE),
            model=model,
            seconds=time.monotonic() - start,
            clips=[_clip(entry, known.get(entry.name), self._states) for entry in entries],
            finish_command=self._options.finish_words if self._options.drafting else (),
        )


def _outcome(clip: BatchClip) -> str:
    if clip.seconds is not None:
        prompt = shortened(clip.request.prompt, ROW_PROMPT)
        return f"{clip.file} in {duration(clip.seconds)}: {prompt}"
    often = f" (tried {clip.tries} times)" if clip.tries != 1 else ""
    return f"error: line {clip.lines[0]}, seed {clip.request.seed}: {clip.error}{often}"


def _clip(entry: Entry, known: BatchClip | None, states: dict[str, State]) -> BatchClip:
    """Return what became of a file; one that the manifest does not know is noted."""
    there = entry.is_there
    state = states.get(entry.name, "already there" if there else "missing")
    stage = {"stage": entry.stage, "draft": entry.draft}
    if known is None or known.state != ("made" if there else state):
        known = entry.clip("made" if there else state)
        if there:
            record.note(entry.folder, known)
    elif there and entry.stage is not None and known.stage != entry.stage:
        # Made by a batch without drafts; `--finish` looks for drafts in the manifest.
        record.note(entry.folder, known.model_copy(update=stage))
    small = entry.thumbnail(entry.folder)
    shown = f"{THUMBNAILS}/{small.name}" if there and small.is_file() else None
    now = {"state": state, "lines": entry.lines, "thumbnail": shown}
    return known.model_copy(update={**now, **stage})
