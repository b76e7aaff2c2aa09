"""`chipsparse batch`: a file of prompts, on all GPUs of a machine or of a Ray cluster."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from chipsparse.cli.errors import EXIT_FAILED, UserError
from chipsparse.cli.options import (
    REQUIRED,
    Check,
    GenerateOptions,
    argument,
    check_count,
    check_positive,
    one_of,
    option,
    output_option,
)
from chipsparse.cli.results import results_alone, tell

if TYPE_CHECKING:
    from chipsparse.cli.batch.prompt_file import Line

EXAMPLE = "Example: [bold]chipsparse batch prompts.csv -o out --engine ray[/bold]"
ACCELERATE, RAY = ENGINES = ("accelerate", "ray")
FORMATS = ("mp4", "webm", "gif", "png")
worker_option = partial(option, panel="Workers")


def _check_engine(engine: str) -> str:
    if engine not in ENGINES:
        raise ValueError(f"is not known; use {' or '.join(ENGINES)}")
    if engine == RAY and importlib.util.find_spec("ray") is None:
        raise ValueError("needs Ray, which is not installed: pip install 'chipsparse[ray]'")
    return engine


@dataclass(frozen=True, kw_only=True)
class BatchOptions(GenerateOptions):
    """What the user typed for `batch`: options of `generate` count where a line has no own."""

    prompts: Path = argument(
        help="A prompt a line, CSV with a column prompt, or JSON lines (.jsonl). Other columns and "
        "names are settings of the line, called as the options are: seed, height, quality, ...",
        default=REQUIRED,
        metavar="FILE",
    )
    output: Path = output_option(
        "-o",
        help="Folder to fill. What is there already is not made again.",
        default=REQUIRED,
        shown=False,
    )
    format: str | None = output_option(
        help="mp4, webm or gif for videos; images are png.",
        shown="mp4, or png of images",
        check=one_of(*FORMATS),
    )
    engine: str = worker_option(
        help="accelerate: processes of this machine, or of `accelerate launch`. ray: actors of the "
        "Ray cluster that RAY_ADDRESS names, else of this machine.",
        default=ACCELERATE,
        check=Check(_check_engine),
    )
    workers: int | None = worker_option(
        help="Pipelines that are loaded and generate side by side.",
        shown="one for each --gpus-per-job GPUs; one on a CPU",
        check=check_positive,
    )
    gpus_per_job: int = worker_option(
        help="GPUs that make a video together; with --device cpu so many processes.",
        default=1,
        check=check_positive,
    )
    tries: int = worker_option(
        help="How often a prompt is tried whose worker ends or fails. What is wrong with the "
        "prompt itself is not tried again.",
        default=2,
        check=check_positive,
    )
    prompt: None = None
    gpus: None = None
    compare: bool = False
    report: None = None
    verbose: bool = False

    def check(self) -> None:
        """Raises `UserError` for what is wrong with any model and on any device."""
        # Imported here so that --help does not wait for torch.
        from chipsparse.cli.media.write import check_writable
        from chipsparse.cli.ranks import shared_by

        shared_by(self.gpus_per_job, self.guidance_parallel, option="--gpus-per-job")
        if self.output.exists() and not self.output.is_dir():
            raise UserError(f"--output {self.output} is a file; name a folder")
        if not self.output.exists():  # else files in it would be named as the option's
            check_writable("--output", self.output)
        _ = self.lines  # which raises for those that are wrong

    @cached_property
    def lines(self) -> list[Line]:
        """The prompts of the file; raises `UserError` with all bad lines."""
        from chipsparse.cli.batch.prompt_file import read_lines

        known: dict[str, str] = {}  # many lines have the same settings

        def mistake(own: Mapping[str, Any]) -> str:
            key = repr(own)
            if key not in known:
                known[key] = _mistake(self.of_line(own))
            return known[key]

        found = read_lines(self.prompts, mistake)
        nums = (line.settings.get("num", self.num) or 1 for line in found)
        check_count(str(self.prompts), sum(nums))
        return found

    def of_line(self, settings: Mapping[str, Any]) -> GenerateOptions:
        """The options of `generate` that make a line's prompts, which are not in them."""
        shared = {
            each.name: getattr(self, each.name) for each in dataclasses.fields(GenerateOptions)
        }
        folder = self.output if self.output.is_dir() else self.output.parent
        settled = {
            "prompt": "",
            "prompts": None,
            "output": folder / f"clip.{self.format or 'mp4'}",
            "gpus": self.gpus_per_job if self.gpus_per_job > 1 else None,
        }
        return GenerateOptions(**{**shared, **settled, **settings})

    def kept(self) -> str:
        """What an interruption leaves."""
        return "what was finished is in the folder; the same command goes on"


def _mistake(options: GenerateOptions) -> str:
    """What is wrong with a line's options; empty where nothing is."""
    try:
        options.checked()
    except UserError as error:
        return str(error)
    return ""


def batch(options: BatchOptions) -> None:
    """Make a folder of videos or images from a file of prompts, on many GPUs.

    Each file is named by a digest of its prompt, seed and settings, so that the same command goes
    on where it was broken off. manifest.jsonl says what each of them is, index.html shows them.
    """
    # Imported here so that neither --help nor a simple mistake waits for torch and diffusers.
    from chipsparse.cli.batch.job import run_batch
    from chipsparse.cli.batch.text import print_batch
    from chipsparse.cli.ranks import Rank, launched

    here = launched() or Rank()
    with results_alone():
        made = run_batch(options, here)
    if not here.writes:
        return
    tell(made, print_batch, as_json=options.json)
    if made.failed:
        raise typer.Exit(EXIT_FAILED)
