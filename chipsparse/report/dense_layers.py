"""The names of dense parts of layers in messages."""

from __future__ import annotations

from collections.abc import Mapping

from chipsparse.config import Part


def part_name(part: Part) -> str:
    """Return the name of a part of a layer."""
    return "MLP" if part == "mlp" else part


def dense_notes(reasons: Mapping[tuple[int, Part], str], layers: int) -> list[str]:
    """Return one sentence for each part and reason.

    Args:
        reasons: by layer and part, why it runs dense.
        layers: how many the model has.
    """
    alike: dict[tuple[Part, str], list[int]] = {}
    for (layer, part), reason in sorted(reasons.items()):
        alike.setdefault((part, reason), []).append(layer)
    return [
        f"{part_name(part)} runs dense in {len(dense)} of {layers} layers (first: layer "
        f"{dense[0]}): {reason}"
        for (part, reason), dense in alike.items()
    ]
