"""`chipsparse generate`: videos or images from prompts."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from chipsparse.cli.errors import EXIT_FAILED, UserError, reported_errors
from chipsparse.cli.generate.series import Item, series
from chipsparse.cli.generation_options import (
    GenerationOptions,
    generation_option,
    seed_option,
    sparsity_option,
)
from chipsparse.cli.option_checks import (
    DEFAULT_FPS,
    check_count,
    check_fps,
    check_num,
    check_seed,
    read_fps,
)
from chipsparse.cli.options import REQUIRED, argument, model_option, output_option
from chipsparse.cli.prompts import read_prompts, typed_prompt
from chipsparse.cli.results import results_alone, tell

if TYPE_CHECKING:
    from PIL.Image import Image

    from chipsparse.cli.generate.summary import Outcome
    from chipsparse.cli.model.lora import Lora

EXAMPLE = 'Example: [bold]chipsparse generate "a red circle moves left" -o out.mp4 --compare[/bold]'


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(GenerationOptions):
    """What the user typed for `generate`; None where an option was left out."""

    output: Path = output_option(
        "-o",
        help="File to write: .mp4, .webm, .gif, or .png (numbered files for several frames). "
        "Models of images write .png.",
        default=REQUIRED,
        shown=False,
    )
    prompt: str | None = argument(
        help="What to show, in words; or give --prompts.", read=typed_prompt
    )
    prompts: Path | None = generation_option(
        help="File of prompts, a line each; empty lines and those with # in front are left "
        "out. NAME-000, NAME-001, ... are written, in the order of the file.",
        shown="none",
    )
    num: int | None = generation_option(
        help="Seeds for each prompt, from --seed on: all of the first prompt, then those of the "
        "next one.",
        shown="1",
        check=check_num,
    )
    image: Path | None = generation_option(
        help="Image to start from, where the model takes one; it is scaled and cut to the "
        "size that is made, which has its shape unless --height and --width say otherwise.",
        shown="none",
    )
    strength: float | None = generation_option(
        help="How far to go from the image of --image: 1 is all the way.",
        shown="the pipeline's own",
    )
    lora: list[str] | None = model_option(
        help="LoRA to load: a .safetensors file or a folder with one; may be given several times.",
        shown="none",
        metavar="PATH[:SCALE]",
        before="device",
    )
    scheduler: str | None = model_option(
        help="Another scheduler of diffusers, such as UniPC or DPMSolverMultistep, with the "
        "model's config.",
        shown="the model's own",
        before="device",
    )
    seed: int = seed_option(before="config")
    dense: bool = sparsity_option(help="Run the unpatched model.", default=False, before="json")
    compare: bool = sparsity_option(
        help="Also run the unpatched model with the same seed; report speed-up, PSNR and SSIM, "
        "and write NAME-dense and, side by side, NAME-compare beside the output.",
        default=False,
        before="json",
    )
    strict: bool = sparsity_option(
        help="Fail, before anything is written, where anything would run dense although the "
        "profile wants it sparse.",
        default=False,
        before="json",
    )
    report: Path | None = output_option(
        help="JSON file for all that each step and layer of the sparse run did, with its time; "
        "written also where the run fails.",
        shown="none",
    )
    fps: float = output_option(
        help="Frames per second of a video.", default=DEFAULT_FPS, check=check_fps, read=read_fps
    )
    crf: int | None = output_option(
        help="Constant rate factor of the encoder of a video, 0 to 51 for .mp4 and to 63 for "
        ".webm: less is better and larger.",
        shown="visually lossless",
    )
    verbose: bool = output_option(
        "-v",
        help="Also tell which kernels ran, and why others did not.",
        default=False,
        before="debug",
    )

    @property
    def mode(self) -> Literal["dense", "sparse", "compare"]:
        """Which videos are made: the dense one, the sparse one, or both."""
        return "dense" if self.dense else "compare" if self.compare else "sparse"

    @property
    def given_fps(self) -> float | None:
        """What ``--fps`` says; None where it is as if left out."""
        return None if self.fps == DEFAULT_FPS else self.fps

    @property
    def many(self) -> bool:
        """Whether a series is asked for, be it one of a single clip."""
        return self.prompts is not None or self.num is not None

    @cached_property
    def items(self) -> list[Item]:
        """What is to be made; raises `UserError`."""
        if (self.prompt is None) == (self.prompts is None):
            both = "not both" if self.prompt is not None else "got neither"
            raise UserError(f"give a prompt, or a file of them with --prompts; {both}")
        texts = [self.prompt or ""] if self.prompts is None else read_prompts(self.prompts)
        check_count(f"--prompts {self.prompts}", len(texts) * (self.num or 1))
        return series(
            texts,
            seed=self.seed,
            num=self.num,
            output=self.output,
            report=self.report,
            many=self.many,
        )

    @cached_property
    def input_image(self) -> Image | None:
        """What ``--image`` shows, in its own size; raises `UserError`."""
        from chipsparse.cli.generation.input_image import read_image

        return None if self.image is None else read_image(self.image)

    @cached_property
    def loras(self) -> list[Lora]:
        """What ``--lora`` names; raises `UserError`."""
        from chipsparse.cli.model.lora import read_lora

        return [read_lora(text) for text in self.lora or ()]

    def check(self) -> None:
        """Raises `UserError` for what is wrong with any model and on any device."""
        # Imported here so that --help does not wait for numpy and PIL.
        from chipsparse.cli.media.output_names import check_inputs_stay
        from chipsparse.cli.media.report_file import check_file
        from chipsparse.cli.media.write import check_output

        super().check()
        if self.dense and self.compare:
            raise UserError(
                "--dense and --compare exclude each other: --compare makes the dense video too"
            )
        if self.dense:
            sparse = ("--quality", "--strict", "--report", "--vram", "--ram")
            self.refuse(*sparse, why="is about the sparse run, which --dense leaves out")
        check_seed("--seed", self.seed, count=self.num or 1)
        if self.dense and self.gpus is not None and self.gpus > 1:
            raise UserError("several GPUs share the sparse run, which --dense leaves out")
        if self.image is None:
            self.refuse("--strength", why="is about the image of --image, and there is none")
        if self.strength is not None and not 0 < self.strength <= 1:
            raise UserError(f"--strength {self.strength:g} must be above 0 and at most 1")
        also = ("dense", "compare") if self.compare else ()
        inputs = [self.config, self.prompts, self.image, *(lora.file for lora in self.loras)]
        for item in self.items:
            check_output(item.output, fps=self.given_fps, crf=self.crf, also=also)
            check_inputs_stay("--output", item.output, inputs)
            if item.report is not None:
                check_file("--report", item.report, ".json")
                check_inputs_stay("--report", item.report, inputs)
        _ = self.input_image  # which raises where it cannot be read


def generate(options: GenerateOptions) -> None:
    """Make a video or an image from a prompt, or a series of them."""
    # Imported here so that neither --help nor a simple mistake waits for torch and diffusers.
    from chipsparse.cli.generate.prepared import check_options_shared
    from chipsparse.cli.ranks.several import taking_part

    process = taking_part("generate", options, check_options_shared)
    if process is None:
        return
    from chipsparse.cli.generate.job import run

    outcomes: list[Outcome] = []
    with reported_errors(debug=options.debug, kept=lambda: _kept(outcomes, many=options.many)):
        try:
            with results_alone(), process.after_first():
                run(options, outcomes, process)
        finally:  # what was made of a series that is broken off
            if outcomes and process.writes:
                _tell(outcomes, options)
        if any(outcome.error is not None for outcome in outcomes):
            raise typer.Exit(EXIT_FAILED)


def _tell(outcomes: list[Outcome], options: GenerateOptions) -> None:
    from chipsparse.cli.generate.summary import print_series, print_summary

    if options.many:
        asked = len(options.items)
        page = functools.partial(print_series, asked=asked, verbose=options.verbose)
        tell(outcomes, page, as_json=options.json)
    else:
        alone = functools.partial(print_summary, verbose=options.verbose)
        tell(outcomes[0], alone, as_json=options.json)


def _kept(outcomes: list[Outcome], *, many: bool) -> str:
    """What an interruption leaves."""
    written = sum(outcome.error is None for outcome in outcomes)
    if not written:
        return "nothing was written"
    if not many:
        return "everything was written"
    return f"{written} of the series {'was' if written == 1 else 'were'} written"
