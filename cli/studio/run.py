"""The work behind the page: one pipeline makes clips, shown step by step, until Stop."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console

from chipsparse.cli.errors import described
from chipsparse.cli.generate.job import Runner, planned, prompt_warnings, record_of
from chipsparse.cli.generate.pipeline import KeptPipeline
from chipsparse.cli.generate.record import Comparison
from chipsparse.cli.media.write import beside, generation_metadata, write_media
from chipsparse.cli.options import GenerateOptions, GenerationOptions, Item, read_options
from chipsparse.cli.profiles import write_profile
from chipsparse.cli.progress import ProgressDisplay, silent_display
from chipsparse.cli.request import Request, device_and_dtype, look_up, resolve
from chipsparse.cli.studio.options import StudioOptions
from chipsparse.cli.studio.preview import Colours, Preview, noise_levels
from chipsparse.cli.views.names import name_of
from chipsparse.experiments.clips import Generation
from chipsparse.experiments.quality import compare_clips

STOPPED = "the dense run was stopped, so there is nothing to compare with"
Way = Literal["sparse", "dense"]
# What the latents of a step show; None where that is not known.
Picture = Callable[[torch.Tensor | None, int], np.ndarray | None]


class Stopped(BaseException):
    """Someone pressed Stop. No `Exception`: nothing went wrong."""


@dataclass(frozen=True)
class Run:
    """One of the two generations.

    Attributes:
        planned: the action of each step, as far as it is known beforehand.
        actions: of the steps that are done, from the first on.
        made: the generation; None until it is finished.
    """

    way: Way
    planned: Sequence[str]
    actions: Sequence[str] = ()
    made: Generation | None = None


@dataclass(frozen=True)
class Result:
    """Clips, and how far sparse is from dense.

    Attributes:
        dense: the dense one; None where it was not asked for, or was stopped.
        kept: whether that one is an earlier generation's, from which it would not differ.
        runs: of this generation.
    """

    sparse: Generation
    dense: Generation | None
    kept: bool
    comparison: Comparison | None
    psnr_per_frame: Sequence[float]
    clips: Mapping[Way, Path]
    profile: Path
    runs: Sequence[Run]
    warnings: Sequence[str]
    command: Sequence[str]

    @property
    def worst_frame(self) -> int:
        """The frame in which sparse is furthest from dense; 0 where there is no dense one."""
        return int(np.argmin(self.psnr_per_frame)) if self.psnr_per_frame else 0


@dataclass(frozen=True)
class Moment:
    """What the page shows.

    Attributes:
        runs: those that began, in their order.
        preview: of the latents, uint8 ``[T, H, W, 3]``; None where there is nothing yet.
        ended: whether nothing follows: there is a result, or an error, or it was stopped.
    """

    stage: str = ""
    clock: str = ""
    runs: Sequence[Run] = ()
    preview: np.ndarray | None = None
    error: str | None = None
    result: Result | None = None
    ended: bool = False


class Feed(ProgressDisplay):
    """The moments of one generation, for whoever follows it, and the wish to stop it."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True, force_terminal=False))
        self.moments: queue.SimpleQueue[Moment] = queue.SimpleQueue()
        self.now = Moment("starting")
        self.stopped = threading.Event()
        self._picture: Picture = lambda latents, step: None

    def check(self) -> None:
        """Raise `Stopped` where that is wished."""
        if self.stopped.is_set():
            raise Stopped

    def show(self, **changes: Any) -> None:
        """Show the same moment with some of its fields changed."""
        self.now = dataclasses.replace(self.now, **changes)
        self.moments.put(self.now)

    def begin(self, run: Run, picture: Picture) -> None:
        """Take a run, of which no step is done, for what `denoising` shows next."""
        self._picture = picture
        self.now = dataclasses.replace(self.now, runs=(*self.now.runs, run), preview=None)

    def change(self, **changes: Any) -> Sequence[Run]:
        """Return the runs with the last one changed."""
        *before, run = self.now.runs
        return (*before, dataclasses.replace(run, **changes))

    @contextmanager
    def stage(self, text: str) -> Iterator[None]:
        """Show that something of unknown length is going on."""
        self.check()
        self.show(stage=text, clock="")
        yield
        self.check()

    @contextmanager
    def denoising(self, title: str, steps: int, *, plain_lines: int = 0) -> Iterator[Any]:
        """Show each step of a loop, and stop after it where that is wished."""
        self.check()
        self.show(stage=f"{title}: step 1 of {steps}")

        def done(step: int, action: str, latents: torch.Tensor | None = None) -> None:
            shown.done(step, action)
            doing = "decoding" if step + 1 >= steps else f"step {step + 2} of {steps}"
            self.show(
                stage=f"{title}: {doing}",
                clock=self.clock_text(),
                runs=self.change(actions=(*self.now.runs[-1].actions, action)),
                preview=self._picture(latents, step),
            )
            self.check()

        with super().denoising(title, steps, plain_lines=0) as shown:
            yield SimpleNamespace(done=done)


class Studio:
    """Makes what the page asks for, one after the other; a context manager.

    Args:
        folder: for what is made; an empty one.

    Raises:
        UserError: the device is not here.
    """

    def __init__(self, options: StudioOptions, folder: Path) -> None:
        self.options, self._folder = options, folder
        self._device, self._dtype = device_and_dtype(options)
        # All that touches the pipeline is done by one thread.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="studio")
        self._feeds: list[Feed] = []
        self._kept = KeptPipeline()
        self._colours = Colours()  # of its latents
        self._dense: tuple[Any, Generation] | None = None

    def __enter__(self) -> Studio:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._worker.submit(self._kept.forget)
        self._worker.shutdown()

    def resolve(self, chosen: Mapping[str, Any], folder: Path | None = None) -> Request:
        """Return what `generate --compare` would resolve; raise `UserError`.

        Args:
            chosen: options of `generate` that replace those of the command.
        """
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

    def start(self, chosen: Mapping[str, Any]) -> queue.SimpleQueue[Moment]:
        """Begin a generation, in place of one that still runs."""
        self.stop()
        feed = Feed()
        self._feeds = [feed]
        self._worker.submit(self._work, chosen, feed)
        return feed.moments

    def stop(self) -> None:
        """Stop what runs or waits, at the end of its step."""
        for feed in self._feeds:
            feed.stopped.set()

    def _work(self, chosen: Mapping[str, Any], feed: Feed) -> None:
        try:
            feed.check()
            result = self._make(chosen, feed)
            feed.show(result=result, ended=True)
        except Stopped:
            feed.show(stage="stopped", clock="", ended=True)
        except Exception as error:
            feed.show(stage="", clock="", preview=None, error=described(error), ended=True)

    def _make(self, chosen: Mapping[str, Any], feed: Feed) -> Result:
        # A new folder: a browser must not take its files for those of before.
        folder = self._folder / str(len([*self._folder.iterdir()]))
        folder.mkdir()
        request = self.resolve(chosen, folder)
        options = request.options
        assert isinstance(options, GenerateOptions)
        if self._kept.load(request, feed):
            self._dense, self._colours = None, Colours()
        runner = self._kept.runner(request, feed)
        # Its command writes to where it is typed.
        item = Item(0, options.prompt or "", options.seed, "", output=Path(options.output.name))
        warnings = prompt_warnings(runner, item)
        facts = (request.model.location, request.settings, options.negative_prompt)
        which = (*facts, item.prompt, item.seed)  # all that a dense clip depends on
        dense = self._dense[1] if self._dense is not None and self._dense[0] == which else None
        dense = dense if options.compare else None
        kept = dense is not None
        ways: list[Way] = ["sparse", "dense"] if options.compare and not kept else ["sparse"]
        feed.plan(planned([item], *ways))
        sparse = self._run("sparse", request, item, runner, feed)
        if "dense" in ways:
            try:
                dense = self._run("dense", request, item, runner, feed)
                self._dense = which, dense
            except Stopped:
                warnings = [*warnings, STOPPED]
        if sparse.nothing_sparse is not None and request.too_few_steps is None:
            warnings = [*warnings, sparse.nothing_sparse]
        feed.show(stage="comparing and writing", clock="", preview=None)
        record = record_of(request, item, warnings)
        clips: dict[Way, Path] = {"sparse": options.output}
        frames = {options.output: sparse.frames}
        clip = comparison = None
        if dense is not None:
            clips["dense"] = beside(options.output, "dense")
            frames[clips["dense"]] = dense.frames
            clip = compare_clips(dense.frames, sparse.frames)
            speedup = dense.denoising_seconds / sparse.denoising_seconds
            quality = clip.model_dump(include={"psnr_db", "ssim", "identical"})
            comparison = Comparison(speedup=speedup, **quality)
        write_media(frames, fps=options.fps, metadata=generation_metadata(request, item))
        return Result(
            sparse=sparse,
            dense=dense,
            kept=kept,
            comparison=comparison,
            psnr_per_frame=[] if clip is None else clip.psnrs,
            clips=clips,
            profile=_profile(request, folder),
            runs=feed.now.runs,
            warnings=record.warnings,
            command=record.command,
        )

    def _run(
        self, way: Way, request: Request, item: Item, runner: Runner, feed: Feed
    ) -> Generation:
        grid, planned = None, ["dense"] * request.steps
        if request.planned is not None and len(request.planned.plan.layout.grids) == 1:
            grid = request.planned.plan.layout.grids[0]
        if way == "sparse":
            plan = None if request.planned is None else request.planned.plan
            planned = [] if plan is None else [action.value for action in plan.actions()]
        config, scheduler = request.model.vae_config, self._kept.pipe.scheduler
        channels = config.get("latent_channels") or config.get("z_dim")
        preview = Preview(grid, channels, self._colours)
        feed.begin(
            Run(way, planned),
            lambda latents, step: preview.pictures(latents, noise_levels(scheduler, step)),
        )
        made = runner.generate(item, way)
        preview.learn(made.frames)
        feed.now = dataclasses.replace(feed.now, runs=feed.change(made=made))
        return made


def _profile(request: Request, folder: Path) -> Path:
    """Write the profile that was used: one quality, for these settings."""
    profile = request.profile
    assert profile is not None
    model = name_of(request.model.location)
    words = [model.rpartition("/")[2], *([profile.quality] if profile.quality else [])]
    path = folder / f"{'-'.join(words)}.yaml"
    write_profile(
        path,
        command="studio",
        model_class=request.model.transformer_class,
        description=f"{model}, {profile.quality or 'as in ' + name_of(profile.source)}.",
        settings=request.settings,
        config=profile.sparsity,
    )
    return path
