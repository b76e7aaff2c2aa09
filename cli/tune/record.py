"""The results of `chipsparse tune`: what it tells at its end, and its results file."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from chipsparse.cli.generate.record import Settings
from chipsparse.cli.views.budget_map import Cell, budget_map
from chipsparse.cli.views.sections import (
    FOURTH,
    SECOND,
    SOFT,
    THIRD,
    Chart,
    Facts,
    Number,
    Part,
    QualityPoint,
    Record,
    Result,
    Section,
    String,
    Table,
    Tile,
)
from chipsparse.cli.views.units import counted, decibels, seconds_text, times
from chipsparse.experiments.records import ClipRecord
from chipsparse.experiments.samples import DENSE
from chipsparse.profiles.tuned_range import target_text

if TYPE_CHECKING:
    from chipsparse.cli.views.charts import Canvas

AGAIN = "Run the same tune command again: what is in the file is not measured anew."
NOTHING_TRIED = f"Nothing was tried yet. {AGAIN}"
Action = Literal["dense", "refresh", "sparse", "skip"]


class TunedResult(Result):
    """A finished search.

    Attributes:
        profile: the file that was written.
        results: the file with the measurements.
        schedule: the chosen one in words.
        actions: of each step.
        full: the numbers of the full steps.
        sparse: the numbers of the sparse steps.
        tuned: the range of the profile, with the target and the measurement.
        sparsity: the whole config.
        configs_tried: how many configs were generated with, now or before.
    """

    kind: Literal["tuned"] = "tuned"
    profile: String
    results: String
    schedule: String
    actions: Sequence[String]
    full: Sequence[int]
    sparse: Sequence[int] = ()
    tuned: Mapping[str, Any]
    sparsity: Mapping[str, Any]
    configs_tried: int

    def sections(self, *, verbose: bool = False) -> list[Section]:
        """Return the summary."""
        measured = self.tuned["measured"]
        seconds, dense = measured["seconds"], measured["dense_seconds"]
        speedup = dense / seconds if seconds else 0.0
        rows = [
            ("profile", self.profile),
            ("quality", self._quality),
            (
                "time",
                f"{seconds_text(seconds)}, dense {seconds_text(dense)}: {speedup:.2f} times as "
                "fast",
            ),
            ("schedule", self.schedule),
            ("full steps", ", ".join(map(str, self.full))),
            ("sparse steps", ", ".join(map(str, self.sparse))),
            (
                "chosen from",
                f"{counted(self.configs_tried, 'config')}; verified on "
                f"{counted(measured['prompts'], 'prompt')}",
            ),
            ("measurements", self.results),
        ]
        return [Section("", [Facts(rows)])]

    @property
    def _quality(self) -> str:
        measured = self.tuned["measured"]
        worst, median = measured["psnr_db_worst"], measured["psnr_db_median"]
        if worst is None or median is None:
            return "the same clips as dense"
        text = f"PSNR {worst:.1f} dB at worst, median {median:.1f}"
        for name, title in (("ssim_worst", "SSIM"), ("lpips_worst", "LPIPS")):
            if measured[name] is not None:
                text += f"; {title} {measured[name]:.3f} at worst"
        return text


class Chosen(Record):
    """The end of a search: a config, the share of its sparse steps, and the action of each step."""

    config: String
    form: String
    density: Number
    actions: Sequence[Action]

    def chart(self) -> Chart:
        """Return a map of the steps, all layers as one."""
        shares = {"skip": 0.0, "sparse": self.density}
        cells = {
            (0, step): Cell(action, shares.get(action, 1.0))
            for step, action in enumerate(self.actions)
        }
        caption = "What each step does, all layers alike"
        return budget_map(cells, layers=1, steps=len(self.actions), caption=caption)


class Search(Record):
    """A search for one target; nothing is chosen where it was interrupted or there is nothing.

    Attributes:
        held_out: the prompts that verified.
    """

    target: Mapping[str, Number]
    held_out: Sequence[String] = ()
    chosen: Chosen | None = None

    @property
    def text(self) -> str:
        """The target in words."""
        return target_text(self.target)


class Tried:
    """A config with its clips, one for each prompt that it was tried on."""

    def __init__(self, clips: Sequence[ClipRecord], dense: Mapping[str, float]) -> None:
        self.clips = clips
        self.name: str = clips[0].facts.get("config", "")
        self.form: str = clips[0].facts.get("form", "")
        self.psnrs = [clip.psnr_db for clip in clips if clip.psnr_db is not None]
        self.seconds = statistics.median(clip.total_seconds for clip in clips)
        known = [dense[clip.prompt] for clip in clips if clip.prompt in dense]
        self.dense_seconds = statistics.median(known) if known else None
        dense_seconds, seconds = self.dense_seconds, self.seconds
        self.speedup = dense_seconds / seconds if dense_seconds and seconds else None

    def text(self) -> str:
        """Return the config in words, with its quality and time."""
        speedup = "" if self.speedup is None else f", {times(self.speedup)} dense"
        return (
            f"{self.form}: {min(self.psnrs):.2f} dB at worst on "
            f"{counted(len(self.clips), 'prompt')}, {seconds_text(self.seconds)}{speedup}"
        )


class About(Settings):
    """The facts that all measurements of a results file have in common."""

    model: String = "a model"
    transformer_class: String = ""
    flow_shift: Number | None = None
    delta_rule: String = Field(default="", alias="attention.delta_rule")
    device: String = ""
    dtype: String = ""
    chipsparse: String = ""
    torch: String = ""
    diffusers: String = ""


class TuningResult(Result):
    """The results file of tuning; the last search is the newest."""

    kind: Literal["tuning"] = "tuning"
    about: About
    measured: Mapping[str, Mapping[str, Any]]
    searches: Mapping[String, Search] = Field(default={}, alias="notes")

    @cached_property
    def clips(self) -> list[ClipRecord]:
        """The records of all clips, in the order in which they were made."""
        kept = self.measured.values()
        return [ClipRecord.model_validate(each) for each in kept if "way" in each]

    @cached_property
    def dense(self) -> dict[str, float]:
        """The seconds of dense generations, by prompt."""
        return {clip.prompt: clip.total_seconds for clip in self.clips if clip.way == DENSE}

    @cached_property
    def tried(self) -> list[Tried]:
        """The configs, in the order in which they were tried."""
        configs: dict[str, list[ClipRecord]] = {}
        for clip in self.clips:
            if clip.way != DENSE:
                configs.setdefault(clip.facts.get("config", ""), []).append(clip)
        return [Tried(clips, self.dense) for clips in configs.values()]

    @property
    def chosen(self) -> set[str]:
        """The configs that a search ended at."""
        return {each.chosen.config for each in self.searches.values() if each.chosen is not None}

    @property
    def targets(self) -> str:
        """The targets of all searches in words."""
        return "; ".join(dict.fromkeys(each.text for each in self.searches.values()))

    @property
    def title(self) -> str:
        """The headline of the page."""
        return f"Tuning of {self.about.model}"

    def points(self, name: str) -> list[QualityPoint]:
        """Return every config at its worst prompt."""
        return [
            QualityPoint(f"{name}, {each.form}", each.speedup, min(each.psnrs))
            for each in self.tried
            if each.speedup is not None and each.psnrs
        ]

    def sections(self, *, verbose: bool = False) -> list[Section]:
        """Return the chosen schedules, and every config that was tried."""
        sections = [
            Section("", self._head()),
            Section(
                "Quality and speed",
                [self._chart() if self.tried or self.searches else None],
                "A dot is a config, at the lowest PSNR that it reached on any prompt; the upright "
                "line above it reaches to its highest. Configs are given up early where others of "
                "the same time are better, or where a held-out prompt misses the target.",
                where="page",
                missing=NOTHING_TRIED,
            ),
        ]
        sections += [
            Section(f"Chosen schedule, for {each.text}", [each.chosen.chart()], each.chosen.form)
            for each in self.searches.values()
            if each.chosen is not None
        ]
        if not self.chosen:
            why = f"No config was seen to reach the target ({self.targets}). {AGAIN}"
            sections.append(Section("Chosen schedule", [], where="page", missing=why))
        return [
            *sections,
            Section(
                "Candidates",
                [self._table()],
                "Every generation of the search, against the dense one with the same seed. "
                "Held-out prompts had no part in the choice of the form.",
                where="page",
                missing=NOTHING_TRIED,
            ),
        ]

    def _head(self) -> list[Part]:
        about = self.about
        parts: list[Part] = []
        newest = next(reversed(list(self.searches.values())), None)
        if newest is not None and newest.chosen is not None:
            clips = [c for c in self.clips if c.facts.get("config") == newest.chosen.config]
            held_out = [clip for clip in clips if clip.prompt in newest.held_out] or clips
            if held_out:
                best = Tried(held_out, self.dense)
                if best.speedup is not None and best.dense_seconds is not None:
                    took = f"{seconds_text(best.seconds)}, dense {seconds_text(best.dense_seconds)}"
                    parts.append(Tile(times(best.speedup), "as fast as dense", took))
                psnr = decibels(min(best.psnrs, default=None))
                label = f"PSNR, worst of {counted(len(held_out), 'held-out prompt')}"
                parts.append(Tile(psnr, label, f"target: {newest.text}"))
        parts.append(Tile(str(len(self.tried)), "configs tried"))
        parts.append(Tile(str(len(self.measured)), "measurements in the file"))
        versions = {name: getattr(about, name) for name in ("chipsparse", "torch", "diffusers")}
        rows = [
            ("model", f"{about.model} ({about.transformer_class})"),
            ("settings", about.text(about.flow_shift)),
            ("targets", self.targets),
            ("delta rule", about.delta_rule),
            ("device", ", ".join(text for text in (about.device, about.dtype) if text)),
            ("versions", ", ".join(f"{name} {text}" for name, text in versions.items() if text)),
        ]
        return [*parts, Facts(rows)]

    def _table(self) -> Table:
        held_out = {prompt for each in self.searches.values() for prompt in each.held_out}
        has_lpips = any(clip.lpips is not None for clip in self.clips)
        order = sorted(self.tried, key=lambda each: (each.name not in self.chosen, each.seconds))
        rows = []
        for config in order:
            for clip in config.clips:
                dense = self.dense.get(clip.prompt)
                prompt = f"seed {clip.seed}, {clip.prompt}"
                lpips = "" if clip.lpips is None else f"{clip.lpips:.4f}"
                rows.append(
                    [
                        config.form + " (chosen)" * (config.name in self.chosen),
                        prompt + ", held out" * (clip.prompt in held_out),
                        decibels(clip.psnr_db),
                        "" if clip.ssim is None else f"{clip.ssim:.4f}",
                        *([lpips] * has_lpips),
                        seconds_text(clip.total_seconds),
                        "" if dense is None else seconds_text(dense),
                    ]
                )
        columns = ["config", "prompt", "PSNR", "SSIM", *["LPIPS"] * has_lpips, "time", "dense"]
        return Table(columns, rows, texts=2)

    def _chart(self) -> Chart:
        """Return a chart of PSNR over the time of a generation, of every config."""
        tried = [each for each in self.tried if each.psnrs]
        dense = statistics.median(self.dense.values()) if self.dense else None
        targets = [each.target for each in self.searches.values()]
        goals = dict.fromkeys(goal for target in targets if (goal := target.get("min_psnr_db")))
        limits = [limit for target in targets if (limit := _limit(target, dense)) is not None]
        slowest = max([*(each.seconds for each in tried), dense or 0.0])
        # A generous one would press all else together.
        limits = [limit for limit in limits if limit <= 1.5 * slowest or not slowest]

        def draw(canvas: Canvas) -> None:
            canvas.plane("time of a generation, s", "PSNR against dense, dB")
            for limit in limits:
                canvas.axes.axvline(limit, color=FOURTH, linestyle="--", label="target")
            if dense is not None:
                label = f"dense, {seconds_text(dense)}"
                canvas.axes.axvline(dense, color=SOFT, linestyle="--", label=label)
            for each in tried:
                low, high = min(each.psnrs), max(each.psnrs)
                canvas.axes.vlines(each.seconds, low, high, color=SECOND, linewidth=1.6)
            for chosen, colour, label in ((False, SECOND, "tried"), (True, THIRD, "chosen")):
                marks = [
                    (each.seconds, min(each.psnrs), each.text())
                    for each in tried
                    if (each.name in self.chosen) == chosen
                ]
                radius = 6 if chosen else 4
                canvas.dots(marks, colour, label=label, square=chosen, radius=radius)
            for goal in goals:
                canvas.level(goal, f"target {goal:g} dB")
            canvas.axes.set_xlim(left=0)

        title = "PSNR of configs over the time of a generation"
        return Chart(title, draw, "PSNR over time of every config that was tried", 380)


def _limit(target: Mapping[str, float], dense: float | None) -> float | None:
    """Return the longest that a generation may take for a target, if it says so."""
    speedup = target.get("min_speedup")
    if speedup and dense is not None:
        return dense / speedup
    return target.get("max_seconds")
