"""`chipsparse generate`: a video or an image from a prompt."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from chipsparse.cli.errors import reported_errors
from chipsparse.cli.options import (
    OUTPUT,
    PICTURE,
    SPARSITY,
    ConfigOption,
    DebugOption,
    DeviceOption,
    DtypeOption,
    FramesOption,
    GuidanceOption,
    HeightOption,
    JsonOption,
    ModelOption,
    RamOption,
    SeedOption,
    StepsOption,
    VramOption,
    WidthOption,
)

EXAMPLE = 'Example: [bold]chipsparse generate "a red circle moves left" -o out.mp4 --compare[/bold]'


def generate(
    prompt: Annotated[str, typer.Argument(help="What to show, in words.", show_default=False)],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="File to write: .mp4, .webm, .gif, or .png (numbered files for several frames). "
            "Models of images write .png.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ],
    model: ModelOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    height: HeightOption = None,
    width: WidthOption = None,
    frames: FramesOption = None,
    steps: StepsOption = None,
    guidance_scale: GuidanceOption = None,
    negative_prompt: Annotated[
        str | None,
        typer.Option(help="What not to show.", show_default="none", rich_help_panel=PICTURE),
    ] = None,
    seed: SeedOption = 0,
    config: ConfigOption = None,
    vram: VramOption = None,
    ram: RamOption = None,
    dense: Annotated[
        bool,
        typer.Option("--dense", help="Run the unpatched model.", rich_help_panel=SPARSITY),
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Also run the unpatched model with the same seed; report speed-up, PSNR and SSIM, "
            "and write NAME-dense and, side by side, NAME-compare beside the output.",
            rich_help_panel=SPARSITY,
        ),
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Fail, before anything is written, where anything would run dense although the "
            "profile wants it sparse.",
            rich_help_panel=SPARSITY,
        ),
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            help="JSON file for all that each step and layer of the sparse run did, with its time; "
            "written also where the run fails.",
            show_default="none",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    fps: Annotated[
        int, typer.Option(help="Frames per second of a video.", rich_help_panel=OUTPUT)
    ] = 16,
    crf: Annotated[
        int | None,
        typer.Option(
            help="Constant rate factor of the encoder of a video, 0 to 51 for .mp4 and to 63 for "
            ".webm: less is better and larger.",
            show_default="visually lossless",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Make a video or an image from a prompt."""
    outcome = None

    def kept() -> str:
        return "nothing was written" if outcome is None else "everything was written"

    with reported_errors(debug=debug, kept=kept):
        # Imported here so that --help does not wait for torch and diffusers.
        from rich.console import Console

        from chipsparse.cli.job import run
        from chipsparse.cli.settings import Options
        from chipsparse.cli.summary import print_summary, to_json

        options = Options(
            prompt=prompt,
            output=output,
            model=model,
            config=config,
            vram=vram,
            ram=ram,
            steps=steps,
            seed=seed,
            height=height,
            width=width,
            frames=frames,
            device=device,
            dtype=dtype,
            negative_prompt=negative_prompt,
            guidance_scale=guidance_scale,
            fps=fps,
            crf=crf,
            dense=dense,
            compare=compare,
            strict=strict,
            report=report,
            json=json,
            debug=debug,
        )
        with contextlib.redirect_stdout(sys.stderr):  # stdout carries the result and nothing else
            outcome = run(options)
        if json:
            print(to_json(outcome))
        else:
            print_summary(outcome, Console())
