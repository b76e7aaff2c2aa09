"""The arguments of every layer: the open transformer call, and the shared state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from chipsparse.cache.store import CacheStore
from chipsparse.config import Part, SparsityConfig
from chipsparse.kernels.dense_attention.measure import FastestKernel
from chipsparse.layers.column_budget import ColumnBudgets
from chipsparse.parallel.branch_columns import BranchColumns
from chipsparse.plan import Action, SparsityPlan
from chipsparse.report.generation import GenerationReport, StepRecord
from chipsparse.report.recorder import CallRecorder
from chipsparse.step import StepContext


class CapturedSteps(Protocol):
    """Captured sparse steps, as layers know them."""

    def kept_in_place(
        self, branch: str, cache: Any, kinds: Collection[str]
    ) -> AbstractContextManager[None]:
        """Around what records a layer's cache anew, which stays where the captured step reads it.

        Args:
            branch: guidance branch.
            cache: of the layer.
            kinds: what of it a sparse step reads and writes.
        """


@dataclass(frozen=True)
class StepState:
    """One open transformer call: its plan, position and record.

    Attributes:
        plan: of the call's guidance branch.
        context: position of the call.
        record: of the call, filled while it runs.
        caching: whether layers record for later: anything of the generation is sparse, and this
            call can take part in it.
        refreshed_at: step of the branch's last refresh, this one included; -1 before the first.
        dense: why the attention or MLP of a layer runs dense at every step of the branch.
        budgets: which columns a refresh keeps.
        captures: whether sparse calls are captured as CUDA graphs, where they can be.
        replaces_attention: whether layers compute full attention where nothing is recorded, too: in
            FP8, or since that is faster than as the model calls it.
    """

    plan: SparsityPlan
    context: StepContext
    record: StepRecord
    caching: bool
    refreshed_at: int
    dense: Mapping[tuple[int, Part], str]
    budgets: ColumnBudgets
    captures: bool = False
    replaces_attention: bool = False

    @property
    def action(self) -> Action:
        """The action of the call; single layers may take a fuller one."""
        return self.record.action

    @property
    def branch(self) -> str:
        """The guidance branch of the call."""
        return self.context.branch


@dataclass(frozen=True)
class Shared:
    """The state that all layers of a session share.

    Attributes:
        config: what to compute.
        report: gets what runs denser than asked.
        recorder: notes what layers do in the open call.
        caches: of all layers.
        graphs: captured sparse steps, which read caches where they were.
        kernels: the fastest library kernel for dense attention.
        columns: of guidance branches on other processes; None where there are none.
    """

    config: SparsityConfig
    report: GenerationReport
    recorder: CallRecorder
    caches: CacheStore
    graphs: CapturedSteps
    kernels: FastestKernel
    columns: BranchColumns | None = None

    @property
    def backend(self) -> str | None:
        """The kernel backend that the config forces, or None."""
        return None if self.config.backend == "auto" else self.config.backend
