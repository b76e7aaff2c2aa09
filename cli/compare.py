"""`chipsparse compare`: two files, or two configs, against each other; or a whole suite."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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

if TYPE_CHECKING:
    from chipsparse.cli.suite import Suite, SuiteOptions

SUITE = "Suite"
EXAMPLE = "Example: [bold]chipsparse compare dense profile --count 16 -o worst.mp4[/bold]"


def compare(
    a: Annotated[
        str | None,
        typer.Argument(
            metavar="A",
            help="A file: .mp4, .webm, .gif, .png, a folder of .png. Or a config: dense (the stock "
            "model), profile (the model's own), one of its qualities such as fast, a bundled "
            "profile's name, or a .yaml file.",
            show_default=False,
        ),
    ] = None,
    b: Annotated[
        str | None,
        typer.Argument(metavar="B", help="Another of the same kind.", show_default=False),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Instead of A and B: whether it holds for this model (a folder or a hub name). "
            "Dense, the floor (dense with another attention kernel), MagCache, SeaCache and the "
            "qualities of chipsparse, paired by prompt and seed. May be broken off: the same "
            "command goes on.",
            show_default=False,
            rich_help_panel=SUITE,
        ),
    ] = None,
    with_prompts: Annotated[
        bool,
        typer.Option(
            "--with-prompts",
            help="Also the texts of the prompts in suite.json, the file to send.",
            rich_help_panel=SUITE,
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write A, B and a heat-map of their difference side by side: .mp4, .webm, .gif or "
            ".png. Of configs: the prompt with the lowest PSNR, both with their difference from "
            "dense. Of a suite: the folder for everything.",
            show_default="none; suite-MODEL of a suite",
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
            "--count",
            "--num",
            help="How many of the prompts; of two configs at least 2.",
            show_default="all of the file, 8 of the bundled ones, 12 in a suite",
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
    """Compare two files, two configs, or a suite: PSNR, SSIM, LPIPS, flicker, and speed.

    Files (one size and length) are compared frame by frame; lossy ones limit that (all but .png).

    Configs generate the prompts with the same seeds as dense does; each is compared with dense.

    A suite tells in one command whether it holds for your model, and writes a page.
    """
    suites: list[SuiteOptions] = []
    with reported_errors(debug=debug, kept=lambda: _kept(suites)):
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
        check_positive("--amplify", amplify)
        check_positive("--fps", fps)
        common: dict[str, Any] = {
            "prompts": prompts,
            "count": count,
            "seed": seed,
            "output": output,
            "fps": fps or DEFAULT_FPS,
            "config": None,
            "vram": vram,
            "ram": ram,
            "steps": steps,
            "height": height,
            "width": width,
            "frames": frames,
            "device": device,
            "dtype": dtype,
            "guidance_scale": guidance_scale,
            "json": json,
            "debug": debug,
        }
        if suite is not None:
            _check_for_suite({"A": a, "--model": model, "--amplify": amplify})
            with quiet:
                found = _run_suite(suites, {**common, "model": suite, "with_prompts": with_prompts})
            _tell_suite(found, json=json)
            return
        if with_prompts:
            raise UserError("--with-prompts is about a suite; give --suite MODEL, too")
        if a is None or b is None:
            raise UserError(
                "give two files or two configs to compare, or a model with --suite; see --help"
            )
        subjects = read_subjects(a, b)
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
        options = CompareOptions(**common, subjects=subjects, factor=amplify, model=model)
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


def _check_for_suite(options: Mapping[str, object]) -> None:
    """Raises `UserError` where something is given that has no meaning for a suite."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise UserError(f"--suite MODEL compares what it compares; leave {given[0]} out")


def _run_suite(suites: list[SuiteOptions], options: Mapping[str, Any]) -> Suite:
    """Runs a suite; notes first what it is, for what is said where it is broken off."""
    from chipsparse.cli.suite import SuiteOptions, run_suite

    suites.append(SuiteOptions(**options))
    return run_suite(suites[0])


def _tell_suite(suite: Suite, *, json: bool) -> None:
    from rich.console import Console

    from chipsparse.cli.suite import to_send
    from chipsparse.cli.suite_text import print_suite

    if json:
        print(to_send(suite.content), end="")
    else:
        print_suite(suite, Console())


def _kept(suites: list[SuiteOptions]) -> str:
    """What an interruption leaves."""
    return suites[0].kept if suites else "nothing was written"
