"""The outputs that skipped transformer calls are made from."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HeldOutput:
    """What a call computed, and at which timestep."""

    time: float
    tensor: torch.Tensor


class HeldOutputs:
    """The last output that each guidance branch computed, or the last two.

    A skipped call gives the last one, v1, or goes on along the line through both,

        v1 + share * (t - t1) / (t1 - t0) * (v1 - v0),

    with t the timestep of the call and t0, t1 those of the outputs. In flow matching, where t is
    proportional to the noise and v is a velocity, that is a linear forecast in the solver's own
    variable.
    """

    def __init__(self) -> None:
        self._held: dict[str, list[HeldOutput]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, branch: str, time: float, output: torch.Tensor, *, both: bool = False) -> None:
        """Keeps a copy of what a branch computed, and of what it computed before only if asked to.

        Args:
            branch: guidance branch.
            time: the timestep.
            output: of any shape, the same for all steps of the branch.
            both: whether a forecast may ask for the output before it.
        """
        held = HeldOutput(time, output.clone())  # the caller may change it in place
        self._held[branch] = [*(self._held.get(branch, [])[-1:] if both else []), held]

    def drop(self, branch: str) -> None:
        """Forgets what a branch computed."""
        self._held.pop(branch, None)

    def reach(self, branch: str, time: float) -> float:
        """How far a timestep is beyond the last output, in units of the last two's distance.

        0 where a single output is held, or both have one timestep: there is no line through them.
        """
        *before, last = self._held[branch]
        if not before or last.time == before[0].time:
            return 0.0
        return (time - last.time) / (last.time - before[0].time)

    def output(self, branch: str, reach: float = 0.0) -> torch.Tensor:
        """The last output of a branch, gone on by so much of its last change; a tensor of its own.

        Computed in fp32 and rounded once, to the dtype of the outputs.
        """
        *before, last = self._held[branch]
        if reach == 0.0:
            return last.tensor.clone()
        exact = torch.promote_types(last.tensor.dtype, torch.float32)
        new, old = last.tensor.to(exact), before[0].tensor.to(exact)
        return (new + reach * (new - old)).to(last.tensor.dtype)
