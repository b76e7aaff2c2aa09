"""`chipsparse compare`: two files, or two configs, against each other."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from chipsparse.cli.errors import UserError, reported_errors
from chipsparse.cli.options import (
    OUTPUT,
    PICTURE,
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

EXAMPLE = "Example: [bold]chipsparse compare dense profile --count 16 -o worst.mp4[/bold]"


def compare(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="A file: .mp4, .webm, .gif, .png, a folder of .png. Or a config: dense (the stock "
            "model), profile (the model's own), one of its qualities such as fast, a bundled "
            "profile's name, or a .yaml file.",
            show_default=False,
        ),
    ],
    b: Annotated[
        str, typer.Argument(metavar="B", help="Another of the same kind.", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write A, B and a heat-map of their difference side by side: .mp4, .webm, .gif or "
            ".png. Of configs: the prompt with the lowest PSNR, both with their difference from "
            "dense.",
            show_default="none",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    amplify: Annotated[
        int | None,
        typer.Option(
            help="By how much the heat-map amplifies differences.",
            show_default="a power of two up to 64 that fits",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    fps: Annotated[
        int | None,
        typer.Option(
            help="Frames per second of the output.",
            show_default="that of the files, or 16",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    model: ModelOption = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="File with one prompt a line.",
            show_default="bundled ones",
            rich_help_panel=PICTURE,
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            help="How many of the prompts, at least 2.",
            show_default="all of the file, 8 of the bundled ones",
            rich_help_panel=PICTURE,
        ),
    ] = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    height: HeightOption = None,
    width: WidthOption = None,
    frames: FramesOption = None,
    steps: StepsOption = None,
    guidance_scale: GuidanceOption = None,
    vram: VramOption = None,
    ram: RamOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare two files, or two configs: PSNR, SSIM, LPIPS, flicker, and speed of configs.

    Files (one size and length) are compared frame by frame; lossy ones limit that (all but .png).

    Configs generate the prompts with the same seeds as dense does; each is compared with dense.
    """
    with reported_errors(debug=debug):
        # Imported here so that --help does not wait for torch and diffusers.
        from rich.console import Console

        from chipsparse.cli import compare_json, compare_text
        from chipsparse.cli.compare_configs import CompareOptions, compare_configs
        from chipsparse.cli.compare_files import compare_files
        from chipsparse.cli.compare_subjects import check_for_files, read_subjects
        from chipsparse.cli.media import DEFAULT_FPS
        from chipsparse.cli.option_checks import check_positive
        from chipsparse.cli.progress import ProgressDisplay

        quiet = contextlib.redirect_stdout(sys.stderr)  # stdout carries the result, nothing else
        subjects = read_subjects(a, b)
        check_positive("--amplify", amplify)
        check_positive("--fps", fps)
        if subjects[0].kind == "files":
            check_for_files(
                {
                    "--model": model,
                    "--prompts": prompts,
                    "--count": count,
                    "--seed": seed or None,
                    "--device": None if device == "auto" else device,
                    "--dtype": None if dtype == "auto" else dtype,
                    "--height": height,
                    "--width": width,
                    "--frames": frames,
                    "--steps": steps,
                    "--guidance-scale": guidance_scale,
                    "--vram": vram,
                    "--ram": ram,
                }
            )
            with quiet, ProgressDisplay() as display:
                files = compare_files(
                    Path(a), Path(b), output=output, factor=amplify, fps=fps, display=display
                )
            if json:
                print(compare_json.files_json(files))
            else:
                compare_text.print_files(files, Console())
            return
        options = CompareOptions(
            subjects=subjects,
            prompts=prompts,
            count=count,
            seed=seed,
            output=output,
            factor=amplify,
            fps=fps or DEFAULT_FPS,
            model=model,
            config=None,
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
        with quiet:
            configs = compare_configs(options)
        if json:
            print(compare_json.configs_json(configs))
        else:
            compare_text.print_configs(configs, Console())
        if configs.unwritten:
            raise UserError(configs.unwritten)
        if configs.exit_code:
            raise typer.Exit(configs.exit_code)
