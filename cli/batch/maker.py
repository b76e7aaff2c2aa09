"""One loaded pipeline that makes the files of a batch."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from chipsparse.cli.batch.entries import Entry
from chipsparse.cli.batch.record import BatchClip
from chipsparse.cli.errors import UserError, described
from chipsparse.cli.generate.job import WARNING, KeptPipeline, make, prompt_warnings
from chipsparse.cli.media.write import written_whole
from chipsparse.cli.progress import ProgressDisplay

THUMBNAIL_SIDE, JPEG_QUALITY = 320, 85
# Errors of a prompt or its settings: another try would end the same way.
REFUSED = (UserError, ValueError)


class Maker(KeptPipeline):
    """Makes files, with the pipeline patched as long as the settings stay; a context manager."""

    def __init__(self, progress: ProgressDisplay) -> None:
        super().__init__()
        self._progress = progress

    def tried(self, entry: Entry, folder: Path, tries: int) -> BatchClip:
        """Write a file and its thumbnail into a folder, each whole or not at all.

        After an error that may come from the pipeline's state it is loaded anew, and the file is
        tried again, ``tries`` times in all.

        Raises:
            UserError: the pipeline cannot be loaded.
        """
        clip = entry.clip("missing")
        for number in range(1, tries + 1):
            self.load(entry.request, self._progress)
            try:
                return self.make(entry, folder).model_copy(update={"tries": number})
            except Exception as error:
                clip = entry.clip("failed", error=described(error), tries=number)
                if isinstance(error, REFUSED):
                    break
            self.forget()
        return clip

    def make(self, entry: Entry, folder: Path) -> BatchClip:
        """Try a file once."""
        request, item, small = entry.request, entry.item(folder), entry.thumbnail(folder)
        runner = self.runner(request, self._progress)
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
        remarks = [*made.fallbacks, *made.notes]
        return entry.clip("made", own, seconds=made.total_seconds, remarks=remarks)
