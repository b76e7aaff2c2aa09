"""Ways to generate that stand beside ours: diffusers' caches, and another attention kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chipsparse.common.errors import UserError
from chipsparse.experiments.clips import ClipMaker
from chipsparse.experiments.diffusers_caches import (
    Cache,
    CacheRun,
    cached,
    calibrated_ratios,
    mag,
    sea,
)
from chipsparse.experiments.engine import Applied, Sample, Way
from chipsparse.experiments.other_attention import other_attention
from chipsparse.experiments.store import Store
from chipsparse.pipelines.diffusers_hooks import transformers_of

if TYPE_CHECKING:
    from chipsparse.pipelines.call import Pipeline

FLOOR = "floor"
MAG = "MagCache"
SEA = "SeaCache"
CALIBRATION = "MagCache, calibration"
CALIBRATION_SEED = 2**32  # of noise that no clip has
# On the bundled models the slow settings skip about half of the steps, the fast ones two thirds.
CACHES = {
    f"{MAG} slow": (mag(0.06, 3), 0.7),
    f"{MAG} fast": (mag(0.2, 4), 0.5),
    f"{SEA} slow": (sea(0.25, 2), 0.7),
    f"{SEA} fast": (sea(0.5, 3), 0.5),
}
OTHER_LIBRARY = (
    "the model's attention does not go through PyTorch's scaled_dot_product_attention, so no other "
    "kernel could stand in"
)


def floor() -> Way:
    """The stock model with another attention kernel: the floor under every comparison."""

    @contextmanager
    def apply(pipe: Pipeline) -> Iterator[Applied]:
        with other_attention(transformers_of(pipe)) as which:

            def notes() -> list[str]:
                text = which()
                if text is None:
                    raise UserError(OTHER_LIBRARY)
                return [text]

            yield Applied(notes=notes)

    return Way(FLOOR, apply, method=FLOOR)


def suite_rivals(maker: ClipMaker, store: Store, sample: Sample) -> list[Way]:
    """The floor, MagCache, which is calibrated with the sample's prompt, and SeaCache."""
    ratios = MagRatios(maker, store, sample)

    def cache_way(name: str, cache: Cache, cost: float) -> Way:
        @contextmanager
        def apply(pipe: Pipeline) -> Iterator[Applied]:
            run = CacheRun(pipe, maker.steps, ratios() if cache.method == MAG else ())
            with cached(run, cache) as warnings:
                yield Applied(notes=lambda: warnings)

        key = f"{name}, {cache.setting}"
        return Way(name, apply, key=key, cost=cost, method=cache.method, setting=cache.setting)

    return [floor(), *(cache_way(name, *item) for name, item in CACHES.items())]


@dataclass
class MagRatios:
    """MagCache's ratios of a model, measured with one dense generation and kept in the store."""

    maker: ClipMaker
    store: Store
    sample: Sample

    def __call__(self) -> tuple[float, ...]:
        """The ratios; raises `UserError` with the reason where they cannot be measured."""
        kept = self.store.keep(CALIBRATION, self._measure)
        if "refused" in kept:
            raise UserError(kept["refused"])
        return tuple(kept["ratios"])

    def _measure(self) -> dict[str, Any]:
        def make() -> None:
            self.maker.make(
                self.sample.prompt,
                seed=CALIBRATION_SEED,
                title=CALIBRATION,
                work=CALIBRATION,
            )

        try:
            return {"ratios": calibrated_ratios(self.maker.pipe, self.maker.steps, make)}
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {error}"}
