"""What became of a batch: for the table, for JSON and for the page."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from chipsparse.cli.batch.entries import Entry
from chipsparse.cli.batch.folder import FAILED, MADE, THUMBNAILS, Folder
from chipsparse.cli.wording import counted

PAGE = "index.html"
State = Literal["made", "already there", "failed", "missing"]


@dataclass(frozen=True)
class Row:
    """A file of the batch.

    Attributes:
        file: its name in the folder.
        lines: of the file of prompts, that ask for it.
        settings: of its line and of the command, for people.
        seconds: that the generation took; None where that is not known.
        tries: that it took; None likewise.
        error: why it is not there, in one sentence; None where it is.
        remarks: what ran otherwise than the profile asks, and what else is worth knowing.
        thumbnail: its path in the folder; None where it has none.
        command: what makes it alone.
    """

    file: str
    state: State
    lines: Sequence[int]
    prompt: str
    seed: int
    settings: str
    seconds: float | None
    tries: int | None
    error: str | None
    warnings: Sequence[str]
    remarks: Sequence[str]
    thumbnail: str | None
    command: Sequence[str]


@dataclass(frozen=True)
class Batch:
    """A batch, finished or broken off.

    Attributes:
        manifest: the file in it that says what each file is.
        page: the file in it that shows them.
        seconds: that the run took.
        rows: a file each, in the order of the lines.
    """

    folder: Path
    manifest: Path
    page: Path
    model: str
    seconds: float
    rows: Sequence[Row]
    also_in_json: ClassVar = ("made", "already_there", "failed", "missing")

    @property
    def made(self) -> int:
        """How many files this run made."""
        return self._count("made")

    @property
    def already_there(self) -> int:
        """How many were there before it, or were made by another command."""
        return self._count("already there")

    @property
    def failed(self) -> int:
        """How many were given up."""
        return self._count("failed")

    @property
    def missing(self) -> int:
        """How many were not come to."""
        return self._count("missing")

    def _count(self, state: State) -> int:
        return sum(row.state == state for row in self.rows)


def batch_record(
    folder: Folder,
    entries: Sequence[Entry],
    made: Collection[str],
    given_up: Collection[str],
    seconds: float,
) -> Batch:
    """What became of all files; ``made`` and ``given_up`` are the names of those of this run."""
    known = folder.manifest.read()

    def row(entry: Entry) -> Row:
        found = known.get(entry.name, {})
        facts = entry.facts(folder.path)
        state: State
        if folder.has(entry):
            state, wanted = ("made" if entry.name in made else "already there"), MADE
        else:
            state, wanted = ("failed" if entry.name in given_up else "missing"), FAILED
        kept = found if found.get("state") == wanted else {}
        shown = f"{THUMBNAILS}/{entry.digest}.jpg"
        return Row(
            file=entry.name,
            state=state,
            lines=entry.lines,
            prompt=entry.prompt,
            seed=entry.seed,
            settings=_settings(facts),
            seconds=kept.get("seconds"),
            tries=kept.get("tries"),
            error=kept.get("error"),
            warnings=kept.get("warnings", ()),
            remarks=kept.get("remarks", ()),
            thumbnail=shown if folder.has(entry) and (folder.path / shown).is_file() else None,
            command=facts["command"],
        )

    return Batch(
        folder=folder.path,
        manifest=folder.manifest.path,
        page=folder.path / PAGE,
        model=entries[0].group.job.model.location,
        seconds=seconds,
        rows=[row(entry) for entry in entries],
    )


def _settings(facts: dict[str, Any]) -> str:
    """Size, length, steps and quality."""
    settings = facts["settings"]
    parts = []
    if settings["width"] is not None and settings["height"] is not None:
        parts.append(f"{settings['width']}x{settings['height']}")
    if settings["num_frames"] is not None:
        parts.append(counted(settings["num_frames"], "frame"))
    parts.append(counted(settings["num_inference_steps"], "step"))
    parts.append("dense" if facts["mode"] == "dense" else facts["quality"] or "sparse")
    return ", ".join(parts)
