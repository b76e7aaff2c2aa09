"""Which layers keep the same, where a profile gives some of them budgets of their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from chipsparse.cache.kinds import PARTS, Part
from chipsparse.config import ranges_text
from chipsparse.measure.cost_model import kept_columns
from chipsparse.plan import SparsityPlan


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one kind that keep the same.

    Attributes:
        kind: what the model calls them.
        layers: their numbers.
        kept: columns and neurons that each block of rows computes at a sparse step; None: dense.
    """

    kind: str
    layers: tuple[int, ...]
    kept: dict[Part, int | None]

    @property
    def ranges(self) -> str:
        """The numbers as in a profile: ``0-1,56``."""
        return ranges_text(self.layers)


def layer_groups(plan: SparsityPlan) -> list[LayerGroup]:
    """All layers, by what the profile says that they keep."""
    groups: dict[tuple[str, int | None, int | None], list[int]] = {}
    for layer in range(plan.layout.layers):
        attention, mlp = (kept(plan, layer, part) for part in PARTS)
        groups.setdefault((plan.layout.kind(layer).name, attention, mlp), []).append(layer)
    return [
        LayerGroup(kind, tuple(layers), {"attention": attention, "mlp": mlp})
        for (kind, attention, mlp), layers in groups.items()
    ]


def kept(plan: SparsityPlan, layer: int, part: Part) -> int | None:
    """Columns or neurons that a layer computes at a sparse step; None where it is dense."""
    if not plan.is_sparse(layer, part):
        return None
    return kept_columns(plan, layer) if part == "attention" else plan.mlp_keep_count(layer)


def range_kept(plan: SparsityPlan, part: Part, layers: Iterable[int]) -> tuple[int, int] | None:
    """The least and the most that these layers compute; None where all of them are dense."""
    counts = [count for layer in layers if (count := kept(plan, layer, part)) is not None]
    return (min(counts), max(counts)) if counts else None
