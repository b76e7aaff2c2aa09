"""Activations of an MLP in FP8 (e4m3), rounded with a scale for each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from chipsparse.kernels.checks import check_floating
from chipsparse.kernels.dispatch import Call, Operation, triton_or_reference
from chipsparse.kernels.triton_support import triton_unsupported_reason

OP = "fp8_activations"

# How many times the largest activation of its token a later one may be before it saturates: those
# of gated layers are products, which grow fast. Each doubling costs one of the fifteen exponents at
# the small end; numbers above 1/1800 of the largest still have all their digits.
GROWTH = 16.0
# Of tokens whose activations are all zero: they may become 1.75.
SCALE_OF_ZEROS = 2.0**-8
SMALLEST_SCALE = 2.0**-100  # its inverse is a number, too


class Fp8Activations(NamedTuple):
    """Activations in e4m3: ``data * scale`` is what was rounded.

    Shapes: data e4m3 ``[B, N, F]``, its tokens contiguous as `token_layout` says; scale float32
    ``[B, N, 1]``, contiguous.
    """

    data: torch.Tensor
    scale: torch.Tensor


@dataclass(slots=True, eq=False)
class Fp8ActivationRounding(Call[Fp8Activations]):
    """Rounds each token's activations such that the largest becomes 28, a sixteenth of the most.

    So later activations of a token, which `sparse_mlp_up` stores with the same scale, may be
    sixteen times as large. A token with one that is not finite becomes zeros with a scale of NaN.

    Args:
        activation: floating point ``[B, N, F]``, of any strides.
        backend: forces one (``triton``, ``reference``); None takes the first that can run.

    Raises:
        ValueError: shape or dtype does not fit, or the forced backend cannot run.
    """

    activation: torch.Tensor

    def facts(self) -> tuple[Any, ...]:
        """The activations."""
        return (self.activation,)

    def check(self) -> None:
        """Raises ``ValueError`` where shape or dtype does not fit."""
        check_floating(OP, activation=self.activation)
        if self.activation.dim() != 3 or not self.activation.shape[2]:
            raise ValueError(
                f"{OP}: activation must be [B, N, F], F of 1 or more, got "
                f"{list(self.activation.shape)}"
            )


def _triton_unsupported_reason(activation: torch.Tensor) -> str | None:
    if (reason := triton_unsupported_reason(activation)) is not None:
        return reason
    if activation.dtype == torch.float64:
        return "computes in float32, got torch.float64"
    return None


fp8_activations = Operation(
    OP,
    Fp8ActivationRounding,
    *triton_or_reference(__name__, OP, _triton_unsupported_reason),
)
