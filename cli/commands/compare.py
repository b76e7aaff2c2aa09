"""`chipsparse compare`: two files, or two configs, against each other; or a whole suite."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from chipsparse.cli.errors import UserError
from chipsparse.cli.generation_options import GenerationOptions, generation_option, seed_option
from chipsparse.cli.option_checks import (
    DEFAULT_FPS,
    check_fps,
    check_model,
    check_positive,
    read_fps,
)
from chipsparse.cli.options import argument, option, output_option
from chipsparse.cli.results import results_alone, tell

if TYPE_CHECKING:
    from chipsparse.cli.compare.subjects import Subject

suite_option = partial(option, panel="Suite")
OF_FILES = ("A", "B", "--output", "--amplify", "--fps", "--json", "--debug")
NOT_OF_SUITES = ("A", "B", "--model", "--amplify")
EXAMPLE = "Example: [bold]chipsparse compare dense profile --count 16 -o worst.mp4[/bold]"


@dataclass(frozen=True, kw_only=True)
class CompareOptions(GenerationOptions):
    """What the user typed for `compare`; None where an option was left out.

    `config` and `quality` are those of a side while its profile is looked for.
    """

    a: str | None = argument(
        help="A file: .mp4, .webm, .gif, .png, a folder of .png. Or a config: dense (the stock "
        "model), profile (the model's own), one of its qualities such as fast, a bundled "
        "profile's name, or a .yaml file.",
        metavar="A",
    )
    b: str | None = argument(help="Another of the same kind.", metavar="B")
    suite: str | None = suite_option(
        help="Instead of A and B: whether it holds for this model (a folder or a hub name). "
        "Dense, the floor (dense with another attention kernel), MagCache, SeaCache and the "
        "qualities of chipsparse, paired by prompt and seed. May be broken off: the same "
        "command goes on.",
        shown=False,
        metavar="MODEL",
        check=check_model,
    )
    with_prompts: bool = suite_option(
        help="Also the texts of the prompts in suite.json, the file to send.", default=False
    )
    output: Path | None = output_option(
        "-o",
        help="Write A, B and a heat-map of their difference side by side: .mp4, .webm, .gif or "
        ".png. Of configs: the prompt with the lowest PSNR, both with their difference from "
        "dense. Of a suite: the folder for everything.",
        shown="none; suite-MODEL of a suite",
    )
    amplify: int | None = output_option(
        help="By how much the heat-map amplifies differences.",
        shown="a power of two up to 64 that fits",
        check=check_positive,
    )
    fps: float | None = output_option(
        help="Frames per second of the output.",
        shown="that of the files, or 16",
        check=check_fps,
        read=read_fps,
    )
    prompts: Path | None = generation_option(
        help="File with one prompt a line.", shown="bundled ones", before="height"
    )
    count: int | None = generation_option(
        "--num",
        help="How many of the prompts; of two configs at least 2.",
        shown="all of the file, 8 of the bundled ones, 12 in a suite",
        before="height",
    )
    seed: int = seed_option(before="height")
    negative_prompt: None = None
    config: Path | None = None
    quality: str | None = None

    @cached_property
    def subjects(self) -> tuple[Subject, Subject]:
        """A and B; raises `UserError` where they are no pair."""
        from chipsparse.cli.compare.subjects import read_subjects

        if self.a is None or self.b is None:
            raise UserError(
                "give two files or two configs to compare, or a model with --suite; see --help"
            )
        return read_subjects(self.a, self.b)

    @property
    def rate(self) -> float:
        """Frames per second of what is generated."""
        return self.fps or DEFAULT_FPS

    @property
    def folder(self) -> Path:
        """Where everything of a suite lies."""
        from chipsparse.cli.views.names import name_of

        assert self.suite is not None
        name = name_of(self.suite.rstrip("/")).replace("/", "-")
        return self.output or Path(f"suite-{name}")

    def check(self) -> None:
        """Raises `UserError` for what is wrong with any model and on any device."""
        super().check()
        if self.output is None and self.suite is None:
            for name in ("--amplify", "--fps"):
                self.refuse(name, why="is about --output, and there is none")
        if self.suite is not None:
            self._check_suite()
        elif self.with_prompts:
            raise UserError("--with-prompts is about a suite; give --suite MODEL, too")
        elif self.subjects[0].kind == "files":
            others = [name for name in self.given() if name not in OF_FILES]
            if others:
                raise UserError(f"{others[0]} is about generations; A and B are taken for files")
        else:
            self._check_configs()

    def _check_suite(self) -> None:
        senseless = [name for name in self.given() if name in NOT_OF_SUITES]
        if senseless:
            raise UserError(f"--suite MODEL compares what it compares; leave {senseless[0]} out")
        if (self.gpus or 1) > 1 or self.guidance_parallel is not None:
            raise UserError("--suite compares methods that one GPU runs; leave --gpus out")
        if self.count is not None:
            check_positive("--count", self.count)
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"--output {self.folder} is a file; a suite fills a folder")

    def _check_configs(self) -> None:
        from chipsparse.cli.media.output_names import check_inputs_stay
        from chipsparse.cli.media.write import check_output
        from chipsparse.experiments.statistics import LEAST_VALUES

        if self.count is not None and self.count < LEAST_VALUES:
            raise UserError(f"--count {self.count}: intervals need at least {LEAST_VALUES} prompts")
        if self.output is not None:
            check_output(self.output, fps=self.fps)
            check_inputs_stay("--output", self.output, [self.prompts])

    def kept(self) -> str:
        """What an interruption leaves."""
        if self.suite is None:
            return super().kept()
        from chipsparse.cli.suite.job import kept

        return kept(self)


def compare(options: CompareOptions) -> None:
    """Compare two files, two configs, or a suite: PSNR, SSIM, LPIPS, flicker, and speed.

    Files (one size and length) are compared frame by frame; lossy ones limit that (all but .png).

    Configs generate the prompts with the same seeds as dense does; each is compared with dense.

    A suite tells in one command whether it holds for your model, and writes a page.
    """
    if options.suite is not None:
        _compare_suite(dataclasses.replace(options, model=options.suite))
    elif options.subjects[0].kind == "files":
        _compare_files(options)
    else:
        _compare_configs(options)


# What follows is imported where it is needed, so that --help does not wait for torch and diffusers.


def _compare_suite(options: CompareOptions) -> None:
    from chipsparse.cli.ranks.joined import check_alone
    from chipsparse.cli.suite.job import run_suite, to_send
    from chipsparse.cli.suite.text import print_suite

    check_alone("--suite")
    with results_alone():
        suite = run_suite(options)
    if options.json:
        print(to_send(suite.content), end="")
    else:
        tell(suite, print_suite, as_json=False)


def _compare_files(options: CompareOptions) -> None:
    from chipsparse.cli.compare.files import compare_files
    from chipsparse.cli.compare.text import print_files

    with results_alone():
        files = compare_files(options)
    tell(files, print_files, as_json=options.json)


def _compare_configs(options: CompareOptions) -> None:
    from chipsparse.cli.compare.configs import check_configs_shared, compare_configs
    from chipsparse.cli.compare.text import print_configs
    from chipsparse.cli.ranks.several import taking_part

    process = taking_part("compare", options, check_configs_shared)
    if process is None:
        return
    with results_alone(), process.after_first():
        configs = compare_configs(options, process)
    if configs is None:  # the first process tells
        return
    tell(configs, print_configs, as_json=options.json)
    if configs.unwritten:
        raise UserError(configs.unwritten)
    if configs.runs.exit_code:
        raise typer.Exit(configs.runs.exit_code)
