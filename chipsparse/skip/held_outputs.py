"""The outputs that skipped transformer calls are made from."""

from __future__ import annotations

from typing import NamedTuple

import torch


class HeldOutput(NamedTuple):
    """The output of a call, and its timestep."""

    time: float
    tensor: torch.Tensor


class HeldOutputs:
    """The last output that each guidance branch computed, or the last two.

    A skipped call at timestep t gives the last one, v1, or goes on along the line through both,
    ``v1 + share * (t - t1) / (t1 - t0) * (v1 - v0)``. In flow matching, where t is proportional to
    the noise and v is a velocity, that is a linear forecast in the solver's own variable.
    """

    def __init__(self) -> None:
        self._held: dict[str, list[HeldOutput]] = {}

    def __contains__(self, branch: str) -> bool:
        return branch in self._held

    def hold(self, branch: str, time: float, output: torch.Tensor, *, both: bool = False) -> None:
        """Keep a copy of a branch's output, and the output before it only if asked to."""
        held = HeldOutput(time, output.clone())  # the caller may change it in place
        self._held[branch] = [*(self._held.get(branch, [])[-1:] if both else []), held]

    def drop(self, branch: str) -> None:
        self._held.pop(branch, None)

    def reach(self, branch: str, time: float) -> float:
        """Return how far a timestep is beyond the last output, in distances of the last two.

        Without a line through two timesteps that is 0.
        """
        *before, last = self._held[branch]
        if not before or last.time == before[0].time:
            return 0.0
        return (time - last.time) / (last.time - before[0].time)

    def output(self, branch: str, reach: float = 0.0) -> torch.Tensor:
        """Return a new tensor: the last output of a branch plus a share of its last change."""
        *before, last = self._held[branch]
        if reach == 0.0:
            return last.tensor.clone()
        # Rounded once, to the dtype of the outputs.
        exact = torch.promote_types(last.tensor.dtype, torch.float32)
        new = last.tensor.to(exact)
        old = before[0].tensor.to(exact)
        return (new + reach * (new - old)).to(last.tensor.dtype)
