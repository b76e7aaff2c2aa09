"""The options of `studio`: the first values of the page, and its address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from chipsparse.cli.errors import check_installed
from chipsparse.cli.media.formats import DEFAULT_FPS
from chipsparse.cli.options import Fps, GenerationOptions, output_option, seed_option
from chipsparse.common.bounded import Seed


@dataclass(frozen=True, kw_only=True)
class StudioOptions(GenerationOptions):
    """The options of `studio`."""

    port: Annotated[int, Interval(ge=0, le=65535)] = output_option(
        help="Port of the page, which only this machine can reach; 0 takes a free one.",
        default=7860,
    )
    browser: bool = output_option(help="Also open the page in the browser.", default=False)
    seed: Seed = seed_option()
    fps: Fps = output_option(help="Frames per second of a video.", default=DEFAULT_FPS)
    gpus: None = None
    guidance_parallel: None = None
    json: bool = False

    def check(self) -> None:
        """Raise `UserError` where gradio is not installed."""
        check_installed("gradio", "studio", "the studio needs gradio")
