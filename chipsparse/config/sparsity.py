"""The config of a user: frozen, typed, validated; from keyword arguments, a mapping or YAML.

Every field carries its help text and its bounds, so the YAML profiles, the error messages and the
documentation all say the same thing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from chipsparse.common.byte_sizes import parse_bytes
from chipsparse.common.validation import Validated, build, option, shown
from chipsparse.config.actions import PARTS
from chipsparse.config.former_words import check_former_fields
from chipsparse.config.schedule_forms import FORMS, ScheduleConfig, share

Precision = Literal["model", "fp8"]
CachePrecision = Literal["auto", "model", "fp8"]
CaptureMode = Literal["auto", "always", "never"]
Dense = Literal["dense"]


@dataclass(frozen=True, repr=False)
class AttentionConfig(Validated):
    """The columns of self-attention that sparse steps compute, and how the rest is reused."""

    density: float | Dense = share(
        0.1,
        "share of key columns that each query block keeps, static columns included; or dense: "
        "never sparse",
    )
    delta_rule: Literal["difference", "block_means"] = option(
        "block_means",
        "difference: the change of the kept columns is added to what was cached; block_means: and "
        "that of the mean of every 128 columns",
        former={"means": "block_means"},
    )
    precision: Precision = option(
        "model",
        "of the products of full attention, at dense steps and refreshes: fp8 is 8 bits, int8 for "
        "queries and keys, e4m3 for values and weights, in layers that are never sparse too; "
        "model: as the model, which sparse steps always are",
        former={"auto": "model", "bf16": "model"},
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
class LayerBudget(Validated):
    """The shares of some layers, where they differ from those of the others.

    Layers are numbered from 0 in the order in which the model runs them, over all its kinds of
    blocks.
    """

    FORMER_NAMES: ClassVar[Mapping[str, str]] = {"layers": "index"}

    index: str = option(
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
        if isinstance(self.index, int) and not isinstance(self.index, bool):
            object.__setattr__(self, "index", str(self.index))  # as YAML gives one layer
        super().__post_init__()
        self.ranges()

    def ranges(self) -> tuple[range, ...]:
        """Return the layers that are meant; raise `ValueError` where the text names none."""
        ranges = []
        for text in self.index.split(","):
            match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
            first, last = (int(n) for n in match.groups(default=match[1])) if match else (1, 0)
            if last < first:
                raise ValueError(
                    "index: expected a layer such as 12, a range such as 10-19, or several such "
                    f"as 0-1,56; got {self.index!r}",
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
        "of residuals and activations. model: as the model; fp8: e4m3 with a scale for each row, "
        "half of the bytes; auto: fp8 where that keeps all caches on the GPU, or more layers "
        "sparse, and else model",
        former={"full": "model"},
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

    @classmethod
    def dense(cls) -> SparsityConfig:
        """Return a config under which every step is computed exactly as without chipsparse."""
        return cls(attention=AttentionConfig(density="dense"), mlp=MLPConfig(density="dense"))

    def override(self, values: Mapping[str, Any]) -> SparsityConfig:
        """Return a copy with some fields changed, named by dotted paths.

        Example: ``config.override({"attention.density": 0.2, "tile": None})``.

        A path into another form than the schedule's replaces its form; fields of the new one that
        are not named have their defaults.

        Raises:
            ValueError: as making a config, and where the paths are no texts.
        """
        example = '{"attention.density": 0.2}'
        if not isinstance(values, Mapping):
            raise ValueError(f"override: expected a mapping such as {example}, got {shown(values)}")
        paths: dict[tuple[str, ...], Any] = {}
        for path, value in values.items():
            if not isinstance(path, str):
                raise ValueError(
                    f"override: expected paths of fields such as {example}, got {shown(path)}",
                )
            paths[tuple(path.split("."))] = value
        data = self.words()
        for names in paths:
            _drop_other_forms(data, names)
        for names, value in paths.items():
            _set(data, names, value)
        return build(SparsityConfig, data)


def _drop_other_forms(data: dict[str, Any], path: Sequence[str]) -> None:
    """Remove the forms that a path into another one replaces."""
    inner: Any = data
    for group in path:
        if not isinstance(inner, dict):
            return
        if group in FORMS and group not in inner:
            for other in FORMS:
                inner.pop(other, None)
        inner = inner.get(group)


def _set(data: dict[str, Any], path: Sequence[str], value: object) -> None:
    """Put a value where a path leads; raise `ValueError` where there is no such group."""
    inner = data
    above = ""
    for group in path[:-1]:
        if group in FORMS or above == "branches":
            inner.setdefault(group, {})
        if not isinstance(inner.get(group), dict):
            if above == "schedule":
                check_former_fields({group: {path[-1]: value}})
            raise ValueError(f"{'.'.join(path)}: unknown field; allowed: {', '.join(inner)}")
        inner = inner[group]
        above = group
    inner[path[-1]] = value
