"""The work behind the page: one pipeline makes clips, shown step by step, until Stop."""

from __future__ import annotations

import dataclasses
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jinja2 import Template
from PIL import Image
from rich.console import Console

from chipsparse.cli.errors import described
from chipsparse.cli.generate.job import KeptPipeline, prompt_warnings, record_of
from chipsparse.cli.generate.record import published_text
from chipsparse.cli.media.write import generation_metadata, write_media
from chipsparse.cli.model.description import choose_device
from chipsparse.cli.options import GenerateOptions, GenerationOptions, Item, read_options
from chipsparse.cli.profiles import write_profile
from chipsparse.cli.progress import ProgressDisplay, silent_display
from chipsparse.cli.request import Request, place_on, resolve
from chipsparse.cli.studio.options import StudioOptions
from chipsparse.cli.studio.preview import Preview
from chipsparse.cli.views import units
from chipsparse.cli.views.frames import image_uri
from chipsparse.cli.views.names import name_of
from chipsparse.cli.views.page import STRICT
from chipsparse.experiments.clips import Generation
from chipsparse.experiments.progress import StepDone
from chipsparse.experiments.quality import compare_clips
from chipsparse.experiments.records import ClipQuality

Way = Literal["dense", "sparse"]
LETTERS = {"dense": "D", "refresh": "R", "sparse": "S", "skip": "\N{EN DASH}"}
WAITING = "waiting for the generation of another page"
STOPPED = "the dense run was stopped, so there is nothing to compare with"
KEPT = "The dense run is that of before: it does not depend on the quality."


class Stopped(BaseException):
    """Someone pressed Stop. No `Exception`: nothing went wrong."""


@dataclass
class Run:
    """One denoising loop: the planned action of each step, as far as known, and those done."""

    way: Way
    planned: list[str]
    actions: list[str] = field(default_factory=list)


class Live(ProgressDisplay):
    """One generation for the page: what goes on, what came of it, and the wish to stop it."""

    picture: Callable[[torch.Tensor | None, int], np.ndarray | None]  # makes the preview of a step
    profile: Path  # for ``--config``

    def __init__(self, error: str = "") -> None:
        super().__init__(Console(quiet=True, force_terminal=False))
        self.doing, self.clock, self.error = "", "", error
        self.runs: list[Run] = []
        self.preview: np.ndarray | None = None  # of the latents, uint8 ``[T, H, W, 3]``
        self.made: dict[Way, Generation] = {}  # the dense one perhaps before
        self.clips: dict[Way, Path] = {}
        self.quality: ClipQuality | None = None
        self.notes: list[str] = []
        self.command: list[str] = []  # that makes the same
        # Without clips it ended in an error, or was stopped.
        self.ended = self.stopped = False
        self.unwanted = False  # another page asked to stop it, which counts if its own one is gone

    @property
    def worst_frame(self) -> int:
        """The frame in which sparse is furthest from dense; 0 where there is no dense one."""
        return 0 if self.quality is None else int(np.argmin(self.quality.psnrs))

    def html(self) -> str:
        """Return what the page shows: the row of steps, the preview, and the result."""
        source = Path(__file__).with_name("studio.html").read_text(encoding="utf-8")
        template = Template(source, **STRICT)
        preview = self.preview  # which another thread may change
        frames = () if preview is None else map(Image.fromarray, preview)
        pictures = [image_uri(frame, "png") for frame in frames]
        return template.render(live=self, pictures=pictures, letters=LETTERS, units=units)

    def check(self) -> None:
        if self.stopped:
            raise Stopped

    def show(self, doing: str = "", clock: str = "", preview: np.ndarray | None = None) -> None:
        self.clock, self.preview, self.doing = clock, preview, doing

    @contextmanager
    def stage(self, text: str) -> Iterator[None]:
        self.check()
        self.show(text)
        yield
        self.check()

    @contextmanager
    def denoising(self, title: str, steps: int, *, plain_lines: int = 0) -> Iterator[StepDone]:
        def done(step: int, action: str, latents: torch.Tensor | None) -> None:
            shown(step, action, latents)
            self.runs[-1].actions.append(action)
            doing = "decoding" if step + 1 >= steps else f"step {step + 2} of {steps}"
            self.show(f"{title}: {doing}", self.clock_text(), self.picture(latents, step))
            self.check()

        loop = super().denoising(title, steps, plain_lines=0)
        with self.stage(f"{title}: step 1 of {steps}"), loop as shown:
            yield done


class Studio:
    """Makes what pages ask for in a folder; raises `UserError` where the device is not here.

    A page is one tab of a browser, by the name of its session. It replaces and stops what it began
    itself, and what a page began that is gone; other generations it waits for.
    """

    def __init__(self, options: StudioOptions, folder: Path) -> None:
        self.options = options
        self._folder = folder
        self.live = Live()  # the latest of all
        self.live.ended = True  # before the first one it is as if one had
        self._lives: dict[str, Live] = {}  # the latest of each page
        self._left: list[Live] = []  # those of pages that are gone
        self._lock = threading.Lock()
        self._device = choose_device(options.device)
        # All that touches the pipeline is done by one thread.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="studio")
        self._kept, self._preview = KeptPipeline(), Preview()
        self._dense: dict[Any, Generation] = {}  # the last one, by all that it depends on

    def close(self) -> None:
        with self._lock:
            for live in (*self._lives.values(), *self._left):
                live.stopped = True
        self._worker.submit(self._kept.close)
        self._worker.shutdown()

    def resolve(self, chosen: dict[str, Any]) -> Request:
        """Return the request of options of `generate` that replace the command's."""
        names = [field.name for field in dataclasses.fields(GenerationOptions)]
        typed = {name: getattr(self.options, name) for name in names}
        file = self._folder / "sparse.png"
        options = read_options(GenerateOptions, {**typed, "prompt": "", **chosen, "output": file})
        place = place_on(self._device, options, silent_display())
        if place.model.accepts("num_frames"):
            file = file.with_suffix(".mp4")
            options = dataclasses.replace(options, output=file, fps=self.options.fps)
        return resolve(options, place)

    def start(self, chosen: dict[str, Any], page: str = "") -> Live:
        """Begin a generation of a page, in place of its own one that still runs."""
        live = Live()
        with self._lock:
            self._stop_own(page)
            others = [other for owner, other in self._lives.items() if owner != page]
            waits = any(not (other.ended or other.stopped) for other in others)
            self._lives[page] = self.live = live
            live.show(WAITING if waits else "starting")
            self._worker.submit(self._work, chosen, live)
        return live

    def stop(self, page: str = "") -> None:
        """Stop what a page began and what is left of pages that are gone, at the end of a step."""
        with self._lock:
            self._stop_own(page)
            # A page that was loaded anew may ask before the server knows that the old one is gone.
            if page not in self._lives:
                self.live.unwanted = True

    def _stop_own(self, page: str) -> None:
        own = self._lives.get(page)
        for live in (*self._left, *([] if own is None else [own])):
            live.stopped = True
        self._left.clear()

    def leave(self, page: str) -> None:
        """Note that a page is gone: what it began goes on, and is any page's to stop."""
        with self._lock:
            live = self._lives.pop(page, None)
            if live is not None and not live.ended:
                live.stopped |= live.unwanted
                self._left.append(live)

    def shown(self, page: str) -> Live:
        """Return what a page shows: its own generation, else the latest of all."""
        return self._lives.get(page, self.live)

    def _work(self, chosen: dict[str, Any], live: Live) -> None:
        doing, preview = "", None
        try:
            live.check()
            self._make(chosen, live)
        except Stopped:
            doing, preview = "stopped", live.preview
        except Exception as error:
            live.error = described(error)
        live.show(doing, preview=preview)
        live.ended = True

    def _make(self, chosen: dict[str, Any], live: Live) -> None:
        request = self.resolve(chosen)
        options, planned, made = request.generate_options, request.planned, live.made
        kept = self._kept
        if kept.load(request, live):
            self._dense, self._preview = {}, Preview()
        kept.use(request, live)
        preview, pipe = self._preview, kept.pipe
        live.picture = lambda latents, step: preview.pictures(latents, step, request, pipe)
        # The command writes to where it is typed.
        item = Item(0, options.prompt or "", options.seed, "", output=Path(options.output.name))
        notes = [*request.warnings, *prompt_warnings(kept, item)]
        actions = [] if planned is None else [action.value for action in planned.plan.actions()]
        runs = [Run("sparse", actions)]
        key = (request.settings, options.negative_prompt, item.prompt, item.seed)
        if options.compare and key in self._dense:
            made["dense"] = self._dense[key]
            notes.append(KEPT)
        elif options.compare:
            runs.append(Run("dense", ["dense"] * request.steps))
        live.plan({f"{run.way}, {item.name}": 1.0 for run in runs})
        for run in runs:
            live.runs.append(run)
            try:
                made[run.way] = kept.generate(item, run.way)
            except Stopped:
                if run.way == "sparse":
                    raise
                notes.append(STOPPED)
            else:
                preview.learn(made[run.way].frames)
        live.show("comparing and writing")
        sparse = made["sparse"]
        if "dense" in made:
            self._dense = {key: made["dense"]}
            dense = made["dense"]
            live.quality = compare_clips(dense.frames, sparse.frames)
            speedup = dense.denoising_seconds / sparse.denoising_seconds
            published = published_text(request.model.location, speedup)
            notes += [published] if published else []
        if sparse.nothing_sparse is not None and request.too_few_steps is None:
            notes.append(sparse.nothing_sparse)
        live.notes = [*notes, *sparse.fallbacks, *sparse.notes]
        live.command = list(record_of(request, item).command)
        # A new folder: a browser must not take its files for those of before.
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        clips = {way: folder / f"{way}{item.output.suffix}" for way in sorted(made)}
        frames = {file: made[way].frames for way, file in clips.items()}
        write_media(frames, fps=options.fps, metadata=generation_metadata(request, item))
        profile, model = request.profile, name_of(request.model.location)
        assert profile is not None
        quality = profile.quality or "profile"
        live.profile = folder / f"{model.rpartition('/')[2]}-{quality}.yaml"
        header: dict[str, Any] = {"command": "studio", "description": f"{model}, {quality}."}
        write_profile(live.profile, request, **header, config=profile.sparsity)
        live.clips = clips
