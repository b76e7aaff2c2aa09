"""Lets one backend compute every operation, as far as it has the operation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from chipsparse.kernels import (
    column_selection,
    column_sparse_attention,
    dense_attention_column_sums,
    mask_packing,
    merge_residual,
    neuron_selection,
    sparse_mlp_down,
    sparse_mlp_up,
)
from chipsparse.plan import Action
from chipsparse.report.generation import GenerationReport

TABLES = (
    (column_selection, "BACKENDS"),
    (column_sparse_attention, "BACKENDS"),
    (dense_attention_column_sums, "BACKENDS"),
    (mask_packing, "INDEX_BACKENDS"),
    (merge_residual, "BACKENDS"),
    (neuron_selection, "BACKENDS"),
    (neuron_selection, "MEAN_BACKENDS"),
    (sparse_mlp_down, "BACKENDS"),
    (sparse_mlp_up, "BACKENDS"),
)
ORDER = ("gluon", "triton", "reference")  # fastest first


def prefer(patch: pytest.MonkeyPatch, backend: str) -> None:
    """Takes the faster backends away, and the reasons not to take this one unasked."""

    def allowed(table: tuple[Any, ...]) -> tuple[Any, ...]:
        kept = [each for each in table if ORDER.index(each.name) >= ORDER.index(backend)]
        return tuple(
            replace(each, why_not_unasked=lambda *_: None) if each.name == backend else each
            for each in kept
        )

    for module, name in TABLES:
        patch.setattr(module, name, allowed(getattr(module, name)))


def sparse_backends(report: GenerationReport, part: str) -> set[str]:
    """What computed the sparse layers of a part, as the report names it."""
    return {
        layer.backend
        for step in report.steps
        for layer in step.layers
        if layer.part == part and layer.action is Action.SPARSE
    }
