"""The generation in progress of one transformer."""

from __future__ import annotations

from dataclasses import dataclass, field

from chipsparse.pipelines.execution import Execution
from chipsparse.pipelines.guidance_scales import GuidanceScales


@dataclass
class Generation:
    """The state of one generation, replaced by a new one when the number changes."""

    number: int  # from 1; 0 before the first
    execution: Execution  # of the open call, or the last one
    corrects: bool | None = None  # its scheduler can correct skipped steps; None: not asked yet
    has_read_batch: bool = False  # `guided_batch` is known, where batches hold branches
    # The batch of calls that hold both guidance branches; None: each call holds one.
    guided_batch: int | None = None
    was_guided: bool = False  # its pipeline guided at some step
    scales: GuidanceScales = field(default_factory=GuidanceScales)
