"""The files of a batch, each named by a digest of its prompt, seed and settings."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from chipsparse.cli.batch.options import PAGE, THUMBNAILS, BatchOptions
from chipsparse.cli.batch.prompt_file import Line, check_lines
from chipsparse.cli.batch.record import BatchClip, Stage, State, read_manifest
from chipsparse.cli.errors import UserError, described
from chipsparse.cli.generate.job import KeptPipeline, make, prompt_warnings, record_of
from chipsparse.cli.media.write import written_whole
from chipsparse.cli.model.weights import files_digest, weights_digest
from chipsparse.cli.options import Item
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.cli.request import Place, Request, resolve
from chipsparse.common.files import IMAGES

DIGITS = 16  # of a digest: 2^64 of them
# What decides about a result, of the facts that `RequestRecord` has.
DECISIVE = {
    "mode", "negative_prompt", "strength", "scheduler", "flow_shift", "pipeline_class", "dtype",
    "fps", "settings",
}  # fmt: skip
THUMBNAIL_SIDE = 320
JPEG_QUALITY = 85


@dataclass(frozen=True)
class Entry:
    """A file to make."""

    name: str
    lines: Sequence[int]  # numbers of those that ask for it
    prompt: str
    seed: int
    request: Request  # shared by all prompts with the same settings
    folder: Path  # of the batch
    stage: Stage | None = None  # None without drafts
    draft: str | None = None  # name of the draft that it finishes

    @property
    def key(self) -> str:
        """The name without its suffix, by which ``--finish`` takes a draft."""
        return Path(self.name).stem

    @property
    def is_there(self) -> bool:
        """True where the batch's folder has the file."""
        return (self.folder / self.name).is_file()

    def item(self, folder: Path) -> Item:
        """Return what `generate` makes for it, with its file in another folder."""
        label = f"line {self.lines[0]}, seed {self.seed}"
        return Item(0, self.prompt, self.seed, label, output=folder / self.name)

    def thumbnail(self, folder: Path) -> Path:
        """Return the path of its JPEG for the batch's page, in a folder."""
        return folder / THUMBNAILS / f"{self.key}.jpg"

    def clip(self, state: State, warnings: Sequence[str] = (), **result: Any) -> BatchClip:
        """Return the record of what became of it."""
        return BatchClip(
            file=self.name,
            state=state,
            lines=self.lines,
            request=record_of(self.request, self.item(self.folder), warnings),
            stage=self.stage,
            draft=self.draft,
            **result,
        )


@dataclass(frozen=True)
class Jobs:
    """The files of a batch, in the order of the lines."""

    entries: list[Entry]  # with ``--drafts`` or ``--finish``, the drafts
    finishes: list[Entry]  # a file for each draft of each line, of which the chosen ones are made

    def chosen(self, keys: Collection[str], folder: Path) -> list[Entry]:
        """Return the files that finish drafts; raise `UserError` for keys of no draft."""
        known = {entry.key for entry in self.entries}
        unknown = [key for key in keys if key not in known]
        if unknown:
            raise UserError(
                f"--finish {', '.join(unknown)}: {folder} has no such draft of these prompts and "
                f"settings; {PAGE} there shows the keys",
            )
        names = {entry.name for entry in self.entries if entry.key in keys}
        return [finish for finish in self.finishes if finish.draft in names]

    def best(self, scores: Mapping[str, float]) -> list[Entry]:
        """Return the files that finish the best draft of each line; ``scores`` by name of draft."""
        best: dict[int, str] = {}  # by line; drafts that failed have no score
        for entry in self.entries:
            for line in entry.lines if entry.name in scores else ():
                if line not in best or scores[entry.name] > scores[best[line]]:
                    best[line] = entry.name
        return [
            finish
            for finish in self.finishes
            if any(best.get(line) == finish.draft for line in finish.lines)
        ]

    def shown(self, chosen: Iterable[Entry], *, missing: bool) -> list[Entry]:
        """Return all entries, each draft followed by the files that finish it, if there are any.

        ``missing``: drafts that are not there count as well.
        """
        names = {finish.name for finish in chosen}
        by_draft: dict[str | None, list[Entry]] = defaultdict(list)
        for finish in self.finishes:
            if finish.name in names or finish.is_there:
                by_draft[finish.draft].append(finish)
        shown: list[Entry] = []
        for entry in self.entries:
            if missing or entry.is_there:
                shown.append(entry)
            shown += by_draft[entry.name]
        return shown


def find_entries(options: BatchOptions, place: Place, display: ProgressDisplay) -> Jobs:
    """Return the files that the lines ask for, in their order, without loading weights.

    Raises one `UserError` for all lines that cannot be made.
    """
    content = options.file_content
    display.warn(content.warnings)
    problems = dict(content.problems)
    count = len(content.lines) + len(problems)
    finder = _Finder(options, place)
    for line in content.lines:
        try:
            finder.add(line)
        except UserError as error:
            problems[line.number] = str(error)
    check_lines(options.prompts, problems, count=count)
    display.warn(text for request in finder.requests for text in request.warnings)
    return Jobs(list(finder.entries.values()), list(finder.finishes.values()))


class _Finder:
    """Turns lines into entries; lines with the same settings share one request."""

    def __init__(self, options: BatchOptions, place: Place) -> None:
        self.entries: dict[str, Entry] = {}
        self.finishes: dict[str, Entry] = {}
        self._options = options
        self._place = place
        self._suffix = options.suffix(video=place.model.accepts("num_frames"))
        self._file = options.file(self._suffix)
        self._weights = {
            "model": weights_digest(place.model) or place.model.location,
            "loras": [[files_digest({"": lora.file}), lora.scale] for lora in options.loras],
        }
        self._known: dict[str, tuple[Request, dict[str, Any]]] = {}  # by the lines' own settings
        # Drafts of the manifest: the lines that asked for each seed, by prompt.
        self._drafts: dict[str, dict[int, set[int]]] = defaultdict(dict)
        self._lines: dict[str, set[int]] = defaultdict(set)  # of the file, by prompt
        if options.drafting and options.drafts is None:
            self._find_drafts()

    @property
    def requests(self) -> list[Request]:
        return [request for request, _ in self._known.values()]

    def add(self, line: Line) -> None:
        """Add the entries of a line; raise `UserError`, which adds none."""
        own = dict(line.settings)
        seeds: Sequence[int] = self._options.seeds(own)
        if not self._options.drafting:
            self._resolved(own)
            for seed in seeds:
                self._note(self.entries, self._entry(line, seed, own))
            return
        drafted = self._options.draft_settings(own)
        if self._resolved(own)[1] == self._resolved(drafted)[1]:
            raise UserError("its quality is that of the drafts; name another to finish in")
        wanted = self._options.drafts is not None
        for seed in seeds if wanted else self._drafted_seeds(line):
            draft = self._entry(line, seed, drafted, stage="draft")
            # Drafts of other settings have other names, and those that were deleted are let go.
            if not (wanted or draft.is_there or draft.key in self._options.finish_keys):
                continue
            finish = self._entry(line, seed, own, stage="finished", draft=draft.name)
            self._note(self.entries, draft)
            self._note(self.finishes, finish)

    def _find_drafts(self) -> None:
        for clip in read_manifest(self._options.output).values():
            if clip.stage == "draft" and clip.request.seed is not None:
                lines = self._drafts[clip.request.prompt].setdefault(clip.request.seed, set())
                lines.update(clip.lines)
        for line in self._options.file_content.lines:
            self._lines[line.prompt].add(line.number)

    def _drafted_seeds(self, line: Line) -> list[int]:
        """Return the seeds that a line has drafts of; lines may have moved in the file since."""
        return [
            seed
            for seed, asked in sorted(self._drafts[line.prompt].items())
            if line.number in asked or not asked & self._lines[line.prompt]
        ]

    def _entry(self, line: Line, seed: int, own: dict[str, Any], **stage: Any) -> Entry:
        request, decisive = self._resolved(own)
        facts = {"prompt": line.prompt, "seed": seed, "settings": decisive}
        text = json.dumps(facts, sort_keys=True, allow_nan=False)
        name = f"{hashlib.sha256(text.encode()).hexdigest()[:DIGITS]}.{self._suffix}"
        folder = self._options.output
        return Entry(name, [line.number], line.prompt, seed, request, folder, **stage)

    @staticmethod
    def _note(known: dict[str, Entry], entry: Entry) -> None:
        """Add an entry, or its line to the entry that is the same file."""
        if entry.name in known:
            lines = [*known[entry.name].lines, *entry.lines]
            entry = replace(known[entry.name], lines=lines)
        known[entry.name] = entry

    def _resolved(self, own: dict[str, Any]) -> tuple[Request, dict[str, Any]]:
        """Return the request of a line's settings, and all of it that decides about the result."""
        if str(own) in self._known:
            return self._known[str(own)]
        fixed = {
            "device": str(self._place.device),
            "dtype": self._place.dtype_name,
            "output": self._file,
        }
        request = resolve(self._options.of_line({**own, **fixed}), self._place)
        frames = request.settings.num_frames or 1
        if f".{self._suffix}" in IMAGES and frames > 1:
            raise UserError(
                f"a video of {frames} frames is no single .{self._suffix}; use --format mp4",
            )
        self._known[str(own)] = request, {**_decisive(request), **self._weights}
        return self._known[str(own)]


def _decisive(request: Request) -> dict[str, Any]:
    options = request.generate_options
    profile = None if options.dense else request.profile
    image = options.image
    return {
        **record_of(request, Item(0, "", 0, output=options.output)).model_dump(include=DECISIVE),
        "sparsity": None if profile is None else profile.sparsity.words(),
        "image": None if image is None else hashlib.sha256(image.read_bytes()).hexdigest(),
        "crf": options.crf,
    }


class Maker(KeptPipeline):
    """Makes files, with the pipeline patched as long as the settings stay; to be closed."""

    def __init__(self, progress: ProgressDisplay) -> None:
        super().__init__(plain_lines=0)  # there is one for each file
        self._progress = progress

    def each(self, entries: Sequence[Entry], folder: Path, tries: int) -> Iterator[BatchClip]:
        """Write one file after the other; see `tried`."""
        for entry in entries:
            yield self.tried(entry, folder, tries)

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
        """Write a file and its thumbnail into a folder, and return the file's record.

        Raises what the pipeline raises; `tried` makes records of that.
        """
        item = entry.item(folder)
        small = entry.thumbnail(folder)
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
