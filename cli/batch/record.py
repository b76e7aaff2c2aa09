"""The result of `chipsparse batch`, and the manifest of its folder: a record for each file."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from pydantic import ValidationError, computed_field

from chipsparse.cli.batch.options import MANIFEST
from chipsparse.cli.errors import user_errors
from chipsparse.cli.generate.record import RequestRecord
from chipsparse.cli.progress import duration
from chipsparse.cli.views import sections as view
from chipsparse.cli.views.names import bundled_name, name_of
from chipsparse.cli.views.sections import Record, Result, Section, String
from chipsparse.cli.views.units import counted, seconds_text
from chipsparse.common.bounded import Count, Number

State = Literal["made", "already there", "failed", "missing"]


class BatchClip(Record):
    """A file of a batch; in the manifest it was made, or failed."""

    file: String  # name in the folder
    state: State
    lines: Sequence[Count]  # that ask for it
    request: RequestRecord
    seconds: Number | None = None  # with text and decoding; None where not known
    tries: Count | None = None
    error: String | None = None
    remarks: Sequence[String] = ()  # fallbacks, and what else is worth knowing
    time: String = ""  # when it was made or given up, in UTC
    thumbnail: String | None = None

    @property
    def made(self) -> bool:
        return self.state in ("made", "already there")

    @property
    def settings(self) -> str:
        quality = "dense" if self.request.mode == "dense" else self.request.quality or "sparse"
        return ", ".join(filter(None, (self.request.settings.text(), quality)))


def read_manifest(folder: Path) -> dict[str, BatchClip]:
    """Return the last record of each file, by its name; a broken line counts for nothing."""
    path, clips = folder / MANIFEST, {}
    with user_errors(OSError, UnicodeDecodeError, what=f"{path} could not be read"):
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    for line in text.split("\n"):
        try:
            clip = BatchClip.model_validate_json(line)
        except ValidationError:
            continue
        clips[clip.file] = clip
    return clips


def note(folder: Path, clip: BatchClip) -> None:
    """Add a record to the manifest; raise `UserError` where that cannot be written."""
    path = folder / MANIFEST
    with user_errors(OSError, what=f"{path} could not be written"), path.open("ab+") as file:
        file.seek(max(0, file.tell() - 1))
        broken = file.read(1) not in (b"", b"\n")  # a line that was broken off
        file.write(b"\n" * broken + clip.model_dump_json(exclude_none=True).encode() + b"\n")


class BatchResult(Result):
    """A batch, finished or broken off."""

    kind: Literal["batch"] = "batch"
    folder: String
    manifest: String
    page: String
    model: String
    seconds: Number  # of the command
    clips: Sequence[BatchClip]  # in the order of the lines

    @computed_field  # type: ignore[prop-decorator]
    @property
    def counts(self) -> dict[State, int]:
        states = [clip.state for clip in self.clips]
        return {state: states.count(state) for state in get_args(State)}

    @property
    def title(self) -> str:
        made = sum(clip.made for clip in self.clips)
        return f"{made} of {counted(len(self.clips), 'file')}"

    def sections(self, *, verbose: bool = False) -> list[Section]:
        """Return the counts for the terminal, thumbnails for the page, and what was not made."""
        made = [clip for clip in self.clips if clip.made]
        states = ", ".join(f"{count:,} {state}" for state, count in self.counts.items() if count)
        settings = list(dict.fromkeys(clip.settings for clip in self.clips))
        seconds = [clip.seconds for clip in made if clip.seconds is not None]
        model = bundled_name(self.model) or self.model
        summary = [
            ("model", model),
            ("files", f"{states} of {len(self.clips):,}, in {duration(self.seconds)}"),
            ("folder", self.folder),
            ("manifest", self.manifest),
            ("page", self.page),
        ]
        facts = [("model", name_of(model))]
        if len(settings) == 1:
            facts.append(("settings", settings[0]))
        if seconds:
            facts.append(("time", f"{seconds_text(statistics.median_low(seconds))} each, median"))
        # Warnings about all are said once.
        common = set.intersection(*(set(clip.request.warnings) for clip in self.clips))
        alerts = [view.Alert(text) for text in sorted(common)]
        if failed := self.counts["failed"]:
            text = f"{counted(failed, 'prompt')} failed. Why, stands below."
            alerts.insert(0, view.Alert(text, "error"))
        pictures = []
        for clip in made:
            details = [f"seed {clip.request.seed}", *([clip.settings] if len(settings) > 1 else [])]
            details += [] if clip.seconds is None else [seconds_text(clip.seconds)]
            notes = [text for text in clip.request.warnings if text not in common]
            prompt = clip.request.prompt or "(empty)"
            pictures.append(
                view.Picture(clip.file, clip.thumbnail, prompt, ", ".join(details), notes)
            )
        columns = ["prompt", "why", "settings", "line", "seed"]
        rows = [
            [
                clip.request.prompt,
                clip.error or "not yet come to",
                clip.settings,
                ", ".join(map(str, clip.lines)),
                str(clip.request.seed),
            ]
            for clip in self.clips
            if not clip.made
        ]
        again = "The same command makes them." if rows else ""
        return [
            Section("", [view.Facts(summary)], where="terminal"),
            Section("", [*alerts, view.Facts(facts), view.Gallery(pictures)], where="page"),
            Section("Not made", [view.Table(columns, rows, 3)], again),
        ]
