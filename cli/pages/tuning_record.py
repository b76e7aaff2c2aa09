"""The results file of a tuning, read back: what was tried and chosen."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from chipsparse.cli.pages.generation_record import ACTIONS
from chipsparse.cli.pages.json_values import Values
from chipsparse.cli.tune_names import dense_name, pair_of
from chipsparse.profiles.tuned_range import TARGETS, target_text


@dataclass(frozen=True)
class Pair:
    """A sparse generation of a prompt against the dense one.

    Attributes:
        prompt: with its seed.
        psnr_db: None where both are the same.
        ssim: None where the pictures are too small for it.
        lpips: None where it was not measured.
        seconds: of the sparse generation.
        dense_seconds: of the dense one; None where it is not known.
        actions: of every step.
        form: what the schedule is, in words.
    """

    prompt: str
    psnr_db: float | None
    ssim: float | None
    lpips: float | None
    seconds: float
    dense_seconds: float | None
    actions: Sequence[str]
    form: str


@dataclass(frozen=True)
class TriedConfig:
    """A config with its pairs, one for each prompt that it was tried on.

    Attributes:
        name: short name of what is computed.
        pairs: at least one.
    """

    name: str
    pairs: Sequence[Pair]

    def on(self, prompts: Sequence[str]) -> TriedConfig:
        """The same with the pairs of these prompts only; with all where it has none of them."""
        found = [pair for pair in self.pairs if pair.prompt in prompts]
        return TriedConfig(self.name, found or self.pairs)

    @property
    def seconds(self) -> float:
        """Median time of a generation."""
        return statistics.median(pair.seconds for pair in self.pairs)

    @property
    def form(self) -> str:
        """The schedule in words."""
        return self.pairs[0].form

    @property
    def psnrs(self) -> list[float]:
        """Of the pairs that differ from dense."""
        return [pair.psnr_db for pair in self.pairs if pair.psnr_db is not None]

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


@dataclass(frozen=True)
class Chosen:
    """Where a search ended.

    Attributes:
        name: of the config.
        form: in words.
        keep_fraction: of the columns, at sparse steps.
        actions: of every step.
    """

    name: str
    form: str
    keep_fraction: float
    actions: Sequence[str]


@dataclass(frozen=True)
class Search:
    """A search for one target.

    Attributes:
        target: in words.
        min_psnr_db: the target's, if any.
        max_seconds: likewise.
        min_speedup: likewise.
        held_out: the prompts that verify, with their seeds.
        chosen: None where the search was interrupted, or its target cannot be met.
    """

    target: str
    min_psnr_db: float | None
    max_seconds: float | None
    min_speedup: float | None
    held_out: Sequence[str]
    chosen: Chosen | None


@dataclass(frozen=True)
class TuningRecord:
    """A results file.

    Attributes:
        about: what all measurements have in common.
        measurements: how many there are.
        tried: configs, in the order in which they were tried.
        searches: the last one is the newest.
        dense_seconds: median of the dense generations; None without one.
    """

    about: Values
    measurements: int
    tried: Sequence[TriedConfig]
    searches: Sequence[Search]
    dense_seconds: float | None


def read_tuning(values: Values) -> TuningRecord:
    """Raises `UserError` where the file is damaged."""
    measured = values.object("measured")
    pairs: dict[str, list[Pair]] = {}
    dense: dict[str, float] = {}
    for name in measured.content:
        found = pair_of(name)
        if found is not None:
            config, prompt = found
            pairs.setdefault(config, []).append(_pair(measured, name, prompt))
        elif name.startswith(dense_name("")):
            dense[name] = measured.object(name).number("seconds")
    return TuningRecord(
        about=values.object("about"),
        measurements=len(measured.content),
        tried=[TriedConfig(name, found) for name, found in pairs.items()],
        searches=[_search(each) for _, each in values.object("searches").members()],
        dense_seconds=statistics.median(dense.values()) if dense else None,
    )


def _pair(measured: Values, name: str, prompt: str) -> Pair:
    entry, dense = measured.object(name), measured.object(dense_name(prompt))
    return Pair(
        prompt=prompt,
        psnr_db=entry.number_or_none("psnr_db"),
        ssim=entry.number_or_none("ssim"),
        lpips=entry.number_or_none("lpips"),
        seconds=entry.number("seconds"),
        dense_seconds=dense.number_or_none("seconds"),
        actions=entry.texts("actions"),
        form=entry.text("form"),
    )


def _search(entry: Values) -> Search:
    target = entry.object("target")
    given = {name: target.number_or_none(name) for name in TARGETS}
    return Search(
        target=target_text(given),
        min_psnr_db=given["min_psnr_db"],
        max_seconds=given["max_seconds"],
        min_speedup=given["min_speedup"],
        held_out=entry.texts("held_out"),
        chosen=_chosen(entry.object("chosen")) if "chosen" in entry else None,
    )


def _chosen(entry: Values) -> Chosen:
    return Chosen(
        name=entry.text("config"),
        form=entry.text("form"),
        keep_fraction=entry.number("keep_fraction"),
        actions=entry.choices("actions", ACTIONS),
    )
