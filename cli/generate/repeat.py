"""The records that ``--from`` repeats: of `generate --report` or ``--json``, or of a manifest.

The classes that write these records need torch. This module reads only what a repetition needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from chipsparse.cli.errors import UserError
from chipsparse.cli.prompts import read_text
from chipsparse.common.files import beside, numbered_files

MANIFEST = "manifest.jsonl"
RECORDS = (".json", ".jsonl")
CLOCK_SECONDS = 2  # that the times of files may be off
TO_TYPE = "type its settings instead"


class _Settings(BaseModel):
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None


class _Lora(BaseModel):
    file: str


class _Request(BaseModel):
    """The part of `RequestRecord` that a repetition needs."""

    image: str | None = None
    loras: Sequence[_Lora] = ()
    transformer_class: str = ""
    settings: _Settings = _Settings()
    command: Sequence[str] = ()


class _Entry(BaseModel):
    """A `GenerationResult`, or a `BatchClip` of a manifest."""

    request: _Request
    files: dict[str, list[str]] = {}
    file: str | None = None

    @property
    def names(self) -> set[str]:
        """The names of the clip's files without their folders, which may have moved."""
        written = [file for kind, files in self.files.items() for file in files if kind != "report"]
        if self.file is not None:
            written.append(self.file)
        return {Path(file).name for file in written}


@dataclass(frozen=True)
class Recorded:
    """A generation that is to be repeated."""

    source: Path  # the file that was named
    command: Sequence[str]  # that made it
    transformer_class: str
    guidance: float | None  # None where two scales leave open which one is meant
    image: str | None
    loras: Sequence[str]  # their files

    def check_complete(self, names: Sequence[str]) -> None:
        """Raise `UserError` where options that a repetition needs are not in the record."""
        if names:
            missing = " and ".join(names)
            raise UserError(f"the record of {self.source} does not say its {missing}; {TO_TYPE}")

    def check_file(self, option: str, path: str | Path) -> None:
        """Raise `UserError` where a file that it was made with is gone."""
        if not Path(path).expanduser().exists():
            raise UserError(
                f"{self.source} was made with {option} {path}, which is gone; "
                f"give another {option}",
            )

    def check_class(self, transformer_class: str, location: str) -> None:
        """Raise `UserError` where the folder of the model holds another one by now."""
        made_by = self.transformer_class
        if made_by and made_by != transformer_class:
            raise UserError(
                f"{self.source} was made by a {made_by}, and {location} now has a "
                f"{transformer_class}; name the model with --model",
            )


def find_record(source: Path) -> Recorded:
    """Return the generation of a record, or of an output whose record is in the same folder.

    Args:
        source: A file of `generate --report` or of what ``--json`` printed, a manifest of one
            clip, or a video or an image. ``out.png`` also stands for ``out-000.png`` and so on.

    Raises:
        UserError: There is no such file, no record of it, or the record is of several clips.
    """
    several = [] if source.exists() else numbered_files(source)
    if several:
        source = several[0]
    if not source.is_file():
        what = "is no file" if source.exists() else "does not exist"
        raise UserError(f"--from {source} {what}; name a record, or a file that generate wrote")
    is_record = source.suffix.lower() in RECORDS
    entry = _only_entry(source) if is_record else _entry_beside(source)
    if not {file.name for file in several} <= entry.names:
        raise UserError(
            f"--from {source}: it is one of {len(several)} files with numbers, which are not all "
            "of one clip; name the file of one",
        )
    if not entry.request.command:
        raise UserError(f"the record of {source} lacks the command that made it; {TO_TYPE}")
    settings = entry.request.settings
    scales = [settings.guidance_scale, settings.true_cfg_scale]
    known = [scale for scale in scales if scale is not None]
    return Recorded(
        source=source,
        command=entry.request.command,
        transformer_class=entry.request.transformer_class,
        guidance=known[0] if len(known) == 1 else None,
        image=entry.request.image,
        loras=[lora.file for lora in entry.request.loras],
    )


def new_name(path: Path) -> Path:
    """Return the first of ``out-2.mp4``, ``out-3.mp4`` and so on that no file has."""
    number = 2
    while beside(path, str(number)).exists() or numbered_files(beside(path, str(number))):
        number += 1
    return beside(path, str(number))


def _only_entry(record: Path) -> _Entry:
    entries = list(_entries(record))
    if not entries:
        raise UserError(
            f"--from {record} is no record of a generation; name a file of generate --report",
        )
    if len(entries) > 1:
        one = min((name for entry in entries for name in entry.names), default="its output")
        raise UserError(
            f"--from {record} is about {len(entries)} clips; name the file of one, such as {one}",
        )
    return entries[0]


def _entry_beside(output: Path) -> _Entry:
    """Return the entry about a file, of the newest record in its folder that has one."""
    folder = output.parent
    records = [file for file in (*folder.glob("*.json"), folder / MANIFEST) if file.is_file()]
    records.sort(key=lambda file: file.stat().st_mtime_ns, reverse=True)
    for record in records:
        try:
            entries = [entry for entry in _entries(record) if output.name in entry.names]
        except UserError:  # a file of somebody else
            continue
        if entries:
            _check_pair(output, record, entries[0])
            return entries[0]
    raise UserError(
        f"there is no record of {output} in its folder; generate writes one with --report, and "
        f"batch {MANIFEST}",
    )


def _check_pair(output: Path, record: Path, entry: _Entry) -> None:
    """Raise `UserError` where a record is not about the frames that a file has now."""
    if output.stat().st_mtime > record.stat().st_mtime + CLOCK_SECONDS:
        raise UserError(
            f"{output} is newer than its record {record}, so it may hold another clip; "
            f"name the record to repeat what that is about",
        )
    main = entry.files.get("output", [])
    kinds = [kind for kind, files in entry.files.items() if kind != "output" and main]
    for kind in kinds:
        if output.name in {Path(file).name for file in entry.files[kind]}:
            raise UserError(
                f"{output} is the {kind} file of {Path(main[0]).name}; name that one, or {record}",
            )


def _entries(record: Path) -> Iterator[_Entry]:
    """Give the clips of a record; of a manifest the last line about each file."""
    text = read_text(record, f"--from {record}")
    if record.suffix.lower() == ".jsonl":
        lines = [_entry(_parsed(line)) for line in text.split("\n")]
        yield from {entry.file: entry for entry in lines if entry is not None}.values()
        return
    content = _parsed(text)
    clips = content.get("clips") if isinstance(content, dict) else None
    for clip in clips if isinstance(clips, list) else [content]:
        entry = _entry(clip)
        if entry is not None:
            yield entry


def _parsed(text: str) -> object:
    try:
        parsed: object = json.loads(text)
        return parsed
    except (ValueError, RecursionError):  # no JSON, or lists in lists without end
        return None


def _entry(value: object) -> _Entry | None:
    try:
        return _Entry.model_validate(value)
    except ValidationError:
        return None
