"""The files of a batch, each named by a digest of its prompt, seed and settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from chipsparse.cli.batch.options import THUMBNAILS, BatchOptions
from chipsparse.cli.batch.prompt_file import check_lines
from chipsparse.cli.batch.record import BatchClip, State
from chipsparse.cli.errors import UserError, described
from chipsparse.cli.generate.job import KeptPipeline, make, prompt_warnings, record_of
from chipsparse.cli.media.write import written_whole
from chipsparse.cli.model.weights import files_digest, weights_digest
from chipsparse.cli.options import Item, read_value, seeds_from
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.cli.request import Place, Request, resolve
from chipsparse.common.files import IMAGES

DIGITS = 16  # of a digest: 2^64 of them
# What decides about a result, of the facts that `RequestRecord` has.
DECISIVE = {
    "mode", "negative_prompt", "strength", "scheduler", "flow_shift", "pipeline_class", "dtype",
    "fps", "settings",
}  # fmt: skip
THUMBNAIL_SIDE, JPEG_QUALITY = 320, 85


@dataclass(frozen=True)
class Entry:
    """A file to make."""

    name: str
    lines: Sequence[int]  # numbers of those that ask for it
    prompt: str
    seed: int
    request: Request  # shared by all prompts with the same settings
    folder: Path  # of the batch

    def item(self, folder: Path) -> Item:
        label = f"line {self.lines[0]}, seed {self.seed}"
        return Item(0, self.prompt, self.seed, label, output=folder / self.name)

    def thumbnail(self, folder: Path) -> Path:
        return folder / THUMBNAILS / f"{Path(self.name).stem}.jpg"

    def clip(self, state: State, warnings: Sequence[str] = (), **result: Any) -> BatchClip:
        """Return the record of what became of it."""
        request = record_of(self.request, self.item(self.folder), warnings)
        return BatchClip(file=self.name, state=state, lines=self.lines, request=request, **result)


def find_entries(options: BatchOptions, place: Place, display: ProgressDisplay) -> list[Entry]:
    """Return the files that the lines ask for, in their order, without loading weights.

    Raises one `UserError` for all lines that cannot be made.
    """
    model, video = place.model, place.model.accepts("num_frames")
    suffix = options.suffix(video=video)
    file = options.file(suffix)
    fixed = {"device": str(place.device), "dtype": place.dtype_name}
    weights = {
        "model": weights_digest(model) or model.location,
        "loras": [[files_digest({"": lora.file}), lora.scale] for lora in options.loras],
    }
    known: dict[str, tuple[Request, dict[str, Any]]] = {}  # by the lines' own settings
    entries: dict[str, Entry] = {}
    content = options.file_content
    display.warn(content.warnings)
    problems = dict(content.problems)
    count = len(content.lines) + len(problems)
    for line in content.lines:
        own: dict[str, Any] = dict(line.settings.items())
        try:
            seed = read_value(BatchOptions, "seed", own.pop("seed", options.seed))
            number = read_value(BatchOptions, "num", own.pop("num", options.num or 1))
            seeds = seeds_from(seed, number)
            if str(own) not in known:
                given = options.of_line({**own, **fixed, "output": file})
                request = resolve(given, place)
                frames = request.settings.num_frames or 1
                if f".{suffix}" in IMAGES and frames > 1:
                    raise UserError(
                        f"a video of {frames} frames is no single .{suffix}; use --format mp4"
                    )
                known[str(own)] = request, {**_decisive(request), **weights}
        except UserError as error:
            problems[line.number] = str(error)
            continue
        request, decisive = known[str(own)]
        for own_seed in seeds:
            facts = {"prompt": line.prompt, "seed": own_seed, "settings": decisive}
            text = json.dumps(facts, sort_keys=True, allow_nan=False)
            name = f"{hashlib.sha256(text.encode()).hexdigest()[:DIGITS]}.{suffix}"
            asked = (*entries[name].lines, line.number) if name in entries else (line.number,)
            entries[name] = Entry(name, asked, line.prompt, own_seed, request, options.output)
    check_lines(options.prompts, problems, count=count)
    display.warn(text for request, _ in known.values() for text in request.warnings)
    return list(entries.values())


def _decisive(request: Request) -> dict[str, Any]:
    options = request.generate_options
    profile = None if options.dense else request.profile
    image = options.image
    return {
        **record_of(request, Item(0, "", 0, output=options.output)).model_dump(include=DECISIVE),
        "sparsity": None if profile is None else asdict(profile.sparsity),
        "image": None if image is None else hashlib.sha256(image.read_bytes()).hexdigest(),
        "crf": options.crf,
    }


class Maker(KeptPipeline):
    """Makes files, with the pipeline patched as long as the settings stay; to be closed."""

    def __init__(self, progress: ProgressDisplay) -> None:
        super().__init__(plain_lines=0)  # there is one for each file
        self._progress = progress

    def tried(self, entry: Entry, folder: Path, tries: int) -> BatchClip:
        """Write a file and its thumbnail into a folder, each whole or not at all.

        After an error that may come from the pipeline's state it is loaded anew, and the file is
        tried again, ``tries`` times in all. Raises `UserError` where it cannot be loaded.
        """
        for number in range(1, tries + 1):
            self.load(entry.request, self._progress)
            try:
                return self.make(entry, folder).model_copy(update={"tries": number})
            except Exception as error:
                clip = entry.clip("failed", error=described(error), tries=number)
                # Of a prompt or its settings: another try would end the same way.
                if isinstance(error, (UserError, ValueError)):
                    break
            self.close()
        return clip

    def make(self, entry: Entry, folder: Path) -> BatchClip:
        item, small = entry.item(folder), entry.thumbnail(folder)
        self.use(entry.request, self._progress)
        warnings = prompt_warnings(self, item)
        small.parent.mkdir(parents=True, exist_ok=True)
        result, frames = make(self, item, warnings)
        made = result.made
        assert made is not None
        with written_whole("--output", small) as file:
            image = Image.fromarray(frames[len(frames) // 2])
            image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.LANCZOS)
            image.save(file, "jpeg", quality=JPEG_QUALITY)
        own = [text for text in result.request.warnings if text not in entry.request.warnings]
        remarks = [*made.fallbacks, *made.notes]
        return entry.clip("made", own, seconds=made.total_seconds, remarks=remarks)
