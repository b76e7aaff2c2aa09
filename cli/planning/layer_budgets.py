"""Which layers keep the same, where a profile gives some of them budgets of their own."""

from __future__ import annotations

from dataclasses import dataclass, field

from chipsparse.cache.kinds import PARTS, Part
from chipsparse.cli.results import NO_JSON
from chipsparse.config import ranges_text
from chipsparse.cost_model.layer_times import kept_columns
from chipsparse.plan import SparsityPlan


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one kind that keep the same.

    Attributes:
        kind: what the model calls them.
        layers: their numbers.
        columns: that each block of rows computes at a sparse step; None where that is dense.
        neurons: likewise.
    """

    kind: str = field(metadata=NO_JSON)
    layers: tuple[int, ...]
    columns: int | None
    neurons: int | None

    @property
    def ranges(self) -> str:
        """The numbers as in a profile: ``0-1,56``."""
        return ranges_text(self.layers)


def layer_groups(plan: SparsityPlan) -> list[LayerGroup]:
    """All layers, by what the profile says that they keep."""
    groups: dict[tuple[str, int | None, int | None], list[int]] = {}
    for layer in range(plan.layout.layers):
        columns, neurons = (kept(plan, layer, part) for part in PARTS)
        groups.setdefault((plan.layout.kind(layer).name, columns, neurons), []).append(layer)
    return [
        LayerGroup(kind, tuple(layers), columns, neurons)
        for (kind, columns, neurons), layers in groups.items()
    ]


def kept(plan: SparsityPlan, layer: int, part: Part) -> int | None:
    """Columns or neurons that a layer computes at a sparse step; None where it is dense."""
    if plan.is_dense() or not plan.is_sparse(layer, part):
        return None
    return kept_columns(plan, layer) if part == "attention" else plan.mlp_keep_count(layer)
