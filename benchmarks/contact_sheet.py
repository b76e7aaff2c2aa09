"""All clips or images of a run in one picture, to look at."""

from __future__ import annotations

import math
from typing import Any

import torch


def contact_sheet(clips: torch.Tensor, *, frames: int = 8) -> Any:
    """One row per clip, evenly spaced frames from left to right; images in a square grid.

    Args:
        clips: float ``[B, F, H, W, C]`` in 0..1; images have one frame.
        frames: how many of each clip to show.

    Returns:
        A PIL image.
    """
    from PIL import Image

    clips = clips.cpu()
    if clips.shape[1] == 1:
        columns = math.ceil(math.sqrt(clips.shape[0]))
        rows = math.ceil(clips.shape[0] / columns)
        empty = clips.new_ones(rows * columns - clips.shape[0], *clips.shape[1:])
        shown = torch.cat([clips, empty]).unflatten(0, (rows, columns)).squeeze(2)
    else:
        shown = clips[:, torch.linspace(0, clips.shape[1] - 1, frames).round().long()]
    pixels = shown.permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1)
    return Image.fromarray((pixels * 255).round().byte().numpy())
