"""Whether a generation has the memory that it needs, looked at before any weight is loaded."""

from __future__ import annotations

import torch

from chipsparse.cache.memory_plan import working_bytes
from chipsparse.cli.errors import UserError
from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.model.weights import count_weights
from chipsparse.cli.planning.planned import PlannedGeneration
from chipsparse.cli.wording import counted
from chipsparse.common.byte_sizes import format_bytes
from chipsparse.common.machine import host_free_bytes

CHANNELS = 3


def check_room(planned: PlannedGeneration, model: ModelDescription, dtype: torch.dtype) -> None:
    """Raises `UserError` where a CPU's memory cannot hold a generation.

    Counts weights, a transformer call and the finished frames, and no caches: what does not fit
    of those runs dense.
    """
    free = host_free_bytes()
    if free is None:
        return
    weights = sum(component.nbytes or 0 for component in count_weights(model, dtype))
    work = working_bytes(planned.plan, dtype=dtype)
    height, width = planned.pixels
    frames = (planned.settings.num_frames or 1) * height * width * CHANNELS
    pixels = frames * (dtype.itemsize + torch.float32.itemsize)  # as decoded, and as an array
    needed = weights + work + pixels
    if needed > free:
        raise UserError(
            f"{width}x{height} pixels{_frames(planned)} need about {format_bytes(needed)} of "
            f"memory (weights {format_bytes(weights)}, a transformer call {format_bytes(work)}, "
            f"frames {format_bytes(pixels)}), and {format_bytes(free)} are free; ask for a smaller "
            "--height and --width or fewer --frames"
        )


def _frames(planned: PlannedGeneration) -> str:
    count = planned.settings.num_frames
    return "" if count is None else f" and {counted(count, 'frame')}"
