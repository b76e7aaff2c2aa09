"""`chipsparse tune`: a profile that meets a target of quality or time."""

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
    StepsOption,
    VramOption,
    WidthOption,
)

EXAMPLE = "Example: [bold]chipsparse tune --min-psnr 30 -o profile.yaml[/bold]"
TARGET = "Target: one or more of these"
MEASURING = "Measuring"


def tune(
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="Profile to write, for [bold]generate --config[/bold].",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ],
    min_psnr: Annotated[
        float | None,
        typer.Option(
            help="PSNR against dense, in dB, of every held-out prompt, as fast as possible.",
            show_default=False,
            rich_help_panel=TARGET,
        ),
    ] = None,
    min_ssim: Annotated[
        float | None,
        typer.Option(
            help="The same with SSIM.",
            show_default=False,
            rich_help_panel=TARGET,
        ),
    ] = None,
    max_lpips: Annotated[
        float | None,
        typer.Option(
            help="The same with LPIPS, where the extra lpips and AlexNet's weights are installed.",
            show_default=False,
            rich_help_panel=TARGET,
        ),
    ] = None,
    min_speedup: Annotated[
        float | None,
        typer.Option(
            help="Dense over sparse time of a generation, as close to dense as possible.",
            show_default=False,
            rich_help_panel=TARGET,
        ),
    ] = None,
    max_seconds: Annotated[
        float | None,
        typer.Option(
            help="Time of a generation on this device, likewise.",
            show_default=False,
            rich_help_panel=TARGET,
        ),
    ] = None,
    model: ModelOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Text file with one prompt per line; the first ones calibrate, the next ones "
            "verify, and the seed of each is its number from 0.",
            show_default="bundled prompts",
            rich_help_panel=MEASURING,
        ),
    ] = None,
    calibration_prompts: Annotated[
        int, typer.Option(help="Prompts to calibrate with.", rich_help_panel=MEASURING)
    ] = 2,
    held_out_prompts: Annotated[
        int, typer.Option(help="Other prompts to verify on.", rich_help_panel=MEASURING)
    ] = 4,
    budget: Annotated[
        float,
        typer.Option(
            help="What the search may take, in the time of dense generations.",
            rich_help_panel=MEASURING,
        ),
    ] = 30,
    results: Annotated[
        Path | None,
        typer.Option(
            help="JSON file that keeps every measurement: an interrupted run goes on from it, and "
            "another target uses them, too. The dense pictures lie in a folder beside it, "
            "which may be deleted.",
            show_default="the output's name with .tune.json",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    height: HeightOption = None,
    width: WidthOption = None,
    frames: FramesOption = None,
    steps: StepsOption = None,
    guidance_scale: GuidanceOption = None,
    negative_prompt: Annotated[
        str | None,
        typer.Option(help="What not to show.", show_default="none", rich_help_panel=PICTURE),
    ] = None,
    config: ConfigOption = None,
    vram: VramOption = None,
    ram: RamOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Find a schedule that meets a target of quality or speed, and write it as a profile.

    Scores on a few dense generations which steps can be left out, generates with the schedules
    that look best, each as fast as the others on this device, and verifies the winner on other
    prompts.
    """

    def kept() -> str:
        file = results or output.with_suffix(".tune.json")
        known = f"what was measured is in {file}: run it again"
        return known if file.is_file() else "nothing was measured"

    with reported_errors(debug=debug, kept=kept):
        # Imported here so that --help does not wait for torch and diffusers.
        from rich.console import Console

        from chipsparse.cli.tune_job import TuneOptions, run
        from chipsparse.cli.tune_summary import print_summary, to_json

        options = TuneOptions(
            output=output,
            min_psnr=min_psnr,
            min_ssim=min_ssim,
            max_lpips=max_lpips,
            min_speedup=min_speedup,
            max_seconds=max_seconds,
            model=model,
            config=config,
            vram=vram,
            ram=ram,
            steps=steps,
            height=height,
            width=width,
            frames=frames,
            device=device,
            dtype=dtype,
            negative_prompt=negative_prompt,
            guidance_scale=guidance_scale,
            prompts=prompts,
            calibration_prompts=calibration_prompts,
            held_out_prompts=held_out_prompts,
            budget=budget,
            results=results,
            json=json,
            debug=debug,
        )
        with contextlib.redirect_stdout(sys.stderr):  # stdout carries the result and nothing else
            tuned = run(options)
        if json:
            print(to_json(tuned))
        else:
            print_summary(tuned, Console())
