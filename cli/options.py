"""Options that several commands share, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PICTURE = "Picture"
MODEL = "Model"
SPARSITY = "Sparsity"
OUTPUT = "Output"
FROM_PROFILE = "from the profile"

ModelOption = Annotated[
    str | None,
    typer.Option(
        help="Model folder in diffusers format, or a Hugging Face hub name.",
        show_default="the bundled tiny model",
        rich_help_panel=MODEL,
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(help="cpu, cuda, cuda:N, or auto: a GPU if there is one.", rich_help_panel=MODEL),
]
DtypeOption = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16, float16, or auto: bfloat16 on a GPU, float32 on a CPU.",
        rich_help_panel=MODEL,
    ),
]
HeightOption = Annotated[
    int | None,
    typer.Option(help="Height in pixels.", show_default=FROM_PROFILE, rich_help_panel=PICTURE),
]
WidthOption = Annotated[
    int | None,
    typer.Option(help="Width in pixels.", show_default=FROM_PROFILE, rich_help_panel=PICTURE),
]
FramesOption = Annotated[
    int | None,
    typer.Option(
        help="Number of frames; models of images have none.",
        show_default=FROM_PROFILE,
        rich_help_panel=PICTURE,
    ),
]
StepsOption = Annotated[
    int | None,
    typer.Option(
        help="Number of denoising steps.", show_default=FROM_PROFILE, rich_help_panel=PICTURE
    ),
]
GuidanceOption = Annotated[
    float | None,
    typer.Option(
        help="How closely to follow the prompt; 1 turns guidance off.",
        show_default=FROM_PROFILE,
        rich_help_panel=PICTURE,
    ),
]
SeedOption = Annotated[
    int,
    typer.Option(
        help="Seed of the noise; the same one gives the same result.", rich_help_panel=PICTURE
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        help="Profile (YAML) that says what is computed when.",
        show_default="the model's own",
        rich_help_panel=SPARSITY,
    ),
]
QualityOption = Annotated[
    str | None,
    typer.Option(
        help="Quality of the profile: faithful (closest to dense), balanced, fast, or published "
        "(few full steps, all others sparse).",
        show_default="balanced",
        rich_help_panel=SPARSITY,
    ),
]
VramOption = Annotated[
    str | None,
    typer.Option(
        help="GPU memory for all, weights included, such as 24G.",
        show_default="what is free",
        rich_help_panel=SPARSITY,
    ),
]
RamOption = Annotated[
    str | None,
    typer.Option(
        help="Host memory for caches, such as 64G.",
        show_default="most of what is free",
        rich_help_panel=SPARSITY,
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object instead.", rich_help_panel=OUTPUT),
]
DebugOption = Annotated[
    bool,
    typer.Option(
        "--debug",
        help="Show the traceback of an error, and the libraries' own messages.",
        rich_help_panel=OUTPUT,
    ),
]
