"""The config of a user: frozen, typed, validated; from keyword arguments, a mapping or YAML.

Every field carries its help text and its bounds, so the YAML profiles, the error messages and the
documentation all say the same thing.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from chipsparse.common.byte_sizes import parse_bytes
from chipsparse.common.validation import Validated, build, option, shown

Part = Literal["attention", "mlp"]
PARTS: tuple[Part, ...] = ("attention", "mlp")
Precision = Literal["auto", "bf16", "fp8"]
ActionName = Literal["dense", "refresh", "sparse", "skip"]
CachePrecision = Literal["auto", "full", "fp8"]
CaptureMode = Literal["auto", "always", "never"]
Dense = Literal["dense"]
LayerPart = tuple[int, Part]

share = partial(option, minimum=0.0, maximum=1.0)


class ConfigError(ValueError):
    """A config asks for something that this model or machine cannot do."""


class FallbackError(ConfigError):
    """Something would run dense, or denser than the config asks, and the run is strict."""


class DenseWarning(UserWarning):
    """A generation computes nothing sparse although its config asks for it."""


class QualityWarning(UserWarning):
    """A generation is further from the dense one than its config is elsewhere, for its sampler."""


@dataclass(frozen=True, repr=False)
class AttentionConfig(Validated):
    """The columns of self-attention that sparse steps compute, and how the rest is reused."""

    density: float | Dense = share(
        0.1,
        "share of key columns that each query block keeps, static columns included; or dense: "
        "never sparse",
    )
    delta_rule: Literal["difference", "means"] = option(
        "means",
        "difference: the change of the kept columns is added to what was cached; means: and that "
        "of the mean of every 128 columns",
    )
    precision: Precision = option(
        "auto",
        "of the products of full attention, at dense steps and refreshes: fp8 is 8 bits, int8 for "
        "queries and keys, e4m3 for values and weights, in layers that are never sparse too; auto "
        "and bf16: the model's own, as sparse steps always have",
    )

    @property
    def is_sparse(self) -> bool:
        """True where self-attention may be sparse."""
        return self.density != "dense"

    @property
    def in_fp8(self) -> bool:
        """True where full attention is computed in 8 bits."""
        return self.precision == "fp8"


@dataclass(frozen=True, repr=False)
class MLPConfig(Validated):
    """The neurons of the feed-forward layers that sparse steps recompute."""

    density: float | Dense = share(
        "dense",
        "dense: never sparse; or the share of neurons that each token block recomputes, such as "
        "0.3. Where that was measured, sparse MLPs lost 3 to 5 dB at equal time",
    )

    @property
    def is_sparse(self) -> bool:
        """True where feed-forward layers may be sparse."""
        return self.density != "dense"


@dataclass(frozen=True, repr=False)
class SkippingConfig(Validated):
    """The full steps of a generation in which sparse steps cost too much; all others are skipped.

    See ``schedule.sparse_at_most``.
    """

    full_share: float = share(0.4, "compute this share of the steps in full, above 0")
    least_full: int = option(2, "but at least so many of them", minimum=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.full_share == 0:
            raise ValueError("full_share: expected a number above 0 and at most 1, got 0")


# Fields of the published form of a schedule, which a list of full steps takes the place of.
PUBLISHED_FORM = ("warmup_steps", "refresh_every")
# Fields that say which steps are computed, and those that choose among two such lists by cost.
COMPUTED_STEPS = ("full_steps", "full_share", "least_full", "sparse_steps", "actions")
BY_COST = ("sparse_at_most", "skipping")
# A schedule has at most one of the first pair, and both or none of the second.
EXCLUSIVE = ("full_steps", "full_share")


@dataclass(frozen=True, repr=False)
class ScheduleConfig(Validated):
    """The denoising steps that are computed in full, refreshed, sparse or skipped.

    A schedule has one of two forms. One lists the full steps (``full_steps``, ``full_share``) and
    the sparse ones (``sparse_steps``); what is left is skipped. The other one, as
    published, has full steps at the start and at its refreshes, and all others are sparse. The
    first step is always dense.
    """

    full_steps: tuple[int, ...] | None = option(
        None,
        "compute exactly these steps (from 0, in order) in full, and the first one; those behind "
        "which sparse steps come are refreshes",
        minimum=0,
    )
    full_share: float | None = share(
        None,
        "or compute this share of the steps that run in full; above 0: close at the start, "
        "further apart in the middle, somewhat closer at the end",
    )
    least_full: int = option(
        2,
        "but at least so many of them: with no more steps than this, all are computed in full. "
        "Of 3 to 8, a share of sparse_steps takes the first, second and fourth, never the last",
        minimum=2,
    )
    sparse_steps: float | tuple[int, ...] = option(
        0.0,
        "a share, at most 1: so many steps are sparse, each in the middle of the largest gap, with "
        "1 all but the full ones; or, with full_steps, these steps in order. The rest is skipped",
        minimum=0,
    )
    sparse_at_most: float | None = share(
        None,
        "take sparse steps only where one is expected to take at most this share of a dense "
        "step's time, by the sizes of the video or image and the rates of an H200; elsewhere "
        "skipping says what is computed. null: everywhere",
    )
    skipping: SkippingConfig | None = option(
        None,
        "the full steps where sparse ones cost more than sparse_at_most",
    )
    forecast: float = share(
        0.0,
        "a skipped step continues the line through the last two outputs that were computed, by "
        "this share of what has changed between them; 0: it gives the last one again",
    )
    forecast_after: float = share(
        0.0,
        "share of the steps before which a skipped step gives the last output again all the same",
    )
    correct: bool = option(
        True,
        "once the next full step is known, add to the latents what the skipped steps before it "
        "would have changed with predictions on the line between both full ones; takes no call of "
        "the model; schedulers of flow matching only",
    )
    warmup_steps: int = option(
        2,
        "first steps computed in full; the last of them is the first refresh. A third as many at "
        "the end, rounded down, are dense: they remove what the sparse steps left",
        minimum=2,
    )
    refresh_every: int = option(
        10,
        "after the warm-up, every this many steps is a refresh",
        minimum=1,
    )
    actions: tuple[ActionName, ...] | None = option(
        None,
        "the action of every step, the last one repeated; overrides all the above. The first is "
        "dense, and a refresh stands before the first sparse one",
    )
    first_dense_layers: int = option(0, "this many first layers are never sparse", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_full()
        self._check_by_cost()
        actions = self.actions
        if actions is None:
            return
        if actions[:1] != ("dense",):
            got = f"{shown(actions[0])} first" if actions else "an empty list"
            raise ValueError(f"actions: the first step must be dense; got {got}")
        first = actions.index("sparse") if "sparse" in actions else 0
        if first and "refresh" not in actions[:first]:
            raise ValueError(
                f"actions[{first}]: a sparse step reads what a refresh recorded, and there is none "
                "before it",
            )

    @property
    def lists_full(self) -> bool:
        """True for the form that lists the full steps; ``actions`` overrides both forms."""
        return self.actions is None and not (self.full_steps is None and self.full_share is None)

    @property
    def names_sparse(self) -> bool:
        """True where some number of steps has sparse ones, in layers that can be sparse."""
        if self.actions is not None:
            return "sparse" in self.actions
        if self.lists_full:
            return self.full_share != 1 and bool(self.sparse_steps)
        return self.refresh_every > 1

    @property
    def asks_cost(self) -> bool:
        """True where the cost of a sparse step decides; ``actions`` overrides that."""
        return self.sparse_at_most is not None and self.actions is None

    def at_cost(self, sparse_cost: float | None) -> ScheduleConfig:
        """Return the schedule where a sparse step takes this share of a dense one's time.

        None: no layer can be sparse. The result has its own steps, or those of ``skipping``.
        """
        if not self.asks_cost:
            return self
        decided = dataclasses.replace(self, sparse_at_most=None, skipping=None)
        assert self.sparse_at_most is not None
        assert self.skipping is not None
        if sparse_cost is not None and sparse_cost <= self.sparse_at_most:
            return decided
        return dataclasses.replace(
            decided,
            full_share=self.skipping.full_share,
            least_full=self.skipping.least_full,
            sparse_steps=0.0,
        )

    def _check_by_cost(self) -> None:
        """Raises `ValueError` for a bound of cost without what is done beyond it."""
        if (self.sparse_at_most is None) != (self.skipping is None):
            raise ValueError(
                "sparse_at_most and skipping belong together: which steps are sparse up to a cost, "
                "and which are computed beyond it",
            )
        if self.sparse_at_most is not None and self.full_share is None:
            raise ValueError(
                f"sparse_at_most ({self.sparse_at_most:g}) needs full_share: the steps in full "
                "where sparse ones are taken",
            )
        if self.sparse_at_most is not None and self.sparse_steps == 0:
            raise ValueError(
                f"sparse_at_most ({self.sparse_at_most:g}) needs sparse_steps: the steps that are "
                "sparse up to that cost",
            )

    def _check_full(self) -> None:
        """Raises `ValueError` for a list of full steps that cannot be, or one in both forms."""
        sparse = self.sparse_steps if isinstance(self.sparse_steps, tuple) else ()
        if sparse and self.full_steps is None:
            raise ValueError(
                f"sparse_steps ({shown(list(sparse))}) needs full_steps: the list of what is "
                "computed in full",
            )
        if not isinstance(self.sparse_steps, tuple) and self.sparse_steps > 1:
            raise ValueError(
                "sparse_steps: expected a share of at most 1, or a list of steps, got "
                f"{self.sparse_steps:g}",
            )
        if self.full_steps is None and self.full_share is None:
            return
        if self.full_steps is not None and self.full_share is not None:
            raise ValueError(
                f"full_steps ({shown(list(self.full_steps))}) and full_share "
                f"({self.full_share:g}) exclude each other: both say which steps are computed in "
                "full",
            )
        if self.full_share == 0:
            raise ValueError("full_share: expected a number above 0 and at most 1, got 0")
        for field, steps in (("full_steps", self.full_steps or ()), ("sparse_steps", sparse)):
            if any(step >= later for step, later in itertools.pairwise(steps)):
                raise ValueError(
                    f"{field}: expected steps in order, each of them once, "
                    f"got {shown(list(steps))}",
                )
        both = sorted({0, *(self.full_steps or ())} & set(sparse))
        if both:
            raise ValueError(
                f"sparse_steps: {shown(both)} are computed in full, as full_steps or the first "
                "step",
            )
        name = "full_share" if self.full_steps is None else "full_steps"
        for other in PUBLISHED_FORM:
            value = getattr(self, other)
            default = getattr(ScheduleConfig, other)
            if value != default:
                raise ValueError(
                    f"{name} takes the place of {other}, which is {value}: leave one of them out, "
                    f"or set {other} back to {default}",
                )


@dataclass(frozen=True, repr=False)
class LayerBudget(Validated):
    """The shares of some layers, where they differ from those of the others.

    Layers are numbered from 0 in the order in which the model runs them, over all its kinds of
    blocks. Those among the ``schedule.first_dense_layers`` stay dense whatever stands here.
    """

    layers: str = option(
        "",
        "a layer, such as 12, a range with both its ends, such as 10-19, or several: 0-1,56",
    )
    attention: float | Dense | None = share(
        None,
        "share of key columns, in place of attention.density, or dense: never sparse; "
        "null: as the other layers",
    )
    mlp: float | Dense | None = share(None, "likewise the share of neurons")

    def __post_init__(self) -> None:
        if isinstance(self.layers, int) and not isinstance(self.layers, bool):
            object.__setattr__(self, "layers", str(self.layers))  # as YAML gives one layer
        super().__post_init__()
        self.ranges()

    def ranges(self) -> tuple[range, ...]:
        """Return the layers that are meant; raise `ValueError` where the text names none."""
        ranges = []
        for text in self.layers.split(","):
            match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
            first, last = (int(n) for n in match.groups(default=match[1])) if match else (1, 0)
            if last < first:
                raise ValueError(
                    "layers: expected a layer such as 12, a range such as 10-19, or several such "
                    f"as 0-1,56; got {self.layers!r}",
                )
            ranges.append(range(first, last + 1))
        return tuple(ranges)

    @property
    def last(self) -> int:
        """The highest layer that is meant."""
        return max(layers[-1] for layers in self.ranges())


def ranges_text(numbers: Iterable[int]) -> str:
    """Return numbers as ranges, in the form that `LayerBudget` reads: ``0-1,56``."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ",".join("-".join(map(str, ends)) for ends in ranges)


@dataclass(frozen=True, repr=False)
class MemoryConfig(Validated):
    """The memory that the run may take, and where caches live.

    Sizes are whole numbers of bytes or texts such as ``24G`` (see `parse_bytes`).
    """

    vram: int | None = option(
        None,
        "GPU memory that the run may take in all, weights included, such as 24G; "
        "null: what is free when a generation begins",
        minimum=0,
    )
    ram: int | None = option(
        None,
        "host memory for caches, such as 64G; null: most of what the machine or container has free",
        minimum=0,
    )
    offload: Literal["auto", "always", "never"] = option(
        "auto",
        "auto: caches stay on the GPU while they fit, the others in host memory; always: all of "
        "them in host memory; never: none",
    )
    cache_precision: CachePrecision = option(
        "auto",
        "of residuals and activations. full: as the model; fp8: e4m3 with a scale for each row, "
        "half of the bytes; auto: fp8 where that keeps all caches on the GPU, or more layers "
        "sparse, and else full",
    )

    def __post_init__(self) -> None:
        for name in ("vram", "ram"):
            value = getattr(self, name)
            if isinstance(value, str):
                try:
                    object.__setattr__(self, name, parse_bytes(value))
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
        super().__post_init__()


@dataclass(frozen=True, repr=False)
class SparsityConfig(Validated):
    """Everything that decides what is computed. Immutable; compare with ``==``.

    Raises:
        ValueError: on an unknown field, a wrong type or a value out of bounds, with the field's
            path and what is allowed.
    """

    attention: AttentionConfig = option(AttentionConfig(), "self-attention")
    mlp: MLPConfig = option(MLPConfig(), "feed-forward layers")
    schedule: ScheduleConfig = option(ScheduleConfig(), "denoising steps")
    layers: tuple[LayerBudget, ...] = option((), "layers that keep more or less than the others")
    block_size: int = option(
        128,
        "queries that share one list of columns, and tokens that share one list of neurons",
        minimum=1,
    )
    tile: tuple[int, ...] | None = option(
        (4, 4, 8),
        "T, H, W of the 3D tiles whose tokens are made contiguous, which makes query blocks "
        "compact (an image has T = 1); null: raster order",
        minimum=1,
    )
    memory: MemoryConfig = option(MemoryConfig(), "memory of the caches")
    cuda_graphs: CaptureMode = option(
        "auto",
        "auto: sparse steps are captured once and then replayed, where they are expected to wait "
        "for the host, enough are to come for that to pay, and their caches are on the GPU; "
        "always: whatever it saves",
    )
    backend: Literal["auto", "reference"] = option(
        "auto",
        "auto: the fastest kernels that can run; or reference",
    )
    # What is taken where nobody asks for anything else, which is not noted where it has no effect;
    # None: the defaults. `over` sets it, and it counts for nothing in comparisons.
    usual: ClassVar[SparsityConfig | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tile is not None and len(self.tile) != 3:
            raise ValueError(f"tile: expected 3 whole numbers (T, H, W), got {list(self.tile)}")
        for part in PARTS:
            named: list[range] = []
            for place, budget in enumerate(self.layers):
                for layers in budget.ranges() if getattr(budget, part) is not None else ():
                    for other in named:
                        both = range(max(layers[0], other[0]), min(layers[-1], other[-1]) + 1)
                        if both:
                            raise ValueError(
                                f"layers[{place}].{part}: layer {both[0]} has a budget already",
                            )
                    named.append(layers)

    def over(self, usual: SparsityConfig | None) -> SparsityConfig:
        """Return a copy with `usual` set."""
        copy = dataclasses.replace(self)
        object.__setattr__(copy, "usual", usual)
        return copy

    @classmethod
    def dense(cls) -> SparsityConfig:
        """Return a config under which every step is computed exactly as without chipsparse."""
        return cls(attention=AttentionConfig(density="dense"), mlp=MLPConfig(density="dense"))

    def override(self, values: Mapping[str, Any]) -> SparsityConfig:
        """Return a copy with some fields changed, named by dotted paths.

        Example: ``config.override({"attention.density": 0.2, "tile": None})``.

        Fields that say which steps are computed also take the place of what excludes them:
        ``full_steps`` and ``full_share`` of each other, and all of them of ``sparse_at_most`` and
        ``skipping``, unless those are named, too.

        Raises:
            ValueError: as making a config, and where the paths are no texts.
        """
        example = '{"attention.density": 0.2}'
        if not isinstance(values, Mapping):
            raise ValueError(f"override: expected a mapping such as {example}, got {shown(values)}")
        data = dataclasses.asdict(self)
        for path, value in values.items():
            if not isinstance(path, str):
                raise ValueError(
                    f"override: expected paths of fields such as {example}, got {shown(path)}",
                )
            *groups, name = path.split(".")
            inner = data
            for group in groups:
                if not isinstance(inner.get(group), dict):
                    raise ValueError(f"{path}: unknown field; allowed: {', '.join(inner)}")
                inner = inner[group]
            inner[name] = value
        if "schedule" not in values:
            named = {
                path.split(".")[1]: value
                for path, value in values.items()
                if path.startswith("schedule.")
            }
            data["schedule"].update(dict.fromkeys(_replaced_by(named)))
        return build(SparsityConfig, data).over(self.usual)


def _replaced_by(named: Mapping[str, Any]) -> set[str]:
    """Return the fields of a schedule that these new values of other fields replace.

    What is left of a named quality must not hide which steps its user asks for.
    """
    given = {name for name, value in named.items() if value is not None}
    replaced: set[str] = set()
    if not given.isdisjoint(COMPUTED_STEPS) and given.isdisjoint(BY_COST):
        replaced.update(BY_COST)
    if not given.isdisjoint(EXCLUSIVE):
        replaced.update(EXCLUSIVE)
    if any(name in named and name not in given for name in BY_COST):
        replaced.update(BY_COST)
    return replaced - named.keys()
