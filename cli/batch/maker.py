"""One loaded pipeline that makes the files of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from chipsparse.cli.batch.entries import Entry
from chipsparse.cli.errors import UserError, described
from chipsparse.cli.generate.job import WARNING, make, prompt_warnings
from chipsparse.cli.generate.pipeline import KeptPipeline
from chipsparse.cli.media.write import written_whole
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.cli.request import Request

THUMBNAIL_SIDE, JPEG_QUALITY = 320, 85
# Errors of a prompt or its settings: another try would end the same way.
REFUSED = (UserError, ValueError)


@dataclass(frozen=True)
class Made:
    """What is known of a file that was made.

    Attributes:
        seconds: that the generation took, with text and decoding.
        warnings: about this file alone.
        remarks: what ran otherwise than the profile asks, and what else is worth knowing.
    """

    seconds: float
    warnings: Sequence[str]
    remarks: Sequence[str]


# A file with what is known of it, or with why there is none, and the number of tries.
Outcome = tuple[Entry, Made | str, int]


class Maker:
    """Makes files, with the pipeline patched as long as the settings stay; a context manager."""

    def __init__(self, progress: ProgressDisplay) -> None:
        self._progress, self._kept = progress, KeptPipeline()

    def __enter__(self) -> Maker:
        return self

    def __exit__(self, *_: object) -> None:
        self.forget()

    def load(self, request: Request) -> None:
        """Load the pipeline where it is not yet; raise `UserError` where it cannot be."""
        self._kept.load(request, self._progress)

    def forget(self) -> None:
        """Let go of a pipeline, which may be broken."""
        self._kept.forget()

    def make(self, entry: Entry, folder: Path) -> Made:
        """Write a file and its thumbnail, each whole or not at all."""
        request, item, small = entry.request, entry.item(folder), entry.thumbnail(folder)
        runner = self._kept.runner(request, self._progress)
        runner.generator.plain_lines = 0  # there is one for each file
        warnings = prompt_warnings(runner, item)
        for warning in warnings:
            self._progress.tell(f"{WARNING}{item.label}: {warning}")
        small.parent.mkdir(parents=True, exist_ok=True)
        result, frames = make(runner, item, warnings)
        made = result.made
        assert made is not None
        with written_whole("--output", small) as file:
            image = Image.fromarray(frames[len(frames) // 2])
            image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.LANCZOS)
            image.save(file, "jpeg", quality=JPEG_QUALITY)
        own = [text for text in result.request.warnings if text not in request.warnings]
        return Made(made.total_seconds, own, [*made.fallbacks, *made.notes])


def tried(maker: Maker, entry: Entry, folder: Path, tries: int) -> Outcome:
    """Make a file.

    After an error that may come from the pipeline's state it is loaded anew, and the file is tried
    again, ``tries`` times in all.

    Raises:
        UserError: the pipeline cannot be loaded.
    """
    outcome: Made | str = ""
    for number in range(1, tries + 1):
        maker.load(entry.request)
        try:
            return entry, maker.make(entry, folder), number
        except REFUSED as error:
            return entry, described(error), number
        except Exception as error:
            outcome = described(error)
        maker.forget()
    return entry, outcome, tries
