"""The files of a batch: one for each prompt, seed and settings, named by their digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from chipsparse.cli.batch.options import BatchOptions
from chipsparse.cli.batch.prompt_file import check_lines, read_lines
from chipsparse.cli.batch.record import THUMBNAILS, BatchClip, State
from chipsparse.cli.errors import UserError
from chipsparse.cli.generate.job import WARNING, record_of
from chipsparse.cli.media.write import check_kind
from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.model.weights import files_digest, weights_digest
from chipsparse.cli.options import SEEDS, Item, check_count, read_value
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.cli.request import Request, resolve

DIGITS = 16  # of a digest: 2^64 of them
# What decides about a result, of the facts that `RequestRecord` has.
DECISIVE = {
    "mode", "negative_prompt", "strength", "scheduler", "flow_shift", "pipeline_class", "dtype",
    "fps", "settings",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A file to make.

    Attributes:
        lines: numbers of those that ask for it.
        request: the same one for all prompts with the same settings.
        folder: of the batch.
    """

    name: str
    lines: Sequence[int]
    prompt: str
    seed: int
    request: Request
    folder: Path

    def item(self, folder: Path) -> Item:
        """Return the clip as `generate` makes it."""
        label = f"line {self.lines[0]}, seed {self.seed}"
        return Item(0, self.prompt, self.seed, label, output=folder / self.name)

    def thumbnail(self, folder: Path) -> Path:
        """Return the place of its thumbnail."""
        return folder / THUMBNAILS / f"{Path(self.name).stem}.jpg"

    def clip(self, state: State, warnings: Sequence[str] = (), **result: Any) -> BatchClip:
        """Return the record of what became of it."""
        request = record_of(self.request, self.item(self.folder), warnings)
        return BatchClip(file=self.name, state=state, lines=self.lines, request=request, **result)


def find_entries(
    options: BatchOptions,
    model: ModelDescription,
    device: torch.device,
    dtype: torch.dtype,
    display: ProgressDisplay,
) -> list[Entry]:
    """Return the files that the lines ask for, in their order, without loading weights.

    Raises:
        UserError: lines that cannot be made; all of them are named.
    """
    video = model.accepts("num_frames")
    if options.format not in (None, "png") and not video:
        raise UserError("this model makes images, not videos; use --format png")
    clip = (options.output if options.output.is_dir() else options.output.parent) / "clip"
    clip = clip.with_suffix(f".{options.format or ('mp4' if video else 'png')}")
    fixed = {"output": clip, "device": str(device), "dtype": str(dtype).removeprefix("torch.")}
    weights = {
        "model": weights_digest(model) or model.location,
        "loras": [[files_digest({"": lora.file}), lora.scale] for lora in options.loras],
    }
    known: dict[str, tuple[Request, Mapping[str, Any]]] = {}  # by the lines' own settings
    lines, problems = read_lines(options.prompts)
    count, total = len(lines) + len(problems), 0
    entries: dict[str, Entry] = {}
    for line in lines:
        given: dict[str, Any] = dict(line.settings.items())
        own = {name: value for name, value in given.items() if name not in ("seed", "num")}
        try:
            if str(own) not in known:
                known[str(own)] = _resolved(options, {**own, **fixed}, model, device, dtype)
            request, decisive = known[str(own)]
            seed, number = (
                read_value(BatchOptions, name, given.get(name, usual))
                for name, usual in (("seed", options.seed), ("num", options.num or 1))
            )
            if seed + number > SEEDS:
                raise UserError(f"--seed {seed}: {number} seeds from there go beyond 2^64 - 1")
        except UserError as error:
            problems[line.number] = str(error)
            continue
        total += number
        check_count(str(options.prompts), total)
        for own_seed in range(seed, seed + number):
            facts = {"prompt": line.prompt, "seed": own_seed, "settings": {**decisive, **weights}}
            name = digest(facts) + clip.suffix
            asked = (*entries[name].lines, line.number) if name in entries else (line.number,)
            entries[name] = Entry(name, asked, line.prompt, own_seed, request, options.output)
    check_lines(options.prompts, problems, count=count)
    ignored = ", ".join(dict.fromkeys(name for line in lines for name in line.ignored))
    if ignored:
        display.tell(f"{WARNING}{options.prompts}: no setting, and ignored: {ignored}")
    for warning in dict.fromkeys(
        text for request, _ in known.values() for text in request.warnings
    ):
        display.tell(WARNING + warning)
    return list(entries.values())


def digest(facts: Mapping[str, Any]) -> str:
    """Return the name of a file, without a suffix, of all that decides about it."""
    text = json.dumps(facts, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def _resolved(
    options: BatchOptions,
    settings: Mapping[str, Any],
    model: ModelDescription,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Request, dict[str, Any]]:
    """Return the request of a line's settings, and what decides about its results."""
    given = options.of_line(settings)
    here = device.type == "cpu" or torch.cuda.is_available()
    request = resolve(given, model=model, device=device, dtype=dtype, here=here)
    check_kind(given.output, video=request.model.accepts("num_frames"))
    if given.output.suffix == ".png" and (request.settings.num_frames or 1) > 1:
        raise UserError(
            f"a video of {request.settings.num_frames} frames is no single .png; use --format mp4"
        )
    record = record_of(request, Item(0, "", 0, output=given.output))
    profile = None if given.dense else request.profile
    image = given.image
    return request, {
        **record.model_dump(include=DECISIVE),
        "sparsity": None if profile is None else asdict(profile.sparsity),
        "image": None if image is None else hashlib.sha256(image.read_bytes()).hexdigest(),
        "crf": given.crf,
    }
