"""What a suite compares with the stock model: the floor, caches of diffusers, our qualities."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from chipsparse.cli.errors import UserError
from chipsparse.cli.generation_options import GenerationOptions
from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.planning.request import choose_profile, required_profile
from chipsparse.cli.views.names import name_of
from chipsparse.config import SparsityConfig
from chipsparse.pipelines.diffusers_caches import Cache, mag, sea
from chipsparse.profiles.tuned_range import digest

DENSE, FLOOR, OURS, MAG = "dense", "floor", "chipsparse", "MagCache"
QUALITIES = {"faithful": 0.6, "balanced": 0.5, "fast": 0.4}  # about, of a dense clip
# About half of the steps skipped, and two thirds, on the bundled models.
SLOW, FAST = "slow", "fast"
CACHES = {
    (MAG, SLOW): mag(0.06, 3),
    (MAG, FAST): mag(0.2, 4),
    ("SeaCache", SLOW): sea(0.25, 2),
    ("SeaCache", FAST): sea(0.5, 3),
}


@dataclass(frozen=True)
class Row:
    """One way to generate.

    Attributes:
        method: what stands for one curve.
        name: of the row, without a comma.
        cost: what a clip takes, in dense ones, until it is known better.
        cache: of diffusers, or
        config: of ours.
        refused: why it cannot run on this model, where that is known beforehand.
    """

    method: str
    name: str
    setting: str = ""
    cost: float = 1.0
    cache: Cache | None = None
    config: SparsityConfig | None = None
    refused: str | None = None

    @property
    def key(self) -> str:
        """The name, with all that decides what is computed."""
        if self.config is None:
            return f"{self.name}, {self.setting}" if self.cache else self.name
        content = dataclasses.asdict(self.config)
        del content["memory"]  # which decides only where caches live
        return f"{self.name}, {digest(content)}"


def suite_rows(options: GenerationOptions, model: ModelDescription) -> list[Row]:
    """All of them, the stock model first."""
    caches = [
        Row(method, f"{method} {speed}", cache.setting, 0.7 if speed == SLOW else 0.5, cache)
        for (method, speed), cache in CACHES.items()
    ]
    return [Row(DENSE, DENSE), Row(FLOOR, FLOOR), *caches, *_ours(options, model)]


def _ours(options: GenerationOptions, model: ModelDescription) -> Iterator[Row]:
    """The named qualities; a profile without any, as of a tuning, is the only row."""
    profile = choose_profile(options, model, optional=True)
    if profile is not None and not profile.qualities:
        yield Row(OURS, f"{OURS} profile", name_of(profile.source), 0.5, config=profile.sparsity)
        return
    for quality, cost in QUALITIES.items():
        name, asked = f"{OURS} {quality}", dataclasses.replace(options, quality=quality)
        try:
            config = required_profile(asked, model).sparsity
        except UserError as error:
            yield Row(OURS, name, refused=str(error))
        else:
            yield Row(OURS, name, f"--quality {quality}", cost, config=config)
