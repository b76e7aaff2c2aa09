"""The options of `studio`: the first values of the page, and its address."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from annotated_types import Interval

from chipsparse.cli.errors import UserError
from chipsparse.cli.options import (
    DEFAULT_FPS,
    GenerationOptions,
    check_fps,
    output_option,
    read_fps,
    seed_option,
)


@dataclass(frozen=True, kw_only=True)
class StudioOptions(GenerationOptions):
    """The options of `studio`."""

    port: int = output_option(
        help="Port of the page, which only this machine can reach; 0 takes a free one.",
        default=7860,
        check=Interval(ge=0, le=65535),
    )
    browser: bool = output_option(help="Also open the page in the browser.", default=False)
    seed: int = seed_option()
    fps: float = output_option(
        help="Frames per second of a video.", default=DEFAULT_FPS, check=check_fps, read=read_fps
    )
    gpus: None = None
    guidance_parallel: None = None
    json: bool = False

    def check(self) -> None:
        """Raise `UserError` where Gradio is missing."""
        if importlib.util.find_spec("gradio") is None:
            raise UserError(
                "the studio needs gradio, which is not installed: pip install 'chipsparse[studio]'"
            )

    def kept(self) -> str:
        """Return what an interruption leaves, in words."""
        return "the page is closed"
