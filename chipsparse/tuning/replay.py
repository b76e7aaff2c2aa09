"""One step's output replaced, all others exact: what an error of the transformer does to the end.

Outputs of earlier steps are played from the recording, so only the steps behind are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from chipsparse.config import SparsityConfig
from chipsparse.layout import ModelLayout
from chipsparse.memory_plan import MemoryDemand
from chipsparse.offload import OffloadPool
from chipsparse.plan import Action
from chipsparse.report import GenerationReport
from chipsparse.step import StepContext
from chipsparse.tuning.calibration import ExactSession
from chipsparse.tuning.recording import Trajectory
from chipsparse.tuning.sampled_layers import relative_error

Error = Literal["sparse", "skip"]

# A skipped step usually stands behind a computed one; two steps give an error that is large enough
# to be seen in eight bits.
SKIPPED_AGE = 2


class ReplaySession(ExactSession):
    """Plays a trajectory up to a step, whose output it changes, and computes the rest.

    Args:
        config: as of the session that recorded the trajectory.
        report: as of `Session`.
        pool: likewise.
        name: likewise.
        trajectory: what to play.
        step: whose output is changed.
        error: as sparse layers would change it, or as if the step were skipped.

    Attributes:
        changes: relative change of that step's output, of each guidance branch.
    """

    def __init__(
        self,
        config: SparsityConfig,
        report: GenerationReport,
        pool: OffloadPool | None = None,
        name: str = "transformer",
        *,
        trajectory: Trajectory,
        step: int,
        error: Error,
    ) -> None:
        self._trajectory = trajectory
        self._step = step
        self._error = error
        self._played: torch.Tensor | None = None
        self.changes: dict[str, float] = {}
        super().__init__(config, report, pool, name)

    def begin(
        self,
        context: StepContext,
        layout: ModelLayout,
        device: torch.device,
        demand: Callable[[], MemoryDemand] = MemoryDemand,
        latents: torch.Tensor | None = None,
    ) -> Action:
        """Opens a transformer call, which is skipped where its output is known."""
        super().begin(context, layout, device, demand, latents)
        _, _, record = self._open_call()
        recorded = self._trajectory.outputs.get((self.name, context.step, context.branch))
        if recorded is not None and context.step <= self._step:
            played = recorded
            if context.step == self._step:
                played = self._changed(context, recorded)
                self.changes[context.branch] = float(relative_error(played, recorded))
            self._played = played.to(device)
            record.action, record.timer = Action.SKIP, None
        return record.action

    def _changed(self, context: StepContext, recorded: torch.Tensor) -> torch.Tensor:
        if self._error == "sparse":
            place = self.name, context.step, context.branch
            change = self._trajectory.disturbances.get(place)
            return recorded if change is None else (recorded.float() + change).to(recorded.dtype)
        before = max(0, context.step - SKIPPED_AGE)
        return self._trajectory.outputs.get((self.name, before, context.branch), recorded)

    def skipped_output(self) -> torch.Tensor:
        """What the recording says."""
        assert self._played is not None
        return self._played.clone()
