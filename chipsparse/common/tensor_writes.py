"""What tells that somebody wrote to a tensor."""

from __future__ import annotations

import torch


def write_count(tensor: torch.Tensor) -> int | None:
    """Return how often a tensor was written to; None for an inference tensor, which has no count.

    Tensors made under ``torch.inference_mode`` are inference tensors.
    """
    return None if tensor.is_inference() else tensor._version


def is_compared(tensor: torch.Tensor, *, undisturbed: bool) -> bool:
    """Return whether a copy is to tell of writes to a tensor.

    A comparison on a GPU waits for all work there. So it is left out where nobody but the pipeline
    runs between two calls.
    """
    return tensor.is_inference() and (tensor.device.type == "cpu" or not undisturbed)
