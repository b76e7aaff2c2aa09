"""`chipsparse explain`: what a generation would do, without loading any weight."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from chipsparse.cli.errors import reported_errors
from chipsparse.cli.options import (
    MODEL,
    ConfigOption,
    DebugOption,
    DtypeOption,
    FramesOption,
    GuidanceOption,
    HeightOption,
    JsonOption,
    ModelOption,
    QualityOption,
    RamOption,
    StepsOption,
    VramOption,
    WidthOption,
)

EXAMPLE = (
    "Example: [bold]chipsparse explain --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --vram 24G[/bold]"
)


def explain(
    model: ModelOption = None,
    device: Annotated[
        str,
        typer.Option(
            help="cpu, cuda, cuda:N, or auto: a GPU, be it one that is not here.",
            rich_help_panel=MODEL,
        ),
    ] = "auto",
    dtype: DtypeOption = "auto",
    height: HeightOption = None,
    width: WidthOption = None,
    frames: FramesOption = None,
    steps: StepsOption = None,
    guidance_scale: GuidanceOption = None,
    config: ConfigOption = None,
    quality: QualityOption = None,
    vram: VramOption = None,
    ram: RamOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Tell what a generation would do: what runs sparse, how much memory, how much faster.

    Reads the model's configs only; no weight is loaded.
    """
    with reported_errors(debug=debug):
        # Imported here so that --help does not wait for torch and diffusers.
        from rich.console import Console

        from chipsparse.cli.explain_json import to_json
        from chipsparse.cli.explain_text import print_explanation
        from chipsparse.cli.explanation import explain as gather
        from chipsparse.cli.model import quiet_libraries
        from chipsparse.cli.progress import ProgressDisplay
        from chipsparse.cli.request import look_up, required_profile
        from chipsparse.cli.settings import CommonOptions

        options = CommonOptions(
            model=model,
            config=config,
            quality=quality,
            vram=vram,
            ram=ram,
            steps=steps,
            height=height,
            width=width,
            frames=frames,
            device=device,
            dtype=dtype,
            guidance_scale=guidance_scale,
            json=json,
            debug=debug,
        )
        with contextlib.redirect_stdout(sys.stderr):  # stdout carries the result and nothing else
            options.check()
            with ProgressDisplay() as display, quiet_libraries(debug=debug):
                found = look_up(options, display)
                explanation = gather(options, found, required_profile(options, found))
        if json:
            print(to_json(explanation))
        else:
            print_explanation(explanation, Console())
