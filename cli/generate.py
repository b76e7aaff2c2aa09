"""`chipsparse generate`: videos or images from prompts."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chipsparse.cli.errors import EXIT_FAILED, reported_errors
from chipsparse.cli.options import (
    MODEL,
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
    QualityOption,
    RamOption,
    SeedOption,
    StepsOption,
    VramOption,
    WidthOption,
)

if TYPE_CHECKING:
    from chipsparse.cli.settings import Options
    from chipsparse.cli.summary import Outcome

EXAMPLE = 'Example: [bold]chipsparse generate "a red circle moves left" -o out.mp4 --compare[/bold]'


def generate(
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
    prompt: Annotated[
        str | None,
        typer.Argument(help="What to show, in words; or give --prompts.", show_default=False),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="File of prompts, a line each; empty lines and those with # in front are left "
            "out. NAME-000, NAME-001, ... are written, in the order of the file.",
            show_default="none",
            rich_help_panel=PICTURE,
        ),
    ] = None,
    num: Annotated[
        int | None,
        typer.Option(
            help="Seeds for each prompt, from --seed on. NAME-000, NAME-001, ... are written: all "
            "seeds of the first prompt, then those of the next one.",
            show_default="1",
            rich_help_panel=PICTURE,
        ),
    ] = None,
    image: Annotated[
        Path | None,
        typer.Option(
            help="Picture to start from, where the model takes one; it is scaled and cut to the "
            "size that is made, which has its shape unless --height and --width say otherwise.",
            show_default="none",
            rich_help_panel=PICTURE,
        ),
    ] = None,
    strength: Annotated[
        float | None,
        typer.Option(
            help="How far to go from the picture of --image: 1 is all the way.",
            show_default="the pipeline's own",
            rich_help_panel=PICTURE,
        ),
    ] = None,
    model: ModelOption = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH[:SCALE]",
            help="LoRA to load: a .safetensors file or a folder with one; may be given several "
            "times.",
            show_default="none",
            rich_help_panel=MODEL,
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            help="Another scheduler of diffusers, such as UniPC or DPMSolverMultistep, with the "
            "model's config.",
            show_default="the model's own",
            rich_help_panel=MODEL,
        ),
    ] = None,
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
    quality: QualityOption = None,
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
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="Also tell which kernels ran, and why others did not.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Make a video or an image from a prompt, or a series of them."""
    outcomes: list[Outcome] = []
    many = prompts is not None or num is not None
    with reported_errors(debug=debug, kept=lambda: _kept(outcomes, many=many)):
        from chipsparse.cli.series import typed_prompt
        from chipsparse.cli.settings import Options

        options = Options(
            prompt=None if prompt is None else typed_prompt(prompt),
            prompts=prompts,
            num=num,
            image=image,
            strength=strength,
            lora=tuple(lora or ()),
            scheduler=scheduler,
            output=output,
            model=model,
            config=config,
            quality=quality,
            vram=vram,
            ram=ram,
            steps=steps,
            seed=seed,
            height=height,
            width=width,
            frames=frames,
            device=device,
            dtype=dtype,
            negative_prompt=None if negative_prompt is None else typed_prompt(negative_prompt),
            guidance_scale=guidance_scale,
            fps=fps,
            crf=crf,
            dense=dense,
            compare=compare,
            strict=strict,
            report=report,
            json=json,
            verbose=verbose,
            debug=debug,
        )
        options.check()
        # Imported here so that neither --help nor a simple mistake waits for torch and diffusers.
        from chipsparse.cli.job import run

        try:
            with contextlib.redirect_stdout(sys.stderr):  # stdout carries the result, nothing else
                run(options, outcomes)
        finally:  # what was made of a series that is broken off
            if outcomes:
                _tell(outcomes, options)
        if any(outcome.error is not None for outcome in outcomes):
            raise typer.Exit(EXIT_FAILED)


def _tell(outcomes: list[Outcome], options: Options) -> None:
    from rich.console import Console

    from chipsparse.cli.generate_json import to_json
    from chipsparse.cli.summary import print_series, print_summary

    if options.json:
        print(to_json(outcomes, many=options.many))
    elif options.many:
        asked = len(options.items)
        print_series(outcomes, Console(), asked=asked, verbose=options.verbose)
    else:
        print_summary(outcomes[0], Console(), verbose=options.verbose)


def _kept(outcomes: list[Outcome], *, many: bool) -> str:
    """What an interruption leaves."""
    written = sum(outcome.error is None for outcome in outcomes)
    if not written:
        return "nothing was written"
    if not many:
        return "everything was written"
    return f"{written} of the series {'was' if written == 1 else 'were'} written"
