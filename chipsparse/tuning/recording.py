"""What a calibration generation leaves behind: its measurements, and its outputs to replay."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from chipsparse.layout import LayerKind, ModelLayout

# Which output: transformer, denoising step, guidance branch.
Place = tuple[str, int, str]


@dataclass
class Trajectory:
    """The transformer's outputs of a generation, in host memory.

    Attributes:
        outputs: of every call.
        disturbances: at some steps, what the errors of all layers together add to them.
    """

    outputs: dict[Place, torch.Tensor] = field(default_factory=dict)
    disturbances: dict[Place, torch.Tensor] = field(default_factory=dict)


@dataclass
class Recording:
    """Measurements of one calibration generation, as JSON values.

    Attributes:
        layout: sizes of the call, from `layout_to_json`.
        masses: per layer, branch and anchor: ``mass[budget][head group]``.
        errors: per part, layer, branch, anchor and age: ``error[budget]``, and of attention
            ``head_error[budget][head group]``.
        disturbed: per step and branch, for some layers of a part or for all parts together:
            ``passed``, the root of the summed squares of the errors that were passed on, and
            ``change`` of the transformer's output.
        skipped: per step, branch and age: change of the transformer's output over so many steps.
        times: of one layer of each kind and part; see `layer_times`.
        branches: how many guidance branches a step has.
        trajectory: the outputs; not kept in any file.
    """

    layout: dict[str, Any] = field(default_factory=dict)
    masses: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    disturbed: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    times: list[dict[str, Any]] = field(default_factory=list)
    branches: int = 1
    trajectory: Trajectory = field(default_factory=Trajectory)

    def to_json(self) -> dict[str, Any]:
        """All but the trajectory."""
        names = [item.name for item in dataclasses.fields(self) if item.name != "trajectory"]
        return {name: getattr(self, name) for name in names}


def layout_to_json(layout: ModelLayout) -> dict[str, Any]:
    """A layout as JSON values."""
    return dataclasses.asdict(layout)


def layout_from_json(data: Mapping[str, Any]) -> ModelLayout:
    """The layout that `layout_to_json` wrote."""
    kinds = tuple(LayerKind(**kind) for kind in data["kinds"])
    grids = tuple(tuple(grid) for grid in data["grids"])
    return ModelLayout(**{**data, "kinds": kinds, "grids": grids})


def rounded(values: torch.Tensor) -> Any:
    """A tensor as nested lists of numbers with four digits that count."""

    def shorten(value: Any) -> Any:
        return [shorten(v) for v in value] if isinstance(value, list) else float(f"{value:.4g}")

    return shorten(values.tolist())
