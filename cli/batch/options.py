"""The options of `batch`: those of `generate` count where a line of the file has none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Interval

from chipsparse.cli.batch.prompt_file import Line, check_lines, read_lines
from chipsparse.cli.errors import UserError, check_installed
from chipsparse.cli.generate.repeat import MANIFEST
from chipsparse.cli.media.formats import check_writable
from chipsparse.cli.options import (
    REQUIRED,
    GenerateOptions,
    Positive,
    argument,
    command_words,
    option,
    output_option,
    read_options,
    read_value,
    seeds_from,
)
from chipsparse.cli.ranks import check_alone
from chipsparse.cli.views.names import bundled_name
from chipsparse.common.files import IMAGES, Write
from chipsparse.pipelines.model_files import read_folder

# Names in the folder, besides `MANIFEST`.
PAGE = "index.html"
THUMBNAILS = "thumbnails"
DRAFT = "draft"  # the quality of drafts
NUM_AND_DRAFTS = "makes finished files of all seeds; --drafts N finishes only the chosen ones"
worker_option = partial(option, panel="Workers")
draft_option = partial(option, panel="Drafts")


class FileContent(NamedTuple):
    """What a file of prompts holds."""

    lines: list[Line]
    problems: dict[int, str]  # of the other lines, by their number
    warnings: list[str]


@dataclass(frozen=True, kw_only=True)
class BatchOptions(GenerateOptions):
    """The options of `batch`."""

    prompts: Path = argument(
        help="A prompt a line, CSV with a column prompt, JSON lines (.jsonl), or bundled prompts: "
        "shapes, images or suite. Other columns and "
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
    drafts: Annotated[int, Interval(ge=1, le=100_000)] | None = draft_option(
        help="Seeds of each prompt, from --seed on, that are made in the quality draft. index.html "
        "shows them side by side, to choose which to finish.",
        shown="none",
    )
    best: str | None = draft_option(
        help="Finish the best draft of each prompt. Scores: clip (the frames resemble the prompt), "
        "clip:MODEL, sharpness, or a function, as FILE.py:FUNCTION or MODULE:FUNCTION.",
        shown="none",
        metavar="SCORE",
    )
    finish: str | None = draft_option(
        help="Finish these drafts in --quality, with the same seeds and settings.",
        shown="none",
        metavar="KEY,KEY",
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
        """True where Ray's processes make the files: with ``--engine ray``, or on several GPUs."""
        return self.engine == "ray" or (self.gpus or 1) > 1

    @property
    def drafting(self) -> bool:
        """Each seed of a prompt has a draft, and a file that finishes it."""
        return self.drafts is not None or self.finish is not None

    @property
    def finish_keys(self) -> list[str]:
        """The keys of ``--finish``, which are the names of drafts without suffix."""
        words = (word.strip() for word in (self.finish or "").split(","))
        return [Path(word).stem for word in words if word]

    @property
    def finish_words(self) -> list[str]:
        """The words of the command that finishes drafts, but for their keys."""
        fields = dataclasses.fields(self)
        usual = [field.name for field in fields if getattr(self, field.name) == field.default]
        left_out = dict.fromkeys((*usual, "drafts", "best", "finish", "num"))
        prompts = str(self.prompts)
        resolved = {
            "model": None if self.model is None else bundled_name(self.model) or self.model,
            # The keys follow the words, so none of these may ask for ``--`` before it.
            "prompts": f"./{prompts}" if prompts.startswith("-") else prompts,
            **left_out,
        }
        return command_words("batch", self, resolved)

    @cached_property
    def file_content(self) -> FileContent:
        """The prompts of the file, which is read once; raises `UserError`."""
        warnings: list[str] = []
        lines, problems = read_lines(self.prompts, warnings.append)
        return FileContent(lines, problems, warnings)

    def check(self) -> None:
        """Raise `UserError` for drafts, GPUs or a folder that do not suit the other options."""
        check_alone("a process of batch")
        self._check_drafts()
        if self.on_ray:
            check_installed("ray", "ray", "several GPUs need Ray")
        if self.output.exists() and not self.output.is_dir():
            raise UserError(f"--output {self.output} is a file; name a folder")
        if not self.output.exists():  # else files in it would be named as the option's
            check_writable("--output", self.output)

    def _check_drafts(self) -> None:
        from chipsparse.cli.batch.scores import check_score

        if self.best is not None:
            if self.drafts is None:
                raise UserError(f"--best {self.best} chooses among drafts; add --drafts N")
            if self.finish is not None:
                raise UserError("--best and --finish exclude each other: both choose the drafts")
            check_score(self.best)
        if self.finish is not None and not self.finish_keys:
            raise UserError("--finish is empty; name drafts by the keys that index.html shows")
        if self.drafting:
            self.refuse("--num", why=NUM_AND_DRAFTS)
            if self.quality == DRAFT:
                raise UserError("--quality draft is that of the drafts; name another to finish in")

    def draft_settings(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a line's drafts: all but the quality are those of the line."""
        return {**own, "quality": DRAFT, "dense": False}

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
                self.seeds(own)
                if str(own) not in known:
                    self.of_line({**own, "output": self.file(suffix)}).check_contents()
                    known.add(str(own))
            except UserError as error:
                problems[line.number] = str(error)
        check_lines(self.prompts, problems, count=len(content.lines) + len(content.problems))

    def seeds(self, own: dict[str, Any]) -> range:
        """Take the seeds out of a line's settings, and return them; raise `UserError`."""
        if self.drafting and "num" in own:
            raise UserError(f"num {NUM_AND_DRAFTS}")
        seed = read_value(BatchOptions, "seed", own.pop("seed", self.seed))
        usual = self.drafts or self.num or 1
        return seeds_from(seed, read_value(BatchOptions, "num", own.pop("num", usual)))

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
        """Return also the configs and images that single lines name."""
        settings = [line.settings for line in self.file_content.lines]
        own = [each[name] for each in settings for name in ("config", "image") if name in each]
        return [*super().reads(), *(Path(path) for path in own if isinstance(path, str))]

    def writes(self, *, single: bool = True) -> list[Write]:
        """Return the manifest and the page; files of results have names of their own."""
        return [Write("--output", self.output / name) for name in (MANIFEST, PAGE)]

    def of_line(self, settings: Mapping[str, Any]) -> GenerateOptions:
        """Return the options of `generate` for a line's prompts, checked; raise `UserError`."""
        names = [field.name for field in dataclasses.fields(GenerateOptions)]
        shared = {name: getattr(self, name) for name in names}
        fixed = {"prompt": "", "prompts": None, "num": None, "gpus": None}
        return read_options(GenerateOptions, {**shared, **fixed, **settings})

    def kept(self) -> str:
        """Return that the same command continues after the finished files."""
        return "what was finished is in the folder; the same command goes on"
