"""The work behind the page: one pipeline makes clips, shown step by step, until Stop."""

from __future__ import annotations

import dataclasses
import re
import shutil
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jinja2 import Environment, FileSystemLoader
from PIL import Image
from rich.console import Console

from chipsparse.cli.errors import described
from chipsparse.cli.generate.job import KeptPipeline, prompt_warnings, record_of
from chipsparse.cli.generate.metadata import generation_metadata
from chipsparse.cli.generate.record import RequestRecord, published_text
from chipsparse.cli.media.write import write_media
from chipsparse.cli.model.description import choose_device
from chipsparse.cli.options import GenerateOptions, GenerationOptions, Item, read_options
from chipsparse.cli.profiles import write_profile
from chipsparse.cli.progress import ProgressDisplay, duration, silent_display
from chipsparse.cli.request import IN_PYTHON, Request, place_on, resolve
from chipsparse.cli.studio.labels import as_options, with_labels, work_of
from chipsparse.cli.studio.no_faster import why_no_faster
from chipsparse.cli.studio.options import StudioOptions
from chipsparse.cli.studio.preview import Preview
from chipsparse.cli.views import units
from chipsparse.cli.views.frames import data_uri, image_uri
from chipsparse.cli.views.names import bundled_name, name_of
from chipsparse.cli.views.page import STRICT
from chipsparse.experiments.clips import Generation
from chipsparse.experiments.progress import StepDone
from chipsparse.experiments.quality import compare_clips
from chipsparse.experiments.records import ClipQuality
from chipsparse.profiles.profile import bundled_model

Way = Literal["dense", "sparse"]
LETTERS = {"dense": "D", "refresh": "R", "sparse": "S", "skip": "\N{EN DASH}"}
WAITING = "waiting for the generation of another page"
TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), **STRICT)
MOST_RESULTS = 20  # that are kept, the latest: their frames take room in the temporary folder
THUMBNAIL_SIDE = 96  # pixels
LONGEST_NAME = 60  # letters of a prompt in the name of a file
# The options that are for the first model alone, since another one may not take them.
OF_FIRST_MODEL = ("height", "width", "frames", "steps", "guidance_scale", "flow_shift")
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
        self.doing = ""
        self.clock = ""
        self.error = with_labels(error)
        self.request: RequestRecord | None = None  # once it is resolved
        self.runs: list[Run] = []
        self.preview: np.ndarray | None = None  # of the latents, uint8 ``[T, H, W, 3]``
        self.made: dict[Way, Generation] = {}  # the dense one perhaps before
        self.clips: dict[Way, Path] = {}
        self.thumbnail = ""  # as an address
        self.work: tuple[tuple[str, str], ...] = ()  # see `work_of`
        self.number = 0  # of its result, from 1
        self.seconds: float | None = None  # for all of it, where nothing was there already
        self.quality: ClipQuality | None = None
        self.no_faster: list[str] = []  # reasons
        self.notes: list[str] = []
        self.command: list[str] = []  # that makes the same
        # Without clips it ended in an error, or was stopped.
        self.ended = self.stopped = False
        self.unwanted = False  # another page asked to stop it, which counts if its own one is gone

    @property
    def worst_frame(self) -> int:
        """The frame in which sparse is furthest from dense; 0 where there is no dense one."""
        return 0 if self.quality is None else int(np.argmin(self.quality.psnrs))

    @property
    def speedup(self) -> float | None:
        """None without a dense one."""
        if "dense" not in self.made or "sparse" not in self.made:
            return None
        return self.made["dense"].denoising_seconds / self.made["sparse"].denoising_seconds

    @property
    def facts(self) -> list[str]:
        """The request besides its prompt, in words; none before it is resolved."""
        request = self.request
        if request is None:
            return []
        image = "" if request.image is None else f"from {Path(request.image).name}"
        facts = [
            f"seed {request.seed}",
            "" if request.quality is None else f"quality {request.quality}",
            request.settings.text(request.flow_shift),
            request.scheduler,
            image,
            "" if request.strength is None else f"strength {request.strength:g}",
            *(f"LoRA {Path(lora.file).name} at {lora.scale:g}" for lora in request.loras),
            bundled_name(request.model) or name_of(request.model),
        ]
        return [fact for fact in facts if fact]

    def html(self) -> str:
        """Return what the page shows while it goes on, and where nothing came of it."""
        preview = self.preview  # which another thread may change
        frames = () if preview is None else map(Image.fromarray, preview)
        pictures = [image_uri(frame, "png") for frame in frames]
        return self._rendered("progress.html", pictures=pictures)

    def result_html(self) -> str:
        """Return the result; nothing where there is none."""
        return self._rendered("result.html") if self.clips else ""

    def _rendered(self, name: str, **more: Any) -> str:
        template = TEMPLATES.get_template(name)
        return template.render(live=self, letters=LETTERS, units=units, **more)

    def check(self) -> None:
        """Raise `Stopped` once the page asked for an end."""
        if self.stopped:
            raise Stopped

    def show(self, doing: str = "", clock: str = "", preview: np.ndarray | None = None) -> None:
        """Exchange what the page shows; each None or empty text clears its part."""
        self.clock = clock
        self.preview = preview
        self.doing = doing

    @contextmanager
    def stage(self, text: str) -> Iterator[None]:
        """Within: the page shows this text. Raises `Stopped` before and after."""
        self.check()
        self.show(text)
        yield
        self.check()

    @contextmanager
    def denoising(self, title: str, steps: int, *, plain_lines: int = 0) -> Iterator[StepDone]:
        """Within: the page shows each step with a preview, and can stop after it."""

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
        self.first_model = options.model or str(bundled_model())
        self.results: dict[int, Live] = {}  # of this session, by number
        self._folder = folder
        self._made_results = 0
        self._none = Live()
        self._none.ended = True
        self.live = self._none  # the latest of all
        self._lives: dict[str, Live] = {}  # the latest of each page
        self._left: list[Live] = []  # those of pages that are gone
        self._lock = threading.Lock()
        self._device = choose_device(options.device)
        # All that touches the pipeline is done by one thread.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="studio")
        self._kept = KeptPipeline()
        self._preview = Preview()
        self._dense: dict[Any, Generation] = {}  # the last one, by all that it depends on

    def close(self) -> None:
        """Stop all generations after their steps, free the pipeline, and wait for its thread."""
        with self._lock:
            for live in (*self._lives.values(), *self._left):
                live.stopped = True
        self._worker.submit(self._kept.close)
        self._worker.shutdown()

    def resolve(self, chosen: dict[str, Any], *, complete: bool = True) -> Request:
        """Return the request of fields; empty ones take the command's options; raise `UserError`.

        ``complete``: all is there that the pipeline needs, such as an image.
        """
        names = [field.name for field in dataclasses.fields(GenerationOptions)]
        typed = {name: getattr(self.options, name) for name in (*names, "seed")}
        if chosen.get("model") != self.first_model:
            typed |= dict.fromkeys(OF_FIRST_MODEL)
        # An emptied negative prompt is none, not the command's.
        typed["negative_prompt"] = None
        file = self._folder / "sparse.png"
        values = {**typed, "prompt": "", **as_options(chosen), "output": file}
        options = read_options(GenerateOptions, values)
        place = place_on(self._device, options, silent_display())
        if place.model.accepts("num_frames"):
            file = file.with_suffix(".mp4")
            options = dataclasses.replace(options, output=file, fps=self.options.fps)
        name = file_name(options.prompt or "", options.seed)
        options = dataclasses.replace(options, output=file.with_stem(name))
        return resolve(options, place, instead=IN_PYTHON if complete else None)

    def start(self, chosen: dict[str, Any], page: str = "") -> Live:
        """Begin a generation of a page, in place of its own one that still runs."""
        live = Live()
        live.work = work_of(chosen)
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
        """Return what a page shows: its own generation, else what runs, else the latest result.

        So a page that is loaded anew has no error of before.
        """
        if page in self._lives or not self.live.ended:
            return self._lives.get(page, self.live)
        return next(reversed([self._none, *self.results.values()]))

    def results_html(self) -> str:
        """Return the list of the results of this session, the latest first; empty without any."""
        results = [*reversed(self.results.values())]
        template = TEMPLATES.get_template("results.html")
        return template.render(results=results, units=units) if results else ""

    def uploaded(self, image: str | Mapping[str, Any] | None) -> str | None:
        """Return the file of an image that a page gave before; None where it is gone."""
        place = image.get("path") if isinstance(image, Mapping) else image
        file = Path(place or "").resolve()
        is_ours = file.is_relative_to(self._folder.resolve())
        return str(file) if is_ours and file.is_file() else None

    def estimate(self, chosen: dict[str, Any]) -> str:
        """Return how long fields take, where a result of this session tells; else nothing."""
        work = work_of(chosen)
        known = [live.seconds for live in self.results.values() if live.work == work]
        seconds = next((known for known in reversed(known) if known is not None), None)
        return "" if seconds is None else f"About {duration(seconds)}, as before."

    def _work(self, chosen: dict[str, Any], live: Live) -> None:
        doing = ""
        preview = None
        try:
            live.check()
            self._make(chosen, live)
        except Stopped:
            doing = "stopped"
            preview = live.preview
        except Exception as error:
            live.error = with_labels(described(error))
        live.show(doing, preview=preview)
        live.ended = True

    def _make(self, chosen: dict[str, Any], live: Live) -> None:
        request = self.resolve(chosen)
        options = request.generate_options
        planned = request.planned
        made = live.made
        kept = self._kept
        if kept.load(request, live):
            self._dense = {}
            self._preview = Preview()
        began = time.monotonic()
        kept.use(request, live)
        preview = self._preview
        pipe = kept.pipe
        live.picture = lambda latents, step: preview.pictures(latents, step, request, pipe)
        # The command writes to where it is typed.
        item = Item(0, options.prompt or "", options.seed, "", output=Path(options.output.name))
        live.request = record_of(request, item)
        notes = [*request.warnings, *prompt_warnings(kept, item)]
        steps = [] if planned is None else planned.plan.actions(request.first)
        actions = [action.value for action in steps]
        runs = [Run("sparse", actions)]
        key = (
            request.settings,
            options.negative_prompt,
            options.image,
            options.strength,
            item.prompt,
            item.seed,
        )
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
        self._tell(request, live, notes)
        live.command = runnable(live.request.command)
        self._write(request, item, live)
        if "dense" in made:
            self._dense = {key: made["dense"]}
        # The time of less work is no estimate of all.
        if len(runs) == len(options.ways) == len(made):
            live.seconds = time.monotonic() - began
        self._add(live)

    def _tell(self, request: Request, live: Live, notes: list[str]) -> None:
        """Say what is to be known of the result: its quality, its speed, and ``notes`` on it."""
        sparse = live.made["sparse"]
        nothing = None if request.too_few_steps else sparse.nothing_sparse
        texts: list[str | None] = [*notes]
        if "dense" in live.made:
            dense = live.made["dense"]
            live.quality = compare_clips(dense.frames, sparse.frames)
            reasons = why_no_faster(request, dense, sparse, self._kept.busy)
            live.no_faster = [with_labels(reason) for reason in reasons]
            texts.append(published_text(request.model.location, live.speedup or 0.0))
        texts += [nothing, *sparse.fallbacks, *sparse.notes]
        live.notes = [with_labels(text) for text in texts if text]

    def _write(self, request: Request, item: Item, live: Live) -> None:
        """Write the clips and the profile, and leave the frames to the disk."""
        # A new folder: names may be those of before.
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        profile = request.profile
        assert profile is not None
        quality = profile.quality or "profile"
        words = {"sparse": quality, "dense": "dense"}
        clips: dict[Way, Path] = {}
        for way in sorted(live.made):
            name = f"{item.output.stem}-{words[way]}{item.output.suffix}"
            clips[way] = folder / name
        frames = {file: live.made[way].frames for way, file in clips.items()}
        fps = request.generate_options.fps
        write_media(frames, fps=fps, metadata=generation_metadata(request, item))
        model = name_of(request.model.location)
        live.profile = folder / f"{model.rpartition('/')[2]}-{quality}.yaml"
        header: dict[str, Any] = {"command": "studio", "description": f"{model}, {quality}."}
        write_profile(live.profile, request, **header, config=profile.sparsity)
        for way, made in live.made.items():
            live.made[way] = on_disk(made, folder / f"{way}.npy")
        sparse = live.made["sparse"].frames
        live.thumbnail = data_uri(sparse[len(sparse) // 2], THUMBNAIL_SIDE)
        live.clips = clips

    def _add(self, live: Live) -> None:
        self._made_results += 1
        live.number = self._made_results
        self.results = {**self.results, live.number: live}
        if len(self.results) > MOST_RESULTS:
            oldest = min(self.results)
            shutil.rmtree(self.results[oldest].profile.parent)
            self.results = {n: result for n, result in self.results.items() if n != oldest}


def on_disk(made: Generation, file: Path) -> Generation:
    """Return a generation whose frames are read from a file when they are needed."""
    if isinstance(made.frames, np.memmap):  # a dense one that was there before
        return made
    np.save(file, made.frames)
    return dataclasses.replace(made, frames=np.load(file, mmap_mode="r"))


def file_name(prompt: str, seed: int) -> str:
    """Return a name that tells a prompt and a seed, in letters that every file system takes."""
    words = re.findall(r"[a-z0-9]+", prompt.lower())
    name = textwrap.shorten(" ".join(words), LONGEST_NAME, placeholder="").replace(" ", "-")
    return f"{name or 'clip'}-{seed}"


def runnable(command: Sequence[str]) -> list[str]:
    """Return the command for where the user is, not for the folders of the studio.

    It has an image by its own name, as the studio's copy of it goes.
    """
    words = list(command)
    options = words[: words.index("--")] if "--" in words else words
    for place, option in enumerate(options, 1):
        if option == "--image":
            words[place] = Path(words[place]).name
    return words
