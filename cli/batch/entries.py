"""What a batch makes: one file for each prompt, seed and settings, named by their digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chipsparse.cli.batch.prompt_file import Line, check_lines
from chipsparse.cli.commands.batch import BatchOptions
from chipsparse.cli.errors import UserError
from chipsparse.cli.generate.job import record_of
from chipsparse.cli.media.write import check_kind, check_style
from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.model.weights import files_digest, weights_digest
from chipsparse.cli.options import GenerateOptions
from chipsparse.cli.prompts import Item
from chipsparse.cli.ranks import shared_by
from chipsparse.cli.request import Request, resolve
from chipsparse.cli.results import json_values

DIGITS = 16  # of a digest: 2^64 of them
# What decides about a result, of the facts that `RequestRecord` has.
DECISIVE = (
    "mode",
    "negative_prompt",
    "strength",
    "scheduler",
    "pipeline_class",
    "dtype",
    "fps",
    "settings",
)


@dataclass(frozen=True, eq=False)
class Group:
    """Prompts with the same settings.

    Attributes:
        options: of `generate`, without a prompt.
        decisive: what decides about their results besides prompt and seed, as JSON values.
    """

    options: GenerateOptions
    job: Request
    decisive: Mapping[str, Any]


@dataclass(frozen=True)
class Entry:
    """A file to make."""

    name: str
    lines: Sequence[int]  # numbers of those that ask for it: several where they are the same
    prompt: str
    seed: int
    group: Group

    @property
    def digest(self) -> str:
        """The name without its suffix."""
        return Path(self.name).stem

    @property
    def label(self) -> str:
        """What the user sees in front of what is said of it."""
        return f"line {self.lines[0]}, seed {self.seed}"

    def facts(self, folder: Path) -> dict[str, Any]:
        """What is to be made, in which file: as `generate --json` has it."""
        item = Item(self.prompt, self.seed, folder / self.name, None)
        request = record_of(self.group.job, item).model_dump(mode="json")
        return {"file": self.name, "lines": list(self.lines), **request}


def find_entries(
    options: BatchOptions,
    lines: Sequence[Line],
    model: ModelDescription,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Entry]:
    """What the lines of a file ask for, in their order; loads no weights.

    Raises:
        UserError: lines that cannot be made; all of them are named.
    """
    groups = _Groups(options, model, device, dtype)
    problems: dict[int, str] = {}
    found: dict[str, Entry] = {}
    for line in lines:
        try:
            group = groups.of(line)
        except UserError as error:
            problems[line.number] = str(error)
            continue
        seed = line.settings.get("seed", options.seed)
        for each in range(seed, seed + (line.settings.get("num", options.num) or 1)):
            name = file_name(line.prompt, each, group.decisive, groups.suffix)
            asked = (*found[name].lines, line.number) if name in found else (line.number,)
            found[name] = Entry(name, asked, line.prompt, each, group)
    check_lines(options.prompts, problems, count=len(lines))
    return list(found.values())


def file_name(prompt: str, seed: int, decisive: Mapping[str, Any], suffix: str) -> str:
    """The name of the file with what these make."""
    about = {"prompt": prompt, "seed": seed, "settings": decisive}
    text = json.dumps(about, sort_keys=True, allow_nan=False)
    return _digest(text.encode())[:DIGITS] + suffix


class _Groups:
    """Settles each settings once."""

    def __init__(
        self,
        options: BatchOptions,
        model: ModelDescription,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._options, self._model, self._device, self._dtype = options, model, device, dtype
        video = model.accepts("num_frames")
        if options.format not in (None, "png") and not video:
            raise UserError("this model makes images, not videos; use --format png")
        self.suffix = f".{options.format or ('mp4' if video else 'png')}"
        self._weights = {
            "model": weights_digest(model) or model.location,
            "loras": [[files_digest({"": lora.file}), lora.scale] for lora in options.loras],
        }
        self._found: dict[str, Group] = {}
        self._first: tuple[int, type] | None = None  # line and pipeline

    def of(self, line: Line) -> Group:
        """The group of a line; raises `UserError` for settings that cannot be."""
        own = {name: each for name, each in line.settings.items() if name not in ("seed", "num")}
        key = repr(own)
        if key not in self._found:
            self._found[key] = self._settled(own)
        group = self._found[key]
        pipeline = group.job.model.pipeline_class
        self._first = self._first or (line.number, pipeline)
        number, first = self._first
        if pipeline is not first:
            raise UserError(
                f"it needs {pipeline.__name__}, and line {number} {first.__name__}; make a batch "
                "of those with an image and one of those without"
            )
        return group

    def _settled(self, own: Mapping[str, Any]) -> Group:
        settled = {
            "seed": 0,
            "num": None,
            "output": Path(f"clip{self.suffix}"),
            "device": str(self._device),
            "dtype": str(self._dtype).removeprefix("torch."),
        }
        options = self._options.of_line({**own, **settled})
        check_style(self.suffix, options.given_fps, options.crf)
        parallel = None
        if options.gpus is not None:
            parallel = shared_by(options.gpus, options.guidance_parallel)
        job = resolve(
            options, model=self._model, device=self._device, dtype=self._dtype, parallel=parallel
        )
        check_kind(options.output, video=job.model.accepts("num_frames"))
        if self.suffix == ".png" and (job.settings.num_frames or 1) > 1:
            raise UserError(
                f"a video of {job.settings.num_frames} frames is no single .png; use --format mp4"
            )
        request = record_of(job, Item("", 0, options.output, None)).model_dump(mode="json")
        shift = options.flow_shift  # left out, as it is of files that were made before it was known
        decisive = {
            **{name: request[name] for name in DECISIVE},
            **({} if shift is None else {"flow_shift": shift}),
            **self._weights,
            "sparsity": None
            if job.profile is None or options.dense
            else json_values(job.profile.sparsity),
            "image": None if options.image is None else _digest(options.image.read_bytes()),
            "crf": options.crf,
        }
        return Group(options, job, decisive)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
