"""Which sparse calls of a transformer are captured: plan, device, caches and model have a say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from chipsparse.cache.store import CacheStore
from chipsparse.graphs.step_graph import ModelCall, StepGraphs
from chipsparse.layers.state import StepState
from chipsparse.plan import NOT_CAPTURED, Action
from chipsparse.report.generation import GenerationReport

UNKNOWN = "not asked yet"


class SparseCalls:
    """Runs calls of one transformer, sparse ones as CUDA graphs where that pays.

    Args:
        graphs: captures and replays.
        caches: of all layers; a graph reads them where they are.
        report: gets a note where a step is not captured, or a capture is dropped.
    """

    def __init__(self, graphs: StepGraphs, caches: CacheStore, report: GenerationReport) -> None:
        self._graphs = graphs
        self._caches = caches
        self._report = report
        self.reset()

    def reset(self) -> None:
        """Forgets all captured calls: another generation begins."""
        self._graphs.reset()
        self._not_captured_reason: str | None = UNKNOWN

    def run(
        self,
        call: ModelCall,
        state: StepState,
        device: torch.device,
        not_captured_reason: Callable[[], str | None],
    ) -> Any:
        """Return the model's output in the open call, by a CUDA graph where that pays.

        Args:
            call: of the model.
            state: of the open call.
            device: where it runs.
            not_captured_reason: why the model may not do the same at every sparse step, or None;
                asked once a generation, and again after `model_changed`.
        """
        if not self._may_be_captured(state, device, not_captured_reason):
            return call.run()
        with self._graphs.on(device):
            result = self._graphs.run(call, state.record, self._report.note)
        if state.record.replayed:
            for entry in state.record.layers:
                if entry.part == "attention" and entry.action is Action.SPARSE:
                    cache = self._caches[state.branch, entry.layer].attention
                    entry.computed = cache.kept_fraction
        return result

    def model_changed(self, what: str) -> None:
        """Drops the captured calls, which do what the model did before."""
        self._not_captured_reason = UNKNOWN
        if self._graphs.drop_all():
            self._report.note(f"a captured sparse step was dropped: {what} changed")

    def _may_be_captured(
        self, state: StepState, device: torch.device, not_captured_reason: Callable[[], str | None]
    ) -> bool:
        """Return True where the open call does just what other sparse calls of its branch do."""
        if state.action is not Action.SPARSE or not state.captures:
            return False
        if device.type != self._graphs.device_type or self._report.layer_times:
            return False
        if not self._caches.stay_on_device(state.branch):
            return False
        layers = range(state.plan.layout.layers)
        if any(self._caches[state.branch, each].attention.lists_were_cut() for each in layers):
            self._graphs.drop(state.branch)  # those layers refresh
            return False
        if self._not_captured_reason is UNKNOWN:
            self._not_captured_reason = not_captured_reason()
            if self._not_captured_reason is not None:
                self._report.note(f"{NOT_CAPTURED}: {self._not_captured_reason}")
        return self._not_captured_reason is None
