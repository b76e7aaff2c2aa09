"""`chipsparse bench`: times of kernels and denoising steps against dense, on this machine."""

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
    DeviceOption,
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
    "Example: [bold]chipsparse bench --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --kernels[/bold]"
)


def bench(
    model: ModelOption = None,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels",
            help="Only one layer's attention and MLP, at the model's sizes; needs no weights.",
            rich_help_panel=MODEL,
        ),
    ] = False,
    random_weights: Annotated[
        bool,
        typer.Option(
            "--random-weights",
            help="Make the model from its configs alone; its times are the same.",
            rich_help_panel=MODEL,
        ),
    ] = False,
    device: DeviceOption = "auto",
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
    """Measure on this machine: a layer's operations and whole denoising steps, against dense.

    Every time is a median after a warm-up, and dense runs in the same process.
    """
    with reported_errors(debug=debug):
        # Imported here so that --help does not wait for torch and diffusers.
        from rich.console import Console

        from chipsparse.cli.bench_json import to_json
        from chipsparse.cli.bench_text import print_benchmark
        from chipsparse.cli.benchmark import BenchOptions, run_benchmark

        options = BenchOptions(
            kernels=kernels,
            random_weights=random_weights,
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
            found = run_benchmark(options)
        if json:
            print(to_json(found))
        else:
            print_benchmark(found, Console())
