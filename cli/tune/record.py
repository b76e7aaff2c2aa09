"""The results of `chipsparse tune`: what it prints at its end, and its results file."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from pydantic import Field

from chipsparse.cli.compare.ways import QUALITY, Row, clips_table, numbers_table, quality_chart
from chipsparse.cli.generate.record import Settings
from chipsparse.cli.views import sections as view
from chipsparse.cli.views.budget_map import Cell, budget_map
from chipsparse.cli.views.sections import QualityPoint, Record, Result, Section, String
from chipsparse.cli.views.units import counted, decibels, seconds_text, times
from chipsparse.common.bounded import Number
from chipsparse.experiments.records import ClipRecord
from chipsparse.experiments.samples import DENSE
from chipsparse.profiles.tuned_range import TunedMeasurement, target_text

AGAIN = "Run the same tune command again: what is in the file is not measured anew."
NOTHING_TRIED = f"Nothing was tried yet. {AGAIN}"
GOALS = {"psnr_db": "min_psnr_db", "ssim": "min_ssim", "lpips": "max_lpips"}
Action = Literal["dense", "refresh", "sparse", "skip"]


def quality_text(measured: TunedMeasurement) -> str:
    """Return the quality on the held-out prompts in words."""
    if measured.psnr_db_worst is None:
        return "the same clips as dense"
    worst = decibels(measured.psnr_db_worst)
    median = decibels(measured.psnr_db_median)
    text = f"PSNR {worst} at worst, median {median}"
    if measured.ssim_worst is not None:
        text += f"; SSIM {measured.ssim_worst:.3f} at worst"
    if measured.lpips_worst is not None:
        text += f"; LPIPS {measured.lpips_worst:.3f} at worst"
    return text


def time_text(measured: TunedMeasurement) -> str:
    """Return the median time on the held-out prompts in words."""
    seconds = seconds_text(measured.seconds)
    dense = seconds_text(measured.dense_seconds)
    return f"{seconds}, dense {dense}: {measured.speedup:.2f} times as fast"


class Chosen(Record):
    """The end of a search."""

    config: String  # its digest
    form: String  # the schedule in words
    density: Number  # share of columns of its sparse steps
    actions: Sequence[Action]  # of each step
    measured: TunedMeasurement  # on held-out prompts

    def steps(self, *actions: str) -> str:
        """Return the numbers of the steps with these actions, as a text."""
        return ", ".join(str(n) for n, action in enumerate(self.actions) if action in actions)

    def chart(self) -> view.Chart:
        """Return a map of the steps, all layers as one."""
        shares = {"skip": 0.0, "sparse": self.density}
        steps = enumerate(self.actions)
        cells = {(0, step): Cell(action, shares.get(action, 1.0)) for step, action in steps}
        caption = "What each step does, all layers alike"
        return budget_map(cells, layers=1, steps=len(self.actions), caption=caption)


class TunedResult(Result):
    """A finished search."""

    kind: Literal["tuned"] = "tuned"
    profile: String  # file that was written
    results: String  # file with the measurements
    chosen: Chosen
    sparsity: Mapping[str, Any]  # the whole config
    configs_tried: int  # now or before

    def sections(self, *, verbose: bool = False) -> list[Section]:
        """Return the chosen schedule with its quality and time, as one block of facts."""
        chosen = self.chosen
        prompts = counted(self.chosen.measured.prompts, "prompt")
        rows = [
            ("profile", self.profile),
            ("quality", quality_text(chosen.measured)),
            ("time", time_text(chosen.measured)),
            ("schedule", chosen.form),
            ("full steps", chosen.steps("dense", "refresh")),
            ("sparse steps", chosen.steps("sparse")),
            ("chosen from", f"{counted(self.configs_tried, 'config')}; verified on {prompts}"),
            ("measurements", self.results),
        ]
        return [Section("", [view.Facts(rows)])]


class Search(Record):
    """A search for one target; nothing is chosen where it was interrupted or there is nothing."""

    target: Mapping[str, Number]
    held_out: Sequence[String] = ()
    chosen: Chosen | None = None

    @property
    def text(self) -> str:
        """The target in words."""
        return target_text(self.target)


class About(Settings):
    """The facts that all measurements of a results file have in common."""

    model: String = "a model"
    transformer_class: String = ""
    flow_shift: Number | None = None
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
        """The records of all clips by total times, in the order in which they were made."""
        kept = [ClipRecord.model_validate(x) for x in self.measured.values() if "way" in x]
        dense = {clip.prompt: clip.total_seconds for clip in kept if clip.way == DENSE}
        clips = []
        for clip in kept:
            seconds = clip.total_seconds
            speedup = dense.get(clip.prompt, seconds) / seconds if seconds else 1.0
            clips.append(clip.model_copy(update={"seconds": seconds, "speedup": speedup}))
        return clips

    @cached_property
    def rows(self) -> list[Row]:
        """The configs, chosen ones first, then the fastest."""
        configs: dict[str, list[ClipRecord]] = {}
        for clip in self.clips:
            if clip.way != DENSE:
                configs.setdefault(clip.facts["config"], []).append(clip)
        chosen = {search.chosen.config for search in self.searches.values() if search.chosen}
        rows = []
        for config, clips in configs.items():
            name = clips[0].facts["form"]
            method = "tried"
            if config in chosen:
                name = f"{name} (chosen)"
                method = "chosen"
            rows.append(Row(name=name, method=method, setting=config, clips=clips))
        return sorted(rows, key=lambda row: (row.method == "tried", -row.median("speedup")))

    @property
    def targets(self) -> str:
        """The targets of all searches in words, each once."""
        return "; ".join(dict.fromkeys(search.text for search in self.searches.values()))

    @property
    def title(self) -> str:
        """The model's name."""
        return f"Tuning of {self.about.model}"

    def points(self, name: str) -> list[QualityPoint]:
        """Return every config at its worst prompt."""
        return [
            QualityPoint(f"{name}, {row.name}", row.median("speedup"), quality.worst)
            for row in self.rows
            if (quality := row.quality("psnr_db")) is not None
        ]

    def sections(self, *, verbose: bool = False) -> list[Section]:
        """Return the chosen schedules, then all that was measured."""
        chosen = [
            Section(f"Chosen schedule, for {search.text}", [own.chart()], own.form)
            for search in self.searches.values()
            if (own := search.chosen) is not None
        ]
        if not chosen:
            missing = f"No config was seen to reach the target ({self.targets}). {AGAIN}"
            chosen = [Section("Chosen schedule", [], where="page", missing=missing)]
        held_out = {prompt for search in self.searches.values() for prompt in search.held_out}
        dense = (clip for clip in self.clips if clip.way == DENSE)
        prompts = {
            clip.seed: f"{clip.prompt}, held out" if clip.prompt in held_out else clip.prompt
            for clip in dense
        }
        tables = [numbers_table(self.rows, passed=False), clips_table(self.rows, prompts)]
        return [
            Section("", self._head()),
            Section(
                "Quality and speed",
                [self._chart(metric) for metric in QUALITY],
                "A mark is a config, at the worst of its prompts. Configs are given up early where "
                "others of the same time are better, or where a held-out prompt misses the target.",
                where="page",
                missing=NOTHING_TRIED,
            ),
            *chosen,
            Section(
                "Candidates",
                tables if self.rows else [],
                "Median time of a generation, mean (worst) quality against the dense clip of the "
                "same seed. Held-out prompts had no part in the choice of the form.",
                where="page",
                missing=NOTHING_TRIED,
            ),
        ]

    def _head(self) -> list[view.Part]:
        about = self.about
        tiles = list[view.Part]()
        newest = [*self.searches.values()][-1] if self.searches else Search(target={})
        if newest.chosen is not None:
            best = newest.chosen.measured
            took = f"median generation {seconds_text(best.seconds)}"
            worst = f"PSNR, worst of {counted(best.prompts, 'held-out prompt')}"
            tiles.append(view.Tile(times(best.speedup), "as fast as dense", took))
            tiles.append(view.Tile(decibels(best.psnr_db_worst), worst, f"target: {newest.text}"))
        tiles.append(view.Tile(str(len(self.rows)), "configs tried"))
        dense = [clip.seconds for clip in self.clips if clip.way == DENSE]
        versions = {name: getattr(about, name) for name in ("chipsparse", "torch", "diffusers")}
        rows = [
            ("model", f"{about.model} ({about.transformer_class})"),
            ("settings", about.text(about.flow_shift)),
            ("targets", self.targets),
            ("dense", f"{seconds_text(statistics.median(dense))} a generation" if dense else ""),
            ("device", ", ".join(filter(None, (about.device, about.dtype)))),
            ("versions", ", ".join(f"{name} {text}" for name, text in versions.items() if text)),
        ]
        return [*tiles, view.Facts(rows)]

    def _chart(self, metric: str) -> view.Chart | None:
        """Return the worst of a metric over speed with its targets; SSIM and LPIPS if asked for."""
        targets = [search.target for search in self.searches.values()]
        goal = GOALS[metric]
        levels = dict.fromkeys(target[goal] for target in targets if goal in target)
        if metric != "psnr_db" and not levels:
            return None
        speeds = dict.fromkeys(t["min_speedup"] for t in targets if "min_speedup" in t)
        texts = [(level, f"target {level:g}") for level in levels]
        return quality_chart(self.rows, metric, levels=texts, limits=[*speeds], worst=True)
