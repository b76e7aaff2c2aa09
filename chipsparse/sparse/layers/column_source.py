"""Where a refresh gets its columns: chosen by the layer, or by another guidance branch.

Guidance branches that refresh at a step keep the same columns. Guidance amplifies differences
between branches, including errors that only one of them makes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chipsparse.parallel.agreement import BranchColumns
from chipsparse.sparse.layers.column_budget import AttentionBudget


@dataclass(frozen=True)
class ChosenHere:
    """The layer chooses the columns by their sums."""

    budget: AttentionBudget
    others: BranchColumns | None = None  # guidance branches on other processes, which want them

    def hand_on(self, columns: torch.Tensor) -> None:
        """Give the bitmask, uint8 ``[B, H, G, ceil(N / 8)]``, to the other processes."""
        if self.others is not None:
            self.others.give(columns)


@dataclass(frozen=True)
class OfBranch:
    """Another branch of this process chose the columns at this step."""

    budget: AttentionBudget
    columns: torch.Tensor  # bitmask, uint8 `[B, H, G, ceil(N / 8)]`

    def take(self) -> torch.Tensor:
        """Return the bitmask."""
        return self.columns


@dataclass(frozen=True)
class OfProcess:
    """A branch on another process chooses the columns, and sends them."""

    budget: AttentionBudget
    others: BranchColumns
    shape: tuple[int, ...]  # of the bitmask, `[B, H, G, ceil(N / 8)]`
    device: torch.device

    def take(self) -> torch.Tensor:
        """Receive the bitmask, uint8; every process of the branches must come here."""
        return self.others.take(self.shape, self.device)


ColumnSource = ChosenHere | OfBranch | OfProcess
