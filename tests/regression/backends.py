"""Lets one backend compute every operation, as far as it has the operation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from chipsparse.kernels.attention_residual import attention_residual
from chipsparse.kernels.column_selection import column_selection
from chipsparse.kernels.column_sparse_attention import column_sparse_attention
from chipsparse.kernels.dense_attention_column_sums import dense_attention_column_sums
from chipsparse.kernels.dispatch import Backend, Operation
from chipsparse.kernels.fp8_rows import fp8_rows
from chipsparse.kernels.mask_packing import packed_to_indices
from chipsparse.kernels.neuron_selection import mean_preactivations, neuron_selection
from chipsparse.kernels.sparse_mlp_down import sparse_mlp_down
from chipsparse.kernels.sparse_mlp_up import dense_activation, sparse_mlp_up
from chipsparse.plan import Action
from chipsparse.report.generation import GenerationReport

OPERATIONS: tuple[Operation[..., Any], ...] = (
    column_selection,
    column_sparse_attention,
    dense_activation,
    dense_attention_column_sums,
    mean_preactivations,
    attention_residual,
    fp8_rows,
    neuron_selection,
    packed_to_indices,
    sparse_mlp_down,
    sparse_mlp_up,
)
ORDER = (
    "gluon",
    "triton",
    "reference",
    "library",
)  # fastest first; the library is for no sparse step


def prefer(patch: pytest.MonkeyPatch, backend: str) -> None:
    """Takes the faster backends away, and the reasons not to take this one unasked."""

    def allowed(backends: tuple[Backend, ...]) -> tuple[Backend, ...]:
        kept = [each for each in backends if ORDER.index(each.name) >= ORDER.index(backend)]
        return tuple(
            replace(each, not_auto_reason=None) if each.name == backend else each for each in kept
        )

    for operation in OPERATIONS:
        patch.setattr(operation, "backends", allowed(operation.backends))


def sparse_backends(report: GenerationReport, part: str) -> set[str]:
    """What computed the sparse layers of a part, as the report names it."""
    return {
        layer.backend
        for step in report.steps
        for layer in step.layers
        if layer.part == part and layer.action is Action.SPARSE
    }
