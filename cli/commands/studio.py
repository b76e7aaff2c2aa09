"""`chipsparse studio`: a page in the browser on which one sees what sparse steps do."""

from __future__ import annotations

from dataclasses import dataclass

from annotated_types import Interval

from chipsparse.cli.options import (
    DEFAULT_FPS,
    GenerationOptions,
    check_fps,
    output_option,
    read_fps,
    seed_option,
)
from chipsparse.cli.results import results_alone

EXAMPLE = "Example: [bold]chipsparse studio --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers[/bold]"
DEFAULT_PORT = 7860
LAST_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class StudioOptions(GenerationOptions):
    """What the user typed for `studio`: what the page begins with, and where it is."""

    port: int = output_option(
        help="Port of the page, which only this machine can reach; 0 takes a free one.",
        default=DEFAULT_PORT,
        check=Interval(ge=0, le=LAST_PORT),
    )
    browser: bool = output_option(help="Also open the page in the browser.", default=False)
    seed: int = seed_option()
    fps: float = output_option(
        help="Frames per second of a video.", default=DEFAULT_FPS, check=check_fps, read=read_fps
    )
    gpus: None = None
    guidance_parallel: None = None
    json: bool = False

    def kept(self) -> str:
        """What an interruption leaves."""
        return "the page is closed"


def studio(options: StudioOptions) -> None:
    """Open a page on this machine: choose, watch the steps, see dense beside sparse.

    Model, prompt, seed and quality are chosen there; the options are what it begins with.
    Nothing leaves the machine: no analytics, no share link. Ctrl-C ends it.
    """
    # Imported here so that --help does not wait for torch and diffusers.
    from chipsparse.cli.studio.serve import check_library, check_port_is_free, serve

    check_library()
    port = check_port_is_free(options.port)
    with results_alone():
        serve(options, port)
