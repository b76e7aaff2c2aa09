"""What the regression tests read off clips and runs."""

import torch

from chipsparse.report.generation import GenerationReport


def centre(frame: torch.Tensor, colour: tuple[int, int, int]) -> torch.Tensor:
    """Mean row and column of the pixels ``[H, W, 3]`` with that saturated colour (0 or 1 each)."""
    bright = torch.tensor(colour, dtype=torch.bool)
    mask = (frame[..., bright] > 0.6).all(-1) & (frame[..., ~bright] < 0.45).all(-1)
    assert mask.float().mean() > 0.004, "nothing of the asked colour"
    return mask.nonzero().float().mean(0)


def computed_share(report: GenerationReport) -> float:
    """How much of the attention columns and MLP neurons of all calls was computed: 1 if dense.

    Unlike a time it is the same on every machine, however busy.
    """
    most = max(len(record.layers) for record in report.steps)
    computed = sum(layer.kept for record in report.steps for layer in record.layers)
    return computed / (most * len(report.steps))
