"""One pipeline that makes what the page asks for: a sparse clip, and the dense one beside it."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from chipsparse.cli.commands.generate import GenerateOptions
from chipsparse.cli.generate.job import load, opened, prompt_warnings
from chipsparse.cli.generate.prepared import Job
from chipsparse.cli.generate.runner import Runner, work_name
from chipsparse.cli.generate.series import Item
from chipsparse.cli.generate.summary import Comparison, compare
from chipsparse.cli.generation.denoise import Generation
from chipsparse.cli.media.images import beside
from chipsparse.cli.media.metadata import generation_metadata
from chipsparse.cli.media.write import write_media
from chipsparse.cli.planning.profile_file import write_profile
from chipsparse.cli.studio.choices import Choices
from chipsparse.cli.studio.feed import Feed, Run, Stopped, Way
from chipsparse.cli.studio.preview import Colours, Preview, noise_levels
from chipsparse.cli.views.names import name_of
from chipsparse.cli.work_progress import WorkProgress

STOPPED = "the dense run was stopped, so there is nothing to compare with"


@dataclass(frozen=True)
class Result:
    """What was made.

    Attributes:
        request: prompt, model, profile and settings, as `generate --json` has them.
        dense: the dense one; None where it was not asked for, or was stopped.
        kept: whether that one is an earlier generation's, from which it would not differ.
    """

    request: dict[str, Any]
    sparse: Generation
    dense: Generation | None
    kept: bool
    comparison: Comparison | None
    clips: dict[Way, Path]
    profile: Path
    runs: tuple[Run, ...]

    @property
    def video(self) -> bool:
        """Whether the model makes videos."""
        return self.clips["sparse"].suffix == ".mp4"

    @property
    def worst_frame(self) -> int:
        """The frame in which sparse is furthest from dense; 0 where there is no dense one."""
        if self.comparison is None:
            return 0
        return int(np.argmin(self.comparison.psnr_per_frame))

    def still(self, way: Way, frame: int) -> Path:
        """A frame as a PNG beside its clip, which is written once: a browser may be reading it."""
        made = self.sparse if way == "sparse" else self.dense
        assert made is not None
        file = self.clips[way].with_name(f"{way}-{frame}.png")
        if not file.exists():
            half = file.with_suffix(f".{threading.get_ident()}")
            Image.fromarray(made.frames[frame]).save(half, "png")
            half.replace(file)
        return file


class Maker:
    """Keeps the pipeline, and the last dense clip; works in one thread.

    Args:
        settle: gives the job of what is chosen, and of a folder for its clip; see `settled`.
        folder: for what is made; an empty one.
    """

    def __init__(self, settle: Callable[[Choices, Path], Job], folder: Path) -> None:
        self._settle = settle
        self._folder = folder
        self._count = 0
        self._stack = ExitStack()
        self._open: tuple[GenerateOptions, Runner] | None = None
        self._location: str | None = None  # of the model that is loaded
        self._loaded: Any = None
        self._colours = Colours()  # of its latents
        self._dense: tuple[Any, Generation] | None = None

    def close(self) -> None:
        """Restores the pipeline."""
        self._open = None
        self._stack.close()

    def make(self, choices: Choices, feed: Feed) -> Result:
        """Makes both, or what is not there yet.

        Raises:
            UserError: what was chosen does not fit.
            Stopped: before the sparse clip was there.
        """
        job = self._settle(choices, self._next_folder())
        runner = self._opened(job, feed)
        # Its command writes to where it is typed.
        item = Item(choices.prompt, choices.seed, Path(job.options.output.name), None)
        warnings = prompt_warnings(runner, item)
        which = self._dense_of(job, item)
        kept = self._dense[1] if self._dense is not None and self._dense[0] == which else None
        ways: list[Way] = ["sparse"]
        if choices.compare and kept is None:
            ways.append("dense")
        runner.generator.progress.plan({work_name(way, item.label): 1.0 for way in ways})
        sparse, dense = self._run("sparse", job, item, runner, feed), None
        if choices.compare:
            try:
                dense = kept or self._run("dense", job, item, runner, feed)
                self._dense = which, dense
            except Stopped:
                warnings = [*warnings, STOPPED]
        if sparse.nothing_sparse is not None and job.too_few_steps is None:
            warnings = [*warnings, sparse.nothing_sparse]
        feed.show(stage="comparing and writing", clock="", preview=None)
        request = job.as_json(item, warnings)
        return Result(
            request=request,
            sparse=sparse,
            dense=dense,
            kept=dense is not None and dense is kept,
            comparison=None if dense is None else compare(dense, sparse),
            clips=_written(job, request, sparse, dense),
            profile=_profile(job),
            runs=feed.now.runs,
        )

    def _next_folder(self) -> Path:
        """A new one: a browser must not take its files for those of before, which it may show."""
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        return folder

    def _opened(self, job: Job, feed: Feed) -> Runner:
        """What generates; the one of before where nothing but prompt, seed and file differ."""
        progress = WorkProgress(feed)
        which = dataclasses.replace(job.options, prompt="", seed=0, output=Path())
        if self._open is None or self._open[0] != which:
            self.close()
            runner = self._stack.enter_context(opened(job, progress, lambda: self._pipe(job)))
            self._open = which, runner
        runner = self._open[1]
        runner.generator.progress = progress
        return runner

    def _pipe(self, job: Job) -> Any:
        """The pipeline of a job's model; that of another one is let go first."""
        if self._location != job.model.location:
            self._location = self._loaded = self._dense = None
            gc.collect()
            if job.device.type == "cuda":
                torch.cuda.empty_cache()
            self._loaded, self._colours = load(job), Colours()
            self._location = job.model.location
        return self._loaded

    def _run(self, way: Way, job: Job, item: Item, runner: Runner, feed: Feed) -> Generation:
        grid, planned = None, ["dense"] * job.steps
        if job.planned is not None and len(job.planned.plan.layout.grids) == 1:
            grid = job.planned.plan.layout.grids[0]
        if way == "sparse":
            planned = [] if job.planned is None else [a.value for a in job.planned.plan.actions()]
        config = job.model.vae_config
        channels = config.get("latent_channels") or config.get("z_dim")
        preview, scheduler = Preview(grid, channels, self._colours), self._loaded.scheduler
        feed.begin(
            Run(way, tuple(planned)),
            lambda latents, step: preview.pictures(latents, noise_levels(scheduler, step)),
        )
        made = runner.sparse(item) if way == "sparse" else runner.dense(item)
        preview.learn(made.frames)
        return made

    def _dense_of(self, job: Job, item: Item) -> Any:
        """All that a dense clip depends on."""
        options = job.options
        return job.model.location, job.settings, options.negative_prompt, item.prompt, item.seed


def _written(
    job: Job, request: dict[str, Any], sparse: Generation, dense: Generation | None
) -> dict[Way, Path]:
    """Writes the clips, and returns their files."""
    output = job.options.output
    clips: dict[Way, Path] = {"sparse": output}
    frames = {output: sparse.frames}
    if dense is not None:
        clips["dense"] = beside(output, "dense")
        frames[clips["dense"]] = dense.frames
    write_media(frames, fps=job.options.fps, metadata=generation_metadata(request))
    return clips


def _profile(job: Job) -> Path:
    """Writes the profile that was used: one quality, for these settings."""
    assert job.profile is not None
    model = name_of(job.model.location)
    words = [model.rpartition("/")[2], *([job.profile.quality] if job.profile.quality else [])]
    path = job.options.output.with_name(f"{'-'.join(words)}.yaml")
    write_profile(
        path,
        command="studio",
        model_class=job.model.transformer_class,
        description=f"{model}, {job.profile.quality or 'as in ' + name_of(job.profile.source)}.",
        settings=job.settings,
        config=job.profile.sparsity,
    )
    return path
