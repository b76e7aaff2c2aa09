"""The results file of `chipsparse tune`: what was tried and chosen."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pydantic import Field

from chipsparse.cli.pages.generation_record import Action, Cell
from chipsparse.cli.pages.records import FileRecord, Number, QualityPoint, Record, Settings, within
from chipsparse.cli.tune.names import dense_name, pair_of
from chipsparse.profiles.tuned_range import target_text


class Measurement(Record):
    """A generation, or the times of steps, which have none of these values.

    A PSNR of None is that of a generation which is the same as dense.
    """

    psnr_db: Number | None = None
    ssim: Number | None = None
    lpips: Number | None = None
    seconds: Number = 0.0
    form: str = ""


class Target(Record):
    """What a search is to reach; one of them."""

    min_psnr_db: Number | None = None
    min_ssim: Number | None = None
    max_lpips: Number | None = None
    max_seconds: Number | None = None
    min_speedup: Number | None = None


class Chosen(Record):
    """Where a search ended: a config and what each step does."""

    name: str = Field(alias="config")
    form: str
    density: Number = within("density", ..., was="keep_fraction")
    actions: list[Action]

    @property
    def cells(self) -> dict[tuple[int, int], Cell]:
        """Of all layers as one."""
        shares = {"skip": 0.0, "sparse": self.density}
        cells = (Cell(action, shares.get(action, 1.0)) for action in self.actions)
        return {(0, step): cell for step, cell in enumerate(cells)}


class Search(Record):
    """A search for one target; nothing is chosen where it was interrupted or there is nothing."""

    target: Target
    held_out: Sequence[str] = ()
    chosen: Chosen | None = None

    @property
    def text(self) -> str:
        """The target in words."""
        return target_text(self.target.model_dump())


class About(Settings):
    """What all measurements have in common."""

    model: str = "a model"
    transformer_class: str = ""
    device: str = ""
    dtype: str = ""
    chipsparse: str = ""
    torch: str = ""
    diffusers: str = ""
    delta_rule: str = Field(default="", alias="attention.delta_rule")


@dataclass(frozen=True)
class Pair:
    """A sparse generation of a prompt against the dense one.

    Attributes:
        prompt: with its seed.
    """

    prompt: str
    sparse: Measurement
    dense_seconds: float | None


@dataclass(frozen=True)
class TriedConfig:
    """A config with its pairs, one for each prompt that it was tried on."""

    name: str
    pairs: Sequence[Pair]

    def on(self, prompts: Sequence[str]) -> TriedConfig:
        """The same with the pairs of these prompts only; with all where it has none of them."""
        found = [pair for pair in self.pairs if pair.prompt in prompts]
        return TriedConfig(self.name, found or self.pairs)

    @property
    def seconds(self) -> float:
        """Median time of a generation."""
        return statistics.median(pair.sparse.seconds for pair in self.pairs)

    @property
    def form(self) -> str:
        """The schedule in words."""
        return self.pairs[0].sparse.form

    @property
    def psnrs(self) -> list[float]:
        """Of the pairs that differ from dense."""
        values = (pair.sparse.psnr_db for pair in self.pairs)
        return [value for value in values if value is not None]

    @property
    def dense_seconds(self) -> float | None:
        """Median time of a dense generation of the same prompts."""
        known = [each.dense_seconds for each in self.pairs if each.dense_seconds is not None]
        return statistics.median(known) if known else None

    @property
    def speedup(self) -> float | None:
        """Dense over sparse time."""
        dense = self.dense_seconds
        return None if dense is None or not self.seconds else dense / self.seconds


class Tuning(FileRecord):
    """A results file; the last search is the newest."""

    kind = "tuning"
    marks = frozenset({"format", "about", "measured"})

    about: About
    measured: dict[str, Measurement]
    searches: Mapping[str, Search] = {}

    @cached_property
    def tried(self) -> list[TriedConfig]:
        """The configs, in the order in which they were tried."""
        pairs: dict[str, list[Pair]] = {}
        for name, measured in self.measured.items():
            found = pair_of(name)
            if found is not None:
                config, prompt = found
                dense = self.measured.get(dense_name(prompt))
                seconds = None if dense is None else dense.seconds
                pairs.setdefault(config, []).append(Pair(prompt, measured, seconds))
        return [TriedConfig(name, found) for name, found in pairs.items()]

    @cached_property
    def in_order(self) -> list[TriedConfig]:
        """The chosen ones first, then from the fastest to the slowest."""
        return sorted(self.tried, key=lambda each: (each.name not in self.chosen, each.seconds))

    @property
    def has_lpips(self) -> bool:
        """Whether it was measured."""
        return any(pair.sparse.lpips is not None for each in self.tried for pair in each.pairs)

    @property
    def chosen(self) -> set[str]:
        """Names of configs that a search ended at."""
        return {each.chosen.name for each in self.searches.values() if each.chosen is not None}

    @property
    def held_out(self) -> set[str]:
        """Prompts that verified."""
        return {prompt for each in self.searches.values() for prompt in each.held_out}

    @property
    def best(self) -> tuple[Search, TriedConfig] | None:
        """The newest search, with what it chose on its held-out prompts."""
        newest = [*self.searches.values()][-1] if self.searches else None
        if newest is None or newest.chosen is None:
            return None
        found = next((each for each in self.tried if each.name == newest.chosen.name), None)
        return None if found is None else (newest, found.on(newest.held_out))

    @property
    def targets(self) -> str:
        """Of all searches."""
        return "; ".join(dict.fromkeys(each.text for each in self.searches.values()))

    @property
    def dense_seconds(self) -> float | None:
        """Median of the dense generations; None without one."""
        dense = [m.seconds for name, m in self.measured.items() if name.startswith(dense_name(""))]
        return statistics.median(dense) if dense else None

    @property
    def title(self) -> str:
        """The headline."""
        return f"Tuning of {self.about.model}"

    def points(self, name: str) -> list[QualityPoint]:
        """For the chart that joins several files: every config at its worst prompt."""
        return [
            QualityPoint(f"{name}, {each.name}", each.speedup, min(each.psnrs))
            for each in self.tried
            if each.speedup is not None and each.psnrs
        ]
