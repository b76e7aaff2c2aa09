"""The softmax that the attention references share."""

from __future__ import annotations

import torch


def softmax_with_lse(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the last dimension, and the natural log-sum-exp of each row.

    The largest weight of a row is ``exp(max - lse)``, so the log-sum-exp follows from it without a
    second exponential of every score.

    Args:
        scores: ``[..., M]`` float32 or float64, M at least 1.

    Returns:
        The weights ``[..., M]`` and the log-sum-exp ``[...]``. A row of -inf gives NaN.
    """
    weights = torch.softmax(scores, dim=-1)
    return weights, scores.amax(-1) - weights.amax(-1).log_()
