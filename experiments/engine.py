"""Ways to generate x prompts, paired with dense clips of the same seed, each kept as it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from chipsparse.common.errors import first_line
from chipsparse.config import SparsityConfig
from chipsparse.experiments.clips import ClipMaker, Generation, patched, stock
from chipsparse.experiments.lpips import Lpips, find_lpips
from chipsparse.experiments.quality import compare_clips
from chipsparse.experiments.records import ClipQuality, ClipRecord
from chipsparse.experiments.samples import DENSE, Sample
from chipsparse.experiments.store import Store, write_frames
from chipsparse.parallel.degrees import Parallel
from chipsparse.profiles.profile import Profile
from chipsparse.profiles.tuned_range import digest
from chipsparse.report.generation import GenerationReport

if TYPE_CHECKING:
    from chipsparse.pipelines.call import Pipeline


@dataclass(frozen=True)
class Applied:
    """A pipeline that generates in some way."""

    report: GenerationReport | None = None  # None where the pipeline is not patched
    notes: Callable[[], Sequence[str]] = list  # sentences about the clip, asked after it was made
    # JSON values to keep of the clip, asked likewise.
    facts: Callable[[Generation], Mapping[str, Any]] = lambda _: {}


@dataclass(frozen=True)
class Way:
    """One way to generate."""

    name: str  # for people, and of its warm-up
    # Makes the pipeline generate so while the context lasts.
    apply: Callable[[Any], AbstractContextManager[Applied]]
    key: str = ""  # all that decides what is computed; by default the name
    cost: float = 1.0  # of a clip in dense ones, until it is known better
    step_costs: Sequence[float] = ()  # relative times of its steps; none: all alike
    warm: bool = True  # it is warmed up before its first clip
    method: str = ""  # the family of ways that one curve joins
    setting: str = ""  # of the method


@dataclass(frozen=True)
class Clip:
    """A clip of a way, made now or before."""

    way: Way
    sample: Sample
    record: ClipRecord
    generation: Generation | None = None  # None where it was made before, or refused


@dataclass
class Experiment:
    """Makes the clips of ways that the store does not have, and compares them with dense."""

    maker: ClipMaker  # its pipeline is not patched
    samples: Sequence[Sample]
    store: Store = field(default_factory=Store)
    dense: Way | None = None  # by default the stock model
    lpips: Callable[[int, int], Lpips] = find_lpips  # for frames of a height and a width
    compare: Callable[..., ClipQuality] = compare_clips  # a clip with the dense one
    per_frame: bool = False  # records keep the quality of each frame
    # One sentence about the error of a way that cannot run, which then is a result; None lets the
    # error end the experiment.
    describe: Callable[[Exception], str] | None = None
    # Gets the frames of a clip before its record is kept.
    write: Callable[[Way, Sample, np.ndarray], None] | None = None
    _refused: dict[str, str] = field(default_factory=dict, init=False)
    _frames: tuple[Sample, np.ndarray] | None = field(default=None, init=False)
    _lpips: Lpips | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.dense_way = self.dense or dense_way(self.store.ranks.parallel)
        # Refused ways are tried again: memory that was short, or a version, may be another now.
        self.store.forget(lambda value: isinstance(value, dict) and bool(value.get("refused")))

    def run(self, ways: Sequence[Way], samples: Sequence[Sample] | None = None) -> Iterator[Clip]:
        """Yields the clips prompt by prompt, those of the store too: dense, then the ways.

        A way that was refused once is passed over from then on.
        """
        for sample in self.samples if samples is None else samples:
            # Another way begins each time: a machine that slows down then favours none.
            first = sample.index % max(1, len(ways))
            for way in (self.dense_way, *ways[first:], *ways[:first]):
                if self.refusal(way) is None:
                    yield self._clip(way, sample)

    def clip(self, way: Way, sample: Sample) -> Clip:
        """One clip, with the dense one before it."""
        dense = self._clip(self.dense_way, sample)
        return dense if way is self.dense_way else self._clip(way, sample)

    def record(self, way: Way, sample: Sample) -> ClipRecord | None:
        """The record of a clip; None where it is not made."""
        kept = self.store.measured.get(record_name(way, sample))
        return None if kept is None else ClipRecord.model_validate(kept)

    def refusal(self, way: Way) -> str | None:
        """The reason why a way cannot run here, as far as it is known."""
        return self._refused.get(way.name)

    def plan(self, ways: Sequence[Way], **also: float) -> int:
        """Plans what is left to make, and further work by name; returns the number of clips."""
        left = {
            record_name(way, sample): way.cost
            for way in (self.dense_way, *ways)
            if self.refusal(way) is None
            for sample in self.samples
            if self.record(way, sample) is None
        }
        self.maker.progress.plan({**left, **also})
        return len(left)

    def _clip(self, way: Way, sample: Sample) -> Clip:
        known = self.record(way, sample)
        if known is not None:
            return Clip(way, sample, known)
        made = None
        dense = None
        try:
            made, record = self._make(way, sample)
        except Exception as error:
            if self.describe is None or way is self.dense_way:
                raise
            why = self._refused[way.name] = self.describe(error)
            record = ClipRecord(way=way.name, prompt=sample.prompt, seed=sample.seed, refused=why)
        if made is not None:
            dense = made.frames if way is self.dense_way else self._dense_frames(sample)

        def compared() -> dict[str, Any]:
            quality = {}
            if made is not None:
                assert dense is not None
                quality = self._compare(way, sample, dense, made.frames)
            full = record.model_copy(update=quality)
            return full.model_dump(mode="json", exclude_defaults=True)

        kept = self.store.keep(record_name(way, sample), compared)
        return Clip(way, sample, ClipRecord.model_validate(kept), made)

    def _make(self, way: Way, sample: Sample) -> tuple[Generation, ClipRecord]:
        """A clip, and its record without its quality."""
        pipe = self.maker.pipe
        label = sample.label
        if label is None:
            label = f"prompt {sample.index + 1} of {len(self.samples)}"
        with way.apply(pipe) as applied:
            made = self.maker.make(
                sample.prompt,
                seed=sample.seed,
                title=f"{label}, {way.name}" if label else way.name,
                report=applied.report,
                way=way.name if way.warm else None,
                work=record_name(way, sample),
                step_costs=way.step_costs,
            )
            self.store.ranks.gather_fallbacks(applied.report)
            dense = None if way is self.dense_way else self.record(self.dense_way, sample)
            record = ClipRecord(
                way=way.name,
                prompt=sample.prompt,
                seed=sample.seed,
                seconds=made.denoising_seconds,
                total_seconds=made.total_seconds,
                speedup=1.0 if dense is None else dense.seconds / made.denoising_seconds,
                work=made.work_share,
                actions=[step.action for step in made.steps],
                fallbacks=[] if applied.report is None else list(applied.report.fallbacks),
                notes=[*applied.notes(), *filter(None, [made.nothing_sparse])],
                facts=dict(applied.facts(made)),
            )
        if way is self.dense_way:
            self._frames = sample, made.frames
        return made, record

    def _compare(
        self,
        way: Way,
        sample: Sample,
        dense: np.ndarray,
        made: np.ndarray,
    ) -> dict[str, Any]:
        """The values of a record that say how far a clip is from dense; writes its frames."""
        if way is self.dense_way:
            self._write_dense(sample, dense)
        if self.write is not None:
            self.write(way, sample, made)
        if way is self.dense_way and not self.per_frame:
            return {"identical": True}
        if self._lpips is None:
            self._lpips = self.lpips(*dense.shape[1:3])
        quality = self.compare(dense, made, perceptual=self._lpips.measure)
        values = quality.model_dump(exclude=set() if self.per_frame else {"per_frame"})
        return {**values, "lpips_missing": self._lpips.why_not}

    def _write_dense(self, sample: Sample, frames: np.ndarray) -> None:
        file = self.store.dense_file(sample.name)
        if file is not None:
            write_frames(file, frames)

    def _dense_frames(self, sample: Sample) -> np.ndarray | None:
        """The frames of a dense clip; None where they lie in a file of the first process."""
        if self._frames is not None and self._frames[0] == sample:
            return self._frames[1]
        file = self.store.dense_file(sample.name)
        ranks = self.store.ranks
        if file is not None and ranks.first(file.is_file):
            if ranks.writes:
                self._frames = sample, np.load(file)
                return self._frames[1]
            return None
        # The folder may be deleted at any time.
        frames = self._make(self.dense_way, sample)[0].frames
        if ranks.writes:
            self._write_dense(sample, frames)
        return frames


def record_name(way: Way, sample: Sample) -> str:
    """The name of a clip's record in the store."""
    return f"{way.key or way.name}, {sample.name}"


def dense_way(parallel: Parallel | None = None) -> Way:
    """The stock model, on several processes in full."""

    @contextmanager
    def apply(pipe: Pipeline) -> Iterator[Applied]:
        with stock(pipe, parallel):
            yield Applied()

    return Way(DENSE, apply, method=DENSE)


def sparse_way(
    name: str,
    config: SparsityConfig | Profile,
    *,
    parallel: Parallel | None = None,
    facts: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Way:
    """A config of ours, whose clips keep ``facts``; ``fields``: further ones of `Way`."""
    sparsity = config.sparsity if isinstance(config, Profile) else config

    @contextmanager
    def apply(pipe: Pipeline) -> Iterator[Applied]:
        with patched(pipe, config, parallel=parallel) as report:
            yield Applied(report, facts=lambda _: facts or {})

    return Way(name, apply, key=f"{name}, {run_digest(sparsity)}", **fields)


# Fields that decide where caches live and how kernels are launched, and not what is computed.
NOT_COMPUTED = ("memory", "cuda_graphs")


def run_digest(config: SparsityConfig) -> str:
    """A short name of a config with all its fields: clips with the same one take as long."""
    return digest(config.words())


def config_digest(config: SparsityConfig) -> str:
    """A short name of what a config computes, wherever its caches live.

    Records of quality and of speed are joined by it. Times differ where it is the same: stored
    clips go by `run_digest`.
    """
    content = config.words()
    for name in NOT_COMPUTED:
        del content[name]
    return digest(content)


def step_digest(config: SparsityConfig) -> str:
    """A short name of what a step of each action computes, whichever steps take it.

    Configs with the same one differ in their lists of steps alone, so their steps take as long.
    """
    content = config.words()
    for name in ("schedule", *NOT_COMPUTED):
        del content[name]
    return digest(content)


def plainly(error: Exception) -> str:
    """One sentence about an error, with its class."""
    return f"{type(error).__name__}: {first_line(error)}"
