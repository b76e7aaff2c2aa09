"""The result of `chipsparse batch`, and the manifest of its folder: a record for each file."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from pydantic import ValidationError, computed_field

from chipsparse.cli.errors import user_errors
from chipsparse.cli.generate.record import ROW_PROMPT, RequestRecord
from chipsparse.cli.generate.repeat import MANIFEST
from chipsparse.cli.progress import duration
from chipsparse.cli.views import sections as view
from chipsparse.cli.views.names import bundled_name, name_of
from chipsparse.cli.views.sections import Record, Result, Section, String
from chipsparse.cli.views.units import counted, seconds_text, shortened
from chipsparse.common.bounded import Count, Number

State = Literal["made", "already there", "failed", "missing"]
Stage = Literal["draft", "finished"]
STAGES: tuple[Stage | None, ...] = (None, "draft", "finished")
FINISH = "choose drafts on the page, or add --finish KEY,KEY: a key is a name without its suffix"
CHOOSE = (
    "Drafts show what a seed gives. Finishing one makes it again with the same seed and settings, "
    "in the quality of the batch. Run its command in the folder where this batch ran."
)


class BatchClip(Record):
    """A file of a batch; in the manifest it was made, or failed."""

    file: String  # name in the folder
    state: State
    lines: Sequence[Count]  # that ask for it
    stage: Stage | None = None  # None of a batch without drafts
    draft: String | None = None  # file of the draft that it finishes
    score: Number | None = None  # of a draft; larger is better
    scored_by: String | None = None  # the score of ``--best``
    request: RequestRecord
    seconds: Number | None = None  # with text and decoding; None where not known
    tries: Count | None = None
    error: String | None = None
    remarks: Sequence[String] = ()  # fallbacks, and what else is worth knowing
    time: String = ""  # when it was made or given up, in UTC
    thumbnail: String | None = None

    @property
    def made(self) -> bool:
        """True where the file exists, from this command or an earlier one."""
        return self.state in ("made", "already there")

    @property
    def prompt_text(self) -> str:
        """The prompt, or a word for an empty one."""
        return self.request.prompt or "(empty)"

    @property
    def key(self) -> str:
        """The name by which ``--finish`` takes a draft."""
        return Path(self.file).stem

    @property
    def score_text(self) -> str:
        """The score of a draft with its name; empty where there is none."""
        return "" if self.score is None else f"{self.scored_by} {self.score:.4g}"

    @property
    def quality(self) -> str:
        """The quality's name; "sparse" for a config without a name, or "dense"."""
        return "dense" if self.request.mode == "dense" else self.request.quality or "sparse"

    @property
    def settings(self) -> str:
        """Size, steps, guidance and quality, as the page shows them."""
        return ", ".join(filter(None, (self.request.settings.text(), self.quality)))


def read_manifest(folder: Path) -> dict[str, BatchClip]:
    """Return the last record of each file, by its name; a broken line counts for nothing."""
    path = folder / MANIFEST
    clips = {}
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
        if file.read(1) not in (b"", b"\n"):  # a line that was broken off
            file.write(b"\n")
        file.write(clip.model_dump_json(exclude_none=True).encode() + b"\n")


class BatchResult(Result):
    """A batch, finished or broken off."""

    kind: Literal["batch"] = "batch"
    folder: String
    manifest: String
    page: String
    model: String
    seconds: Number  # of the command
    clips: Sequence[BatchClip]  # in the order of the lines; what finishes a draft follows it
    finish_command: Sequence[String] = ()  # that finishes drafts, but for ``--finish`` and the keys

    @computed_field  # type: ignore[prop-decorator]
    @property
    def counts(self) -> dict[State, int]:
        """The number of clips in each state, states without any included."""
        states = [clip.state for clip in self.clips]
        return {state: states.count(state) for state in get_args(State)}

    @property
    def title(self) -> str:
        """The number of files that exist, of all."""
        made = sum(clip.made for clip in self.clips)
        return f"{made} of {counted(len(self.clips), 'file')}"

    def sections(self, *, verbose: bool = False) -> list[Section]:
        """Return the counts for the terminal, thumbnails for the page, and what was not made."""
        made = [clip for clip in self.clips if clip.made]
        states = ", ".join(f"{count:,} {state}" for state, count in self.counts.items() if count)
        model = bundled_name(self.model) or self.model
        summary = [
            ("model", model),
            ("files", f"{states} of {len(self.clips):,}, in {duration(self.seconds)}"),
            ("folder", self.folder),
            ("manifest", self.manifest),
            ("page", self.page),
        ]
        common = self._common_warnings()
        alerts = [view.Alert(text) for text in sorted(set(common.values()))]
        if failed := self.counts["failed"]:
            text = f"{counted(failed, 'prompt')} failed. Why, stands below."
            alerts.insert(0, view.Alert(text, "error"))
        pictures = self._pictures(common)
        drafts = {clip.file for clip in made if clip.stage == "draft"}
        # A draft that was deleted leaves the file that finishes it.
        alone = [clip for clip in made if clip.stage != "draft" and clip.draft not in drafts]
        plain = [pictures[clip.file] for clip in alone]
        groups = self._groups(pictures)
        if groups:
            summary.append(("finish", FINISH))
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
            Section("", [*alerts, view.Facts(self._facts), view.Gallery(plain)], where="page"),
            *self._drafts(groups),
            Section("Finished", [self._finished()], where="terminal"),
            Section("Not made", [view.Table(columns, rows, 3)], again),
        ]

    @property
    def _settings(self) -> set[str]:
        """The settings that files have, with their qualities."""
        return {clip.settings for clip in self.clips}

    @property
    def _sizes(self) -> set[str]:
        """The settings that files have, without their qualities."""
        return {clip.request.settings.text() for clip in self.clips}

    @property
    def _facts(self) -> list[tuple[str, str]]:
        """What all files have in common, and how long they took."""
        shared = self._settings if len(self._settings) == 1 else self._sizes
        return [
            ("model", name_of(bundled_name(self.model) or self.model)),
            ("settings", next(iter(shared)) if len(shared) == 1 else ""),
            ("time", self._times),
        ]

    @property
    def _times(self) -> str:
        """The median time of a file, of drafts and finished files apart; empty where not known."""
        times = []
        for stage in STAGES:
            of_stage = [clip for clip in self.clips if clip.stage == stage and clip.made]
            seconds = [clip.seconds for clip in of_stage if clip.seconds is not None]
            if seconds:
                name = "" if stage is None else f"{stage} "
                times.append(f"{name}{seconds_text(statistics.median_low(seconds))}")
        return f"{', '.join(times)} each, median" if times else ""

    def _common_warnings(self) -> dict[tuple[Stage | None, str], str]:
        """Return the warnings about all files of a stage, which are said once, as sentences."""
        warned = {}
        for stage in STAGES:
            of_stage = [clip for clip in self.clips if clip.stage == stage]
            if of_stage:
                warned[stage] = set.intersection(*(set(c.request.warnings) for c in of_stage))
        everywhere = set.intersection(*warned.values())
        return {
            (stage, text): text if text in everywhere else f"{stage} files: {text}"
            for stage, texts in warned.items()
            for text in texts
        }

    def _pictures(self, common: Mapping[tuple[Stage | None, str], str]) -> dict[str, view.Picture]:
        """Return the files that were made for the page, without what all have in common."""
        settings = self._settings
        sizes = self._sizes
        pictures = {}
        for clip in self.clips:
            if not clip.made:
                continue
            details = [
                f"seed {clip.request.seed}",
                clip.request.settings.text() if len(sizes) > 1 else "",
                clip.quality if len(settings) > 1 and clip.stage != "draft" else "",
                "" if clip.seconds is None else seconds_text(clip.seconds),
                clip.score_text,
            ]
            detail = ", ".join(text for text in details if text)
            own = [text for text in clip.request.warnings if (clip.stage, text) not in common]
            pictures[clip.file] = view.Picture(
                clip.file,
                clip.thumbnail,
                clip.prompt_text,
                detail,
                own,
            )
        return pictures

    def _drafts(self, groups: list[tuple[str, list[view.Draft]]]) -> list[Section]:
        """Return the page's section of drafts, if there are any."""
        if not groups:
            return []
        return [Section("Drafts", [view.Drafts(groups, self.finish_command)], CHOOSE, where="page")]

    def _groups(self, pictures: Mapping[str, view.Picture]) -> list[tuple[str, list[view.Draft]]]:
        """Return the drafts that were made by prompt and line, each with what finishes it."""
        finished: dict[str | None, list[view.Picture]] = defaultdict(list)
        for clip in self.clips:
            if clip.stage == "finished" and clip.made:
                finished[clip.draft].append(pictures[clip.file])
        groups: dict[tuple[int, ...], tuple[str, list[view.Draft]]] = {}
        for clip in self.clips:
            if clip.stage == "draft" and clip.made:
                group = groups.setdefault(tuple(clip.lines), (clip.prompt_text, []))
                draft = view.Draft(clip.key, pictures[clip.file], finished[clip.file])
                group[1].append(draft)
        return list(groups.values())

    def _finished(self) -> view.Table:
        """Return the finished files with the scores of their drafts."""
        drafts = {clip.file: clip for clip in self.clips if clip.stage == "draft"}
        rows = []
        for clip in self.clips:
            if clip.stage == "finished" and clip.made:
                prompt = shortened(clip.prompt_text, ROW_PROMPT)
                draft = drafts.get(clip.draft or "")
                score = "" if draft is None or draft.score is None else f"{draft.score:.4g}"
                rows.append([prompt, clip.file, str(clip.request.seed), score])
        return view.Table(["prompt", "finished", "seed", "score"], rows, 2)
