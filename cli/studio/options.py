"""The options of `studio`: the first values of the page, and its address."""

from __future__ import annotations

import importlib.util
import socket
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from chipsparse.cli.errors import UserError
from chipsparse.cli.options import (
    DEFAULT_FPS,
    Fps,
    GenerationOptions,
    Seed,
    output_option,
    seed_option,
)

HOST, DEFAULT_PORT = "127.0.0.1", 7860


@dataclass(frozen=True, kw_only=True)
class StudioOptions(GenerationOptions):
    """The options of `studio`."""

    port: Annotated[int, Interval(ge=0, le=65535)] = output_option(
        help="Port of the page, which only this machine can reach; 0 takes a free one.",
        default=DEFAULT_PORT,
    )
    browser: bool = output_option(help="Also open the page in the browser.", default=False)
    seed: Seed = seed_option()
    fps: Fps = output_option(help="Frames per second of a video.", default=DEFAULT_FPS)
    gpus: None = None
    guidance_parallel: None = None
    json: bool = False

    def check(self) -> None:
        """Raise `UserError` where Gradio is missing, or another program has the port."""
        if importlib.util.find_spec("gradio") is None:
            raise UserError(
                "the studio needs gradio, which is not installed: pip install 'chipsparse[studio]'"
            )
        self.free_port()

    def free_port(self) -> int:
        """Return the port, or a free one for 0; raise `UserError` where it is taken."""
        with socket.socket() as probe:
            # As the server does, so that a port whose last connections linger counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, self.port))
            except OSError as error:
                raise UserError(
                    f"--port {self.port} is in use or not allowed here; name another one, or 0 "
                    "for any that is free"
                ) from error
            return int(probe.getsockname()[1])

    def kept(self) -> str:
        """Return what an interruption leaves, in words."""
        return "the page is closed"
