"""The results of `chipsparse tune`: what it prints at its end, and its results file."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from pydantic import Field

from chipsparse.cli.compare.rows import (
    QUALITY,
    Row,
    clips_table,
    numbers_table,
    quality_chart,
)
from chipsparse.cli.generate.record import Settings
from chipsparse.cli.views.budget_map import Cell, budget_map
from chipsparse.cli.views.sections import (
    Chart,
    Facts,
    Part,
    QualityPoint,
    Record,
    Result,
    Section,
    String,
    Tile,
)
from chipsparse.cli.views.units import counted, decibels, seconds_text, times
from chipsparse.common.bounded import Number
from chipsparse.experiments.records import ClipRecord
from chipsparse.experiments.samples import DENSE
from chipsparse.profiles.tuned_range import target_text

AGAIN = "Run the same tune command again: what is in the file is not measured anew."
NOTHING_TRIED = f"Nothing was tried yet. {AGAIN}"
TARGETS = {"min_psnr_db": "psnr_db", "min_ssim": "ssim", "max_lpips": "lpips"}
Action = Literal["dense", "refresh", "sparse", "skip"]


class Chosen(Record):
    """The end of a search: a config, the share of its sparse steps, and the action of each step."""

    config: String
    form: String
    density: Number
    actions: Sequence[Action]

    def steps(self, *actions: str) -> list[int]:
        """Return the numbers of the steps with these actions."""
        return [step for step, action in enumerate(self.actions) if action in actions]

    def chart(self) -> Chart:
        """Return a map of the steps, all layers as one."""
        shares = {"skip": 0.0, "sparse": self.density}
        cells = {
            (0, step): Cell(action, shares.get(action, 1.0))
            for step, action in enumerate(self.actions)
        }
        caption = "What each step does, all layers alike"
        return budget_map(cells, layers=1, steps=len(self.actions), caption=caption)


class TunedResult(Result):
    """A finished search.

    Attributes:
        profile: the file that was written.
        results: the file with the measurements.
        tuned: the range of the profile, with the target and the measurement.
        sparsity: the whole config.
        configs_tried: how many configs were generated with, now or before.
    """

    kind: Literal["tuned"] = "tuned"
    profile: String
    results: String
    chosen: Chosen
    tuned: Mapping[str, Any]
    sparsity: Mapping[str, Any]
    configs_tried: int

    def sections(self, *, verbose: bool = False) -> list[Section]:
        """Return the summary."""
        measured, chosen = self.tuned["measured"], self.chosen
        seconds, dense = measured["seconds"], measured["dense_seconds"]
        worst, median = measured["psnr_db_worst"], measured["psnr_db_median"]
        quality = "the same clips as dense"
        if worst is not None and median is not None:
            quality = f"PSNR {worst:.1f} dB at worst, median {median:.1f}"
            for name, title in (("ssim_worst", "SSIM"), ("lpips_worst", "LPIPS")):
                if measured[name] is not None:
                    quality += f"; {title} {measured[name]:.3f} at worst"
        speedup = f"{dense / seconds if seconds else 0.0:.2f} times as fast"
        prompts = counted(measured["prompts"], "prompt")
        rows = [
            ("profile", self.profile),
            ("quality", quality),
            ("time", f"{seconds_text(seconds)}, dense {seconds_text(dense)}: {speedup}"),
            ("schedule", chosen.form),
            ("full steps", ", ".join(map(str, chosen.steps("dense", "refresh")))),
            ("sparse steps", ", ".join(map(str, chosen.steps("sparse")))),
            ("chosen from", f"{counted(self.configs_tried, 'config')}; verified on {prompts}"),
            ("measurements", self.results),
        ]
        return [Section("", [Facts(rows)])]


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
                configs.setdefault(clip.facts.get("config", ""), []).append(clip)
        chosen = {search.chosen.config for search in self.searches.values() if search.chosen}
        rows = []
        for config, clips in configs.items():
            method = "chosen" if config in chosen else "tried"
            name = clips[0].facts.get("form", "") + " (chosen)" * (config in chosen)
            rows.append(Row(name=name, method=method, setting=config, clips=clips))
        return sorted(rows, key=lambda row: (row.method == "tried", -row.median("speedup")))

    @property
    def targets(self) -> str:
        """The targets of all searches in words."""
        return "; ".join(dict.fromkeys(search.text for search in self.searches.values()))

    @property
    def title(self) -> str:
        """The headline of the page."""
        return f"Tuning of {self.about.model}"

    def points(self, name: str) -> list[QualityPoint]:
        """Return every config at its worst prompt."""
        return [
            QualityPoint(f"{name}, {row.name}", row.median("speedup"), quality.worst)
            for row in self.rows
            if (quality := row.quality("psnr_db")) is not None
        ]

    def sections(self, *, verbose: bool = False) -> list[Section]:
        """Return the chosen schedules, and every config that was tried."""
        chosen = [search for search in self.searches.values() if search.chosen is not None]
        held_out = {prompt for search in self.searches.values() for prompt in search.held_out}
        prompts = {
            clip.seed: clip.prompt + ", held out" * (clip.prompt in held_out)
            for clip in self.clips
            if clip.way == DENSE
        }
        why = f"No config was seen to reach the target ({self.targets}). {AGAIN}"
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
            *(
                Section(
                    f"Chosen schedule, for {search.text}",
                    [search.chosen.chart()],
                    search.chosen.form,
                )
                for search in chosen
                if search.chosen is not None
            ),
            *([] if chosen else [Section("Chosen schedule", [], where="page", missing=why)]),
            Section(
                "Candidates",
                [
                    numbers_table(self.rows, passed=False) if self.rows else None,
                    clips_table(self.rows, prompts) if self.rows else None,
                ],
                "Median time of a generation, mean (worst) quality against the dense clip of the "
                "same seed. Held-out prompts had no part in the choice of the form.",
                where="page",
                missing=NOTHING_TRIED,
            ),
        ]

    def _head(self) -> list[Part]:
        about, parts = self.about, list[Part]()
        newest = next(reversed(list(self.searches.values())), None)
        if newest is not None and newest.chosen is not None:
            clips = [c for c in self.clips if c.facts.get("config") == newest.chosen.config]
            # The chosen config was tried on those that calibrate, too, and may be worse there.
            held_out = [clip for clip in clips if clip.prompt in newest.held_out] or clips
            if held_out:
                best = Row(name="", clips=held_out)
                took = f"median generation {seconds_text(best.median('seconds'))}"
                parts.append(Tile(times(best.median("speedup")), "as fast as dense", took))
                quality = best.quality("psnr_db")
                label = f"PSNR, worst of {counted(len(held_out), 'held-out prompt')}"
                psnr = decibels(None if quality is None else quality.worst)
                parts.append(Tile(psnr, label, f"target: {newest.text}"))
        parts.append(Tile(str(len(self.rows)), "configs tried"))
        parts.append(Tile(str(len(self.measured)), "measurements in the file"))
        dense = [clip.seconds for clip in self.clips if clip.way == DENSE]
        versions = {name: getattr(about, name) for name in ("chipsparse", "torch", "diffusers")}
        rows = [
            ("model", f"{about.model} ({about.transformer_class})"),
            ("settings", about.text(about.flow_shift)),
            ("targets", self.targets),
            ("dense", f"{seconds_text(statistics.median(dense))} a generation" if dense else ""),
            ("delta rule", about.delta_rule),
            ("device", ", ".join(text for text in (about.device, about.dtype) if text)),
            ("versions", ", ".join(f"{name} {text}" for name, text in versions.items() if text)),
        ]
        return [*parts, Facts(rows)]

    def _chart(self, metric: str) -> Chart | None:
        """Return the worst of a metric over speed with its targets; SSIM and LPIPS if asked for."""
        targets = [search.target for search in self.searches.values()]
        (goal,) = (name for name, own in TARGETS.items() if own == metric)
        levels = dict.fromkeys(target[goal] for target in targets if goal in target)
        if metric != "psnr_db" and not levels:
            return None
        speeds = dict.fromkeys(t["min_speedup"] for t in targets if "min_speedup" in t)
        texts = [(level, f"target {level:g}") for level in levels]
        return quality_chart(self.rows, metric, levels=texts, limits=[*speeds], worst=True)
