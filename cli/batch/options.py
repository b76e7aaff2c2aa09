"""The options of `batch`: those of `generate` count where a line of the file has none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from chipsparse.cli.batch.prompt_file import Line, check_lines, read_lines
from chipsparse.cli.errors import UserError, check_installed
from chipsparse.cli.options import (
    REQUIRED,
    GenerateOptions,
    Positive,
    argument,
    option,
    output_option,
    read_options,
    read_value,
    seeds_from,
)
from chipsparse.common.files import IMAGES, Write
from chipsparse.pipelines.model_files import read_folder

MANIFEST, PAGE, THUMBNAILS = "manifest.jsonl", "index.html", "thumbnails"  # names in the folder
worker_option = partial(option, panel="Workers")


class FileContent(NamedTuple):
    """What a file of prompts holds."""

    lines: list[Line]
    problems: dict[int, str]  # of the other lines, by their number
    warnings: list[str]


@dataclass(frozen=True, kw_only=True)
class BatchOptions(GenerateOptions):
    """The options of `batch`."""

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
    format: Literal["mp4", "webm", "gif", "png", "jpg", "webp"] | None = output_option(
        help="mp4, webm or gif for videos; png, jpg or webp for images.",
        shown="mp4, or png of images",
    )
    engine: Literal["ray"] | None = worker_option(
        help="ray: actors of the Ray cluster that RAY_ADDRESS names, else of this machine.",
        shown="this process; Ray for several GPUs",
    )
    gpus: Positive | None = worker_option(
        help="GPUs to make clips on, each by an actor of Ray that loads the model once; 1 needs no "
        "Ray. With --device cpu so many actors.",
        shown="1, or with --engine ray all that it has",
    )
    tries: Positive = worker_option(
        help="How often a prompt is tried where an actor ends, or the error may come from the "
        "GPU's state. What is wrong with the prompt itself is not tried again.",
        default=2,
    )
    prompt: None = None
    from_: None = None
    guidance_parallel: None = None
    compare: bool = False
    report: None = None
    verbose: bool = False

    @property
    def on_ray(self) -> bool:
        return self.engine == "ray" or (self.gpus or 1) > 1

    @cached_property
    def file_content(self) -> FileContent:
        """The prompts of the file, which is read once; raises `UserError`."""
        warnings: list[str] = []
        lines, problems = read_lines(self.prompts, warnings.append)
        return FileContent(lines, problems, warnings)

    def check(self) -> None:
        # Imported here so that --help does not wait for torch.
        from chipsparse.cli.media.write import check_writable
        from chipsparse.cli.ranks import check_alone

        check_alone("a process of batch")
        if self.on_ray:
            check_installed("ray", "ray", "several GPUs need Ray")
        if self.output.exists() and not self.output.is_dir():
            raise UserError(f"--output {self.output} is a file; name a folder")
        if not self.output.exists():  # else files in it would be named as the option's
            check_writable("--output", self.output)

    def check_contents(self) -> None:
        """Raise one `UserError` for all lines that are wrong, as far as that is known by now."""
        folder = read_folder(self.model)
        if folder is None or folder.medium is None:
            return
        suffix = self.suffix(video=folder.medium == "video")
        content = self.file_content
        problems = dict(content.problems)
        known: set[str] = set()  # settings that lines share are checked once
        for line in content.lines:
            own = dict(line.settings)
            try:
                seed = read_value(BatchOptions, "seed", own.pop("seed", self.seed))
                number = read_value(BatchOptions, "num", own.pop("num", self.num or 1))
                seeds_from(seed, number)
                if str(own) not in known:
                    self.of_line({**own, "output": self.file(suffix)}).check_contents()
                    known.add(str(own))
            except UserError as error:
                problems[line.number] = str(error)
        check_lines(self.prompts, problems, count=len(content.lines) + len(content.problems))

    def suffix(self, *, video: bool) -> str:
        """Return that of each file, without its dot; raise `UserError` for a video of images."""
        suffix = self.format or ("mp4" if video else "png")
        if not video and f".{suffix}" not in IMAGES:
            raise UserError("this model makes images, not videos; use --format png, jpg or webp")
        return suffix

    def file(self, suffix: str) -> Path:
        """Return a file of the folder, or beside it as long as it is not there."""
        folder = self.output if self.output.is_dir() else self.output.parent
        return folder / f"clip.{suffix}"

    def reads(self) -> list[Path]:
        settings = [line.settings for line in self.file_content.lines]
        own = [each[name] for each in settings for name in ("config", "image") if name in each]
        return [*super().reads(), *(Path(path) for path in own if isinstance(path, str))]

    def writes(self, *, single: bool = True) -> list[Write]:
        return [Write("--output", self.output / name) for name in (MANIFEST, PAGE)]

    def of_line(self, settings: Mapping[str, Any]) -> GenerateOptions:
        """Return the options of `generate` for a line's prompts, checked; raise `UserError`."""
        names = [field.name for field in dataclasses.fields(GenerateOptions)]
        shared = {name: getattr(self, name) for name in names}
        fixed = {"prompt": "", "prompts": None, "num": None, "gpus": None}
        return read_options(GenerateOptions, {**shared, **fixed, **settings})

    def kept(self) -> str:
        return "what was finished is in the folder; the same command goes on"
