"""The options of `chipsparse compare`, and the files or configs that its two arguments name."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval

from chipsparse.cli.errors import UserError
from chipsparse.cli.media.formats import DEFAULT_FPS, check_output
from chipsparse.cli.options import (
    Fps,
    GenerationOptions,
    Model,
    Positive,
    argument,
    command_words,
    generation_option,
    model_files,
    option,
    output_option,
    seed_option,
)
from chipsparse.cli.views.names import name_of
from chipsparse.common.bounded import Seed
from chipsparse.common.files import Write, clip_sources, clip_writes
from chipsparse.experiments.comparison import Bounds
from chipsparse.experiments.samples import DENSE
from chipsparse.profiles.profile import ASSETS, QUALITIES, profile_classes

suite_option = partial(option, panel="Suite")
bound_option = partial(
    option,
    panel="Bounds: exit code 1 where one is broken, 0 where all hold",
    shown=False,
)
Above0 = Annotated[float, Interval(gt=0)]
Share = Annotated[float, Interval(gt=0, le=1)]
Pixel = Annotated[float, Interval(ge=0, le=255)]
# In the folder of a suite: the results file, the file to send, the page, and the folder of clips.
MEASURED = "measured.json"
TO_SEND = "suite.json"
PAGE = "suite.html"
CLIPS = "clips"
BOUNDS = ("--min-psnr", "--min-ssim", "--max-lpips", "--max-pixel")
OF_FILES = ("A", "B", "--output", "--amplify", "--fps", "--json", "--debug", *BOUNDS)
NOT_OF_SUITES = ("A", "B", "--model", "--amplify")
OWN_PROFILE = "profile"


def read_config(text: str) -> dict[str, Any] | None:
    """Return the options that the name of a config stands for; None for that of a file."""
    if text == DENSE:
        return {"dense": True}
    if text == OWN_PROFILE:
        return {}
    if text in QUALITIES:
        return {"quality": text}
    if text in profile_classes():
        return {"config": ASSETS / "profiles" / f"{text}.yaml"}
    path = Path(text)
    return {"config": path} if path.suffix.lower() in (".yaml", ".yml") else None


@dataclass(frozen=True, kw_only=True)
class CompareOptions(GenerationOptions):
    """The options of `compare`; None where one was left out.

    `config`, `quality` and `dense` are those of A or B while its profile is looked for.
    """

    a: str | None = argument(
        help="A file: .mp4, .webm, .gif, .png, a folder of .png. Or a config: dense (the stock "
        "model), profile (the model's own), one of its qualities such as fast, a bundled "
        "profile's name, or a .yaml file.",
        metavar="A",
    )
    b: str | None = argument(help="Another of the same kind.", metavar="B")
    suite: Model | None = suite_option(
        help="Instead of A and B: whether it holds for this model (a folder or a hub name). "
        "Dense, the floor (dense with another attention kernel), MagCache, SeaCache and the "
        "qualities of chipsparse, paired by prompt and seed. May be broken off: the same "
        "command goes on.",
        shown=False,
        metavar="MODEL",
    )
    with_prompts: bool = suite_option(
        help="Also the texts of the prompts in suite.json, the file to send.",
        default=False,
    )
    min_psnr: Above0 | None = bound_option(
        help="Least PSNR in dB: of every frame of two files; against dense, of every clip of "
        "configs and of the qualities of a suite.",
    )
    min_ssim: Share | None = bound_option(help="The same with SSIM.")
    max_lpips: Above0 | None = bound_option(
        help="Largest LPIPS, likewise, where the extra lpips and AlexNet's weights are installed.",
    )
    max_pixel: Pixel | None = bound_option(
        help="Largest difference of any channel of any pixel, of 255; 0: identical.",
    )
    output: Path | None = output_option(
        "-o",
        help="Write A, B and a heat-map of their difference side by side: .mp4, .webm, .gif or "
        ".png. Of configs: the prompt with the lowest PSNR, both with their difference from "
        "dense. Of a suite: the folder for everything.",
        shown="none; suite-MODEL of a suite",
    )
    amplify: Positive | None = output_option(
        help="By how much the heat-map amplifies differences.",
        shown="a power of two up to 64 that fits",
    )
    fps: Fps | None = output_option(
        help="Frames per second of the output.",
        shown="that of the files, or 16",
    )
    prompts: Path | None = generation_option(
        help="File with one prompt a line, or bundled ones: shapes, images or suite.",
        shown="those that suit the model",
    )
    count: Positive | None = generation_option(
        "--num",
        help="How many of the prompts; of two configs at least 2.",
        shown="all of the file, 8 of the bundled ones, 12 in a suite",
    )
    seed: Seed = seed_option()
    negative_prompt: None = None
    config: Path | None = None
    quality: str | None = None

    @cached_property
    def configs(self) -> dict[str, dict[str, Any]]:
        """The options of A and B by title, none where both are files; `UserError` for no pair."""
        if self.a is None or self.b is None:
            raise UserError(
                "give two files or two configs to compare, or a model with --suite; see --help",
            )
        a = read_config(self.a)
        b = read_config(self.b)
        if a is None and b is None:
            return {}
        if a is None or b is None:
            file, config = (self.a, self.b) if a is None else (self.b, self.a)
            raise UserError(
                f"{config} is a config and {file} is taken for a file; compare two files, or two "
                f"configs: {DENSE}, {OWN_PROFILE}, a quality, a bundled profile's name, or a "
                ".yaml file",
            )
        if self.a == self.b == DENSE:
            raise UserError("both are the stock model; give a config to compare it with")
        return {f"A: {name_of(self.a)}": a, f"B: {name_of(self.b)}": b}

    @property
    def bounds(self) -> Bounds:
        """The bounds that were given."""
        return Bounds(
            min_psnr=self.min_psnr,
            min_ssim=self.min_ssim,
            max_lpips=self.max_lpips,
            max_pixel=self.max_pixel,
        )

    @property
    def rate(self) -> float:
        """Frames per second of the written clips."""
        return self.fps or DEFAULT_FPS

    @property
    def folder(self) -> Path:
        """The folder of a suite's results; by default named by its model."""
        assert self.suite is not None
        name = name_of(self.suite.rstrip("/")).replace("/", "-")
        return self.output or Path(f"suite-{name}")

    def check(self) -> None:
        """Raise `UserError` for options that the kind of comparison does not have."""
        if self.output is None and self.suite is None:
            for name in ("--amplify", "--fps"):
                self.refuse(name, why="is about --output, and there is none")
        if self.suite is not None:
            self._check_suite()
        elif self.with_prompts:
            raise UserError("--with-prompts is about a suite; give --suite MODEL, too")
        elif not self.configs:
            others = [name for name in self.given() if name not in OF_FILES]
            if others:
                raise UserError(f"{others[0]} is about generations; A and B are taken for files")
        else:
            self._check_configs()

    def _check_suite(self) -> None:
        self.refuse(*NOT_OF_SUITES, why="is not for a suite, which has its own methods")
        if (self.gpus or 1) > 1 or self.guidance_parallel is not None:
            raise UserError("--suite compares methods that one GPU runs; leave --gpus out")
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"--output {self.folder} is a file; a suite fills a folder")

    def _check_configs(self) -> None:
        from chipsparse.experiments.statistics import LEAST_VALUES

        if self.count is not None and self.count < LEAST_VALUES:
            raise UserError(f"--count {self.count}: intervals need at least {LEAST_VALUES} prompts")
        if self.output is not None:
            check_output(self.output, fps=self.fps)

    def reads(self) -> list[Path]:
        """Return the two files, or the files of the configs, the prompts and the suite's model."""
        if self.suite is None and not self.configs:
            return [*clip_sources(Path(self.a or "")), *clip_sources(Path(self.b or ""))]
        configs = [] if self.suite is not None else self.configs.values()
        files = [config.get("config") for config in configs]
        named = [file for file in (*files, self.prompts) if file is not None]
        model = [] if self.suite is None else model_files(self.suite)
        return [*super().reads(), *model, *named]

    def writes(self, *, single: bool = True) -> list[Write]:
        """Return all files that may be written; ``single``: the output is one image, or no PNG."""
        if self.suite is not None:
            folder = self.folder
            files = [folder / name for name in (MEASURED, TO_SEND, PAGE)]
            files += [*folder.glob(f"{DENSE}/*"), *folder.glob(f"{CLIPS}/*")]
            return [Write("--output", file) for file in files]
        return [] if self.output is None else clip_writes("--output", self.output, single=single)

    def kept(self) -> str:
        """Return the folder of the finished clips, and the command that continues a suite."""
        if self.suite is None:
            return super().kept()
        if not (self.folder / MEASURED).is_file():
            return "nothing was measured"
        resolved = {"model": None, "output": self.folder, "fps": self.rate}
        auto = {name: None for name in ("device", "dtype") if getattr(self, name) == "auto"}
        again = shlex.join(command_words("compare", self, {**resolved, **auto}))
        return f"all finished clips are in {self.folder}; go on with: {again}"
