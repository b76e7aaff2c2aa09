"""The work behind the page: one pipeline makes clips, shown step by step, until Stop."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console

from chipsparse.cli.errors import described
from chipsparse.cli.generate.job import KeptPipeline, planned, prompt_warnings, record_of
from chipsparse.cli.media.write import beside, generation_metadata, write_media
from chipsparse.cli.options import GenerateOptions, GenerationOptions, Item, read_options
from chipsparse.cli.profiles import write_profile
from chipsparse.cli.progress import ProgressDisplay, silent_display
from chipsparse.cli.request import Request, device_and_dtype, look_up, resolve
from chipsparse.cli.studio.options import StudioOptions
from chipsparse.cli.studio.preview import Preview
from chipsparse.cli.views.names import name_of
from chipsparse.experiments.clips import Generation
from chipsparse.experiments.quality import compare_clips
from chipsparse.experiments.records import ClipQuality

Way = Literal["sparse", "dense"]
STOPPED = "the dense run was stopped, so there is nothing to compare with"
KEPT = "The dense run is that of before: it does not depend on the quality."


class Stopped(BaseException):
    """Someone pressed Stop. No `Exception`: nothing went wrong."""


@dataclass
class Run:
    """One of the two generations, "sparse" or "dense".

    Attributes:
        planned: the action of each step, as far as it is known beforehand.
        actions: of the steps that are done.
        made: the generation; None until it is finished.
    """

    way: Way
    planned: list[str]
    actions: list[str] = field(default_factory=list)
    made: Generation | None = None


@dataclass(frozen=True)
class Result:
    """Clips, and the quality of the sparse one against dense where that was made, too.

    Attributes:
        clips: the files, by the way.
        profile: the file with the profile that was used.
        notes: what else is worth knowing, one sentence each.
        command: the words that make the same.
    """

    sparse: Generation
    dense: Generation | None
    quality: ClipQuality | None
    clips: Mapping[str, Path]
    profile: Path
    notes: Sequence[str]
    command: Sequence[str]

    @property
    def worst_frame(self) -> int:
        """The frame in which sparse is furthest from dense; 0 where there is no dense one."""
        return 0 if self.quality is None else int(np.argmin(self.quality.psnrs))


class Live(ProgressDisplay):
    """One generation while it is made, for the page, and the wish to stop it.

    Attributes:
        changed: set by every change of the others.
        doing: the stage in words.
        clock: the time that went by and what is left.
        runs: those that began, in their order.
        preview: of the latents, uint8 ``[T, H, W, 3]``; None where there is nothing yet.
        ended: whether nothing follows: there is a result, or an error, or it was stopped.
        stopped: whether it is to stop at the end of its step.
    """

    def __init__(self, error: str = "") -> None:
        super().__init__(Console(quiet=True, force_terminal=False))
        self.doing = self.clock = ""
        self.error = error
        self.runs: list[Run] = []
        self.preview: np.ndarray | None = None
        self.result: Result | None = None
        self.ended = self.stopped = False
        self.changed = threading.Event()
        self.picture: Callable[[torch.Tensor | None, int], np.ndarray | None]

    def check(self) -> None:
        """Raise `Stopped` where that is wished."""
        if self.stopped:
            raise Stopped

    def show(self, doing: str = "", clock: str = "", preview: np.ndarray | None = None) -> None:
        """Show what goes on."""
        self.doing, self.clock, self.preview = doing, clock, preview
        self.changed.set()

    @contextmanager
    def stage(self, text: str) -> Iterator[None]:
        """Show that something of unknown length is going on."""
        self.check()
        self.show(text)
        yield
        self.check()

    @contextmanager
    def denoising(self, title: str, steps: int, *, plain_lines: int = 0) -> Iterator[Any]:
        """Show each step of a loop, and stop after it where that is wished."""
        self.check()
        self.show(f"{title}: step 1 of {steps}")

        def done(step: int, action: str, latents: torch.Tensor | None = None) -> None:
            shown.done(step, action)
            self.runs[-1].actions.append(action)
            doing = "decoding" if step + 1 >= steps else f"step {step + 2} of {steps}"
            self.show(f"{title}: {doing}", self.clock_text(), self.picture(latents, step))
            self.check()

        with super().denoising(title, steps, plain_lines=0) as shown:
            yield SimpleNamespace(done=done)


class Studio:
    """Makes what the page asks for, one after the other; a context manager.

    Args:
        folder: for what is made.

    Raises:
        UserError: the device is not here.
    """

    def __init__(self, options: StudioOptions, folder: Path) -> None:
        self.options, self._folder, self._live = options, folder, Live()
        self._device, self._dtype = device_and_dtype(options)
        # All that touches the pipeline is done by one thread.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="studio")
        self._kept, self._preview = KeptPipeline(), Preview()
        self._dense: dict[Any, Generation] = {}  # the last one, by all that it depends on

    def __enter__(self) -> Studio:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._worker.submit(self._kept.forget)
        self._worker.shutdown()

    def resolve(self, chosen: Mapping[str, Any], folder: Path | None = None) -> Request:
        """Return the request of options of `generate` that replace the command's."""
        names = [field.name for field in dataclasses.fields(GenerationOptions)]
        typed = {name: getattr(self.options, name) for name in names}
        output = (folder or self._folder) / "sparse.png"
        values = {"prompt": "", **typed, **chosen, "output": output}
        options = read_options(GenerateOptions, values)
        model = look_up(options, silent_display())
        if model.accepts("num_frames"):
            output = output.with_suffix(".mp4")
            options = dataclasses.replace(options, output=output, fps=self.options.fps)
        return resolve(options, model=model, device=self._device, dtype=self._dtype)

    def start(self, chosen: Mapping[str, Any]) -> Live:
        """Begin a generation, in place of one that still runs."""
        self.stop()
        self._live = live = Live()
        live.show("starting")
        self._worker.submit(self._work, chosen, live)
        return live

    def stop(self) -> None:
        """Stop what runs or waits, at the end of its step."""
        self._live.stopped = True

    def _work(self, chosen: Mapping[str, Any], live: Live) -> None:
        doing = ""
        try:
            live.check()
            live.result = self._make(chosen, live)
        except Stopped:
            doing = "stopped"
        except Exception as error:
            live.error = described(error)
        live.ended = True
        live.show(doing, preview=live.preview if doing else None)

    def _make(self, chosen: Mapping[str, Any], live: Live) -> Result:
        # A new folder: a browser must not take its files for those of before.
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        request = self.resolve(chosen, folder)
        options, plan = request.generate_options, request.planned
        if self._kept.load(request, live):
            self._dense, self._preview = {}, Preview()
        runner = self._kept.runner(request, live)
        # Its command writes to where it is typed.
        item = Item(0, options.prompt or "", options.seed, "", output=Path(options.output.name))
        warnings = prompt_warnings(runner, item)
        key = (request.settings, options.negative_prompt, item.prompt, item.seed)
        dense = self._dense.get(key) if options.compare else None
        notes = [] if dense is None else [KEPT]
        ways: list[Way] = ["sparse", "dense"] if options.compare and dense is None else ["sparse"]
        live.plan(planned([item], *ways))
        live.picture = functools.partial(
            self._preview.pictures, request=request, scheduler=self._kept.pipe.scheduler
        )

        def make(way: Way, steps: list[str]) -> Generation:
            live.runs.append(Run(way, steps))
            made = runner.generate(item, way)
            self._preview.learn(made.frames)
            live.runs[-1].made = made
            return made

        sparse = make("sparse", [a.value for a in plan.plan.actions()] if plan else [])
        if "dense" in ways:
            try:
                dense = make("dense", ["dense"] * request.steps)
                self._dense = {key: dense}
            except Stopped:
                warnings = [*warnings, STOPPED]
        if sparse.nothing_sparse is not None and request.too_few_steps is None:
            warnings = [*warnings, sparse.nothing_sparse]
        live.show("comparing and writing")
        record = record_of(request, item, warnings)
        clips, frames = {"sparse": options.output}, {options.output: sparse.frames}
        if dense is not None:
            clips = {"dense": beside(options.output, "dense"), **clips}
            frames[clips["dense"]] = dense.frames
        write_media(frames, fps=options.fps, metadata=generation_metadata(request, item))
        return Result(
            sparse=sparse,
            dense=dense,
            quality=None if dense is None else compare_clips(dense.frames, sparse.frames),
            clips=clips,
            profile=_profile(request, folder),
            notes=[*record.warnings, *sparse.fallbacks, *sparse.notes, *notes],
            command=record.command,
        )


def _profile(request: Request, folder: Path) -> Path:
    """Write the profile that was used: one quality, for these settings."""
    profile, model = request.profile, name_of(request.model.location)
    assert profile is not None
    file = folder / f"{model.rpartition('/')[2]}-{profile.quality or 'profile'}.yaml"
    write_profile(
        file,
        command="studio",
        model_class=request.model.transformer_class,
        description=f"{model}, {profile.quality or 'as in ' + name_of(profile.source)}.",
        settings=request.settings,
        config=profile.sparsity,
    )
    return file
