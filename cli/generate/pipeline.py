"""One loaded pipeline for many requests, patched as long as their settings stay."""

from __future__ import annotations

import dataclasses
import gc
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from chipsparse.cli.generate.job import Runner, opened
from chipsparse.cli.options import GenerateOptions
from chipsparse.cli.progress import ProgressDisplay, silent_display
from chipsparse.cli.request import Request

Kept = TypeVar("Kept", bound="KeptPipeline")


class KeptPipeline:
    """The pipeline of the latest request; a context manager, which restores it at the end.

    Attributes:
        pipe: the pipeline; None where there is none.
    """

    def __init__(self) -> None:
        self.pipe: Any = None
        self._stack = ExitStack()
        self._loaded: tuple[str, type] | None = None
        self._open: tuple[GenerateOptions, Runner] | None = None

    def __enter__(self: Kept) -> Kept:
        return self

    def __exit__(self, *_: object) -> None:
        self.forget()

    def load(self, request: Request, progress: ProgressDisplay) -> bool:
        """Load the pipeline, in place of another one; return False where it is there already.

        Raises `UserError` where it cannot be loaded.
        """
        wanted = request.model.location, request.model.pipeline_class
        if self._loaded == wanted:
            return False
        self.forget()
        with progress.stage("loading the model"):
            self.pipe = request.load()
        self._loaded = wanted
        return True

    def forget(self) -> None:
        """Let go of the pipeline and its memory; it may be broken."""
        with suppress(Exception):
            self._stack.close()
        self.pipe = self._loaded = self._open = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def runner(self, request: Request, progress: ProgressDisplay) -> Runner:
        """Return what generates; that of before where only prompt, seed and file differ."""
        assert isinstance(request.options, GenerateOptions)
        settings = dataclasses.replace(request.options, prompt="", seed=0, output=Path())
        if self._open is None or self._open[0] != settings:
            self._open = None
            self._stack.close()
            quiet = silent_display()  # the pipeline is loaded by now
            runner = opened(request, quiet, lambda: self.pipe)
            self._open = settings, self._stack.enter_context(runner)
        self._open[1].generator.progress = progress
        return self._open[1]
