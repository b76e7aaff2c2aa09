"""The arguments of every layer: the open transformer call, and the shared state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from chipsparse.config import Action, LayerPart, Part, SparsityConfig
from chipsparse.kernels.dense_attention.measure import FastestKernel
from chipsparse.layout import ModelLayout
from chipsparse.parallel.agreement import BranchColumns
from chipsparse.report.recorder import CallRecorder
from chipsparse.report.records import StepRecord
from chipsparse.skip.position import Place
from chipsparse.sparse.cache.store import CacheStore
from chipsparse.sparse.cache.tensors import Kept, PartCache
from chipsparse.sparse.layers.column_budget import ColumnBudgets
from chipsparse.sparse.plan import SparsityPlan


def split_full_attention_rows(
    tensor: torch.Tensor,
    layout: ModelLayout,
    dim: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the rows that may run sparse and those before them that never do, as views.

    The tensor has the rows of the sequence along ``dim``, which is not negative. The first rows,
    which never run sparse, may be missing. None: all are.
    """
    if not layout.full_attention_rows:
        return tensor, None
    rows = len(layout.query_rows)
    in_full = tensor.shape[dim] - rows
    if in_full == 0:
        return tensor, None
    return tensor.narrow(dim, in_full, rows), tensor.narrow(dim, 0, in_full)


# The call of an `AttentionLayer` or `MLPLayer`.
LayerCall = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class OpenCall:
    """One open transformer call: its plan, position and record."""

    plan: SparsityPlan  # of the call's guidance branch
    place: Place  # position of the call
    record: StepRecord  # of the call, filled while it runs
    caching: bool  # layers record for later: something is sparse, and this call can take part in it
    refreshed_at: int  # step of the branch's last refresh, this one included; -1 before the first
    dense: Mapping[LayerPart, str]  # why parts run dense at every step of the branch
    budgets: ColumnBudgets  # which columns a refresh keeps
    captures: bool = False  # whether sparse calls are captured as CUDA graphs, where they can be
    # Whether layers compute full attention where nothing is recorded, too: in FP8, or since that is
    # faster than as the model calls it.
    replaces_attention: bool = False

    @property
    def action(self) -> Action:
        """The action of the call; single layers may take a fuller one."""
        return self.record.action

    @property
    def branch(self) -> str:
        """The name of the call's guidance branch."""
        return self.place.branch

    def layer_action(self, layer: int, part: Part, caches: CacheStore) -> Action:
        """Return a layer's action: the call's, raised where the layer's cache lacks its inputs.

        So it is where a block cache passed over the layer at the branch's last refresh. The cache
        may be empty then, or of an earlier refresh.
        """
        action = self.action
        if action is Action.SPARSE:
            refreshed_at = caches.part(self.branch, layer, part).refreshed_at
            is_stale = refreshed_at < max(self.refreshed_at, 0)
            if not is_stale:
                return action
            action = Action.REFRESH
        reads_lse = part == Kept.LSE.part and action is Action.REFRESH
        if reads_lse and not caches.has(self.branch, layer, Kept.LSE):
            return Action.DENSE
        return action


@dataclass(frozen=True)
class Shared:
    """The state that all layers of a session share."""

    config: SparsityConfig  # what to compute
    recorder: CallRecorder  # notes what layers do in the open call
    caches: CacheStore  # of all layers
    # Around what records these tensors of a branch's cache anew: they stay where a captured sparse
    # step reads them.
    kept_in_place: Callable[[str, PartCache, Collection[Kept]], AbstractContextManager[None]]
    kernels: FastestKernel  # the fastest library kernel for dense attention
    columns: BranchColumns | None = None  # of guidance branches on other processes

    @property
    def backend(self) -> str | None:
        """The kernel backend that the config forces, or None."""
        return None if self.config.backend == "auto" else self.config.backend

    def layer_action(self, state: OpenCall, layer: int, part: Part) -> Action:
        """Return a layer's action; report where it is fuller than the call's."""
        action = state.layer_action(layer, part, self.caches)
        if action is not state.action:
            self.recorder.catch_up(layer, part, action)
        return action
