"""One pipeline, loaded once, that makes files of a batch: the same in every engine."""

from __future__ import annotations

import dataclasses
import io
import platform
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import chipsparse
from chipsparse.cli.batch.engine import Failed, Loaded, Made, NotLoaded, Refused, Task
from chipsparse.cli.errors import UserError, described
from chipsparse.cli.generate.job import Runner, make, opened, prompt_warnings
from chipsparse.cli.model.description import quiet_libraries
from chipsparse.cli.options import GenerateOptions
from chipsparse.cli.progress import WorkProgress, silent_display
from chipsparse.cli.prompts import Item
from chipsparse.cli.ranks import Rank, meet
from chipsparse.cli.request import Request, device_and_dtype, look_up, resolve
from chipsparse.cli.results import results_alone
from chipsparse.common.scratch import scratch_folder
from chipsparse.parallel.peers import PeerError

THUMBNAIL_SIDE, JPEG_QUALITY = 320, 85


class PipelineWorker:
    """Loads a pipeline and makes files with it, of any settings that need no other one.

    Args:
        options: of `generate`, without a prompt: which model, on which device.
        threads: of a CPU; None for PyTorch's own choice.
        place: of this process among those that are one worker. The first one answers with the file.
    """

    def __init__(
        self, options: GenerateOptions, threads: int | None, place: Rank | None = None
    ) -> None:
        self._options = options
        self._threads = threads
        self._place = place or Rank()
        self._display = silent_display()
        self._stack = ExitStack()
        self._open: tuple[GenerateOptions, Runner] | None = None
        self._pipe: Any = None

    def load(self) -> Loaded | NotLoaded:
        """Meets the others and loads the pipeline."""
        try:
            with self._quiet():
                job = self._resolved(self._options)
                self._place = meet(self._place, job.device)
                if self._threads is not None:
                    torch.set_num_threads(self._threads)
                self._pipe = job.load()
        except UserError as error:
            return NotLoaded(described(error))
        return Loaded(chipsparse.__version__, f"{self._options.device} of {platform.node()}")

    def make(self, task: Task) -> Made | Refused | Failed:
        """Makes a file."""
        try:
            with self._quiet():
                return self._made(task)
        except PeerError as error:
            return Failed(described(error), of_another=True)
        except (UserError, ValueError) as error:
            return Refused(described(error))
        except Exception as error:
            return Failed(described(error))

    def _made(self, task: Task) -> Made:
        # The settings are the task's, the place is the worker's.
        options = dataclasses.replace(task.options, device=self._options.device)
        runner = self._opened(options)
        # Not the command's folder: a worker may be on another machine.
        with scratch_folder(Path(tempfile.gettempdir())) as folder:
            item = Item(task.prompt, task.seed, folder / task.name, None)
            result, frames = make(runner, item, prompt_warnings(runner, item))
            if not self._place.writes:
                return Made(b"", b"", 0.0, (), ())
            content = item.output.read_bytes()
        made = result.made
        assert made is not None
        return Made(
            content,
            thumbnail(frames),
            made.total_seconds,
            # Those of the job are shown once, by the command.
            [each for each in result.request.warnings if each not in runner.request.warnings],
            [*made.fallbacks, *made.notes],
        )

    def _opened(self, options: GenerateOptions) -> Runner:
        """What generates with these options; the pipeline stays patched for the next one."""
        if self._open is None or self._open[0] != options:
            self._open = None
            self._stack.close()
            job = self._resolved(options)
            runner = self._stack.enter_context(
                opened(job, WorkProgress(self._display), lambda: self._pipe, self._place)
            )
            self._open = options, runner
        return self._open[1]

    def _resolved(self, options: GenerateOptions) -> Request:
        device, dtype = device_and_dtype(options)
        model = look_up(options, self._display)
        return resolve(options, model=model, device=device, dtype=dtype)

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        with results_alone(), quiet_libraries(debug=self._options.debug):
            yield


def thumbnail(frames: np.ndarray) -> bytes:
    """The frame in the middle of uint8 ``[F, H, W, 3]``, made smaller, as JPEG."""
    image = Image.fromarray(frames[len(frames) // 2])
    image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "jpeg", quality=JPEG_QUALITY)
    return buffer.getvalue()
