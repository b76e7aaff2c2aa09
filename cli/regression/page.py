"""The page of the failures of one run of pytest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from chipsparse.cli.media.write import write_text
from chipsparse.cli.views import sections as view
from chipsparse.cli.views.page import page
from chipsparse.cli.views.sections import Record, Result, Section, String
from chipsparse.cli.views.units import counted


class MediaFailure(Record):
    """A check that failed; files are relative to the page."""

    test: String
    name: String
    why: String
    file: String  # both clips with their difference; the new one alone where sizes differ
    picture: String | None = None  # the worst frame of it


class MediaFailures(Result):
    """The checks of `media_regression` that failed in a run of pytest."""

    kind: Literal["media failures"] = "media failures"
    failures: Sequence[MediaFailure]

    @property
    def title(self) -> str:
        """The number of failed checks."""
        return f"media regression: {counted(len(self.failures), 'check')} failed"

    def sections(self, *, verbose: bool = False) -> list[Section]:
        """Return one gallery: the worst frame of each failure."""
        pictures = [
            view.Picture(item.file, item.picture, f"{item.test}: {item.name}", item.why)
            for item in self.failures
        ]
        text = "The worst frame of each: golden (or dense), now, and their difference."
        return [Section("", []), Section("Failures", [view.Gallery(pictures)], text)]


def write_page(path: Path, failures: Sequence[Mapping[str, object]]) -> None:
    """Write the page of failures, each as the check reports it, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = MediaFailures(failures=[MediaFailure.model_validate(item) for item in failures])
    write_text("--media-report", path, page([(path, made)], images="'self' file:"))
