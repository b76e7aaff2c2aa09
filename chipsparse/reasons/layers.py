"""Layers that run dense, or fuller than their step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from chipsparse.config import LayerPart, Part
from chipsparse.reasons.reason import Level, Reason, fallback, nothing_sparse


def part_name(part: Part) -> str:
    """Return the name of a part of a layer in messages."""
    return "MLP" if part == "mlp" else part


def dense_layers(
    code: str,
    level: Level,
    causes: Mapping[LayerPart, str],
    layers: int,
) -> list[Reason]:
    """Return one reason for each part and cause.

    Args:
        code: the code of all of them.
        level: their level.
        causes: why each layer's part is dense.
        layers: the number of layers of the model.
    """
    alike: dict[tuple[Part, str], list[int]] = {}
    for (layer, part), cause in sorted(causes.items()):
        alike.setdefault((part, cause), []).append(layer)
    return [
        Reason(
            code,
            level,
            f"{part_name(part)} runs dense in {len(dense)} of {layers} layers (first: layer "
            f"{dense[0]}): {cause}",
            part=part,
            layers=tuple(dense),
        )
        for (part, cause), dense in alike.items()
    ]


def in_branch(reason: Reason, branch: str) -> Reason:
    """Return a reason that holds in one guidance branch alone."""
    return replace(reason, sentence=f"in branch {branch}, {reason.sentence}")


def attention_dense(cause: str) -> Reason:
    """Return the reason for attention that runs dense in all layers of a call."""
    return fallback("layers.attention_dense", f"attention runs dense: {cause}")


def raised(part: Part, layer: int, step: int) -> Reason:
    """Return the reason for a layer that runs in full at a sparse step.

    Args:
        part: the part of the layer.
        layer: the first such layer.
        step: the first such step, from 0.
    """
    sentence = (
        f"{part_name(part)} runs in full at sparse steps where a layer had recorded nothing since "
        f"the last refresh (first: layer {layer}, step {step})"
    )
    return Reason("layers.raised", Level.FALLBACK, sentence, part=part, layers=(layer,))


def unseen(part: Part, layer: int, step: int) -> Reason:
    """Return the reason for a layer of a sparse step that the model computed by itself."""
    sentence = (
        f"{part_name(part)} of layer {layer} was computed by the model itself at step {step}, "
        "which is sparse, for a reason that is not known"
    )
    return Reason("layers.unseen", Level.FALLBACK, sentence, part=part, layers=(layer,))


def called_outside() -> tuple[Reason, Reason]:
    """Return the reasons for layers that compute while their transformer is not called."""
    return everything_dense(
        "layers.called_outside",
        "its layers are called outside of a call of the transformer",
        "call the transformer itself",
    )


def everything_dense(code: str, cause: str, remedy: str) -> tuple[Reason, Reason]:
    """Return a fallback for calls that run dense, and what to say if nothing else was sparse."""
    return (
        fallback(code, f"everything runs dense: {cause}"),
        nothing_sparse(code, cause, remedy),
    )
