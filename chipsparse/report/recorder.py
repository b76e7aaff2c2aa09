"""The recorder of a transformer call: the actions of its layers, and what they moved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from chipsparse.common.machine import device_name
from chipsparse.config import PARTS, Action, LayerPart, Part
from chipsparse.kernels.dispatch import Choice
from chipsparse.reasons import layers as layer_reasons
from chipsparse.report.generation import GenerationReport
from chipsparse.report.records import Device, LayerRecord, StepRecord, StepTimer
from chipsparse.sparse.plan import SparsityPlan


class Traffic(NamedTuple):
    """Bytes that were copied to the device and to the host."""

    to_device: int = 0
    to_host: int = 0


class CallRecorder:
    """Fills the `StepRecord` of the open call of one transformer."""

    def __init__(self, report: GenerationReport) -> None:
        self._report = report
        self.reset()

    def reset(self) -> None:
        """Forget the open call, and the backends and dense layers of the generation."""
        self._call: tuple[StepRecord, SparsityPlan, torch.device] | None = None
        self._choices: dict[tuple[object, ...], Mapping[str, Choice]] = {}
        self._left: dict[LayerPart, str] = {}
        self._left_now: dict[LayerPart, str] = {}
        self._behind: set[Part] = set()

    def begin(self, record: StepRecord, plan: SparsityPlan, device: torch.device) -> None:
        """Open a call: its layers go into this record, and their plan into the report."""
        report = self._report
        report.plans[record.transformer] = record.plan = plan
        if report.device is None:
            report.device = Device(device.type, device_name(device))
        self._call = record, plan, device
        self._left_now = {}

    @property
    def left_dense(self) -> dict[LayerPart, str]:
        """Why layers run dense in this generation or call, by layer and part."""
        return self._left | self._left_now

    def leave_dense(self, part: Part, reasons: Mapping[int, str], *, once: bool = False) -> None:
        """Note why the model computes a part of these layers by itself, whatever the plan says.

        This replaces what was noted of the part before, with ``once`` for the open call alone.
        """
        own = {(layer, part): reason for layer, reason in reasons.items()}
        if once:
            self._left_now = own
        else:
            others = {place: why for place, why in self._left.items() if place[1] != part}
            self._left = others | own

    @contextlib.contextmanager
    def watch(self, layer: int, part: Part, reason: str | None) -> Iterator[LayerRecord]:
        """Give a record of a layer, dense for a reason whatever the step is, or None."""
        assert self._call is not None
        record, _, device = self._call
        timer = StepTimer(device) if self._report.layer_times else None
        entry = LayerRecord(layer, part, Action.DENSE, reason=reason, timer=timer)
        record.layers.append(entry)
        yield entry
        if timer is not None:
            timer.stop()

    def choices(
        self,
        kind: tuple[object, ...],
        choose: Callable[[], Mapping[str, Choice]],
    ) -> Mapping[str, Choice]:
        """Return the backend of each operation, chosen and reported once for a kind of layers."""
        if kind not in self._choices:
            self._choices[kind] = choose()
            self._report.run_on(self._choices[kind])
        return self._choices[kind]

    def catch_up(self, layer: int, part: Part, action: Action) -> Action:
        """Return a fuller action than the step's; report it once where the step is sparse."""
        assert self._call is not None
        record, _, _ = self._call
        if record.action is Action.SPARSE and part not in self._behind:
            self._behind.add(part)
            self._report.add(layer_reasons.raised(part, layer, record.step))
        return action

    def end(self, traffic: Mapping[tuple[int, Part], Traffic], *, finished: bool = True) -> None:
        """Close an open call; `FallbackError` if strict and a layer of a sparse step was unseen."""
        if self._call is None:
            return
        (record, plan, _) = self._call
        self._call = None
        _count_traffic(record, traffic)
        record.finished = finished
        if finished and record.action is not Action.SKIP and not plan.is_dense():
            unknown = self._add_unseen(record, plan)
            if unknown and self._report.strict and record.action is Action.SPARSE:
                layer, part = unknown[0]
                self._report.add(layer_reasons.unseen(part, layer, record.step))

    def _add_unseen(self, record: StepRecord, plan: SparsityPlan) -> list[tuple[int, Part]]:
        """Add what the model computed by itself; return what it computed for no known reason.

        A layer of which nothing is known may have been passed over by a block cache.
        """
        seen = {(entry.layer, entry.part) for entry in record.layers}
        left = self.left_dense
        known = seen | left.keys()
        reasons = {**plan.dense, **left}
        missing = []
        for layer in range(plan.layout.layers):
            for part, other in (PARTS, PARTS[::-1]):
                if (layer, part) in seen:
                    continue
                why = reasons.get((layer, part))
                if (layer, other) in known and why is not None:
                    record.layers.append(LayerRecord(layer, part, Action.DENSE, reason=why))
                else:
                    missing.append((layer, part, other))
        if len(record.layers) > len(seen):
            record.layers.sort(key=lambda entry: (entry.layer, PARTS.index(entry.part)))
        return [
            (layer, part)
            for layer, part, other in missing
            if (layer, other) in seen or not record.layers
        ]


def _count_traffic(record: StepRecord, traffic: Mapping[tuple[int, Part], Traffic]) -> None:
    layers = {(entry.layer, entry.part): entry for entry in record.layers}
    for place, moved in traffic.items():
        for entry in (record, layers.get(place)):
            if entry is not None:
                entry.bytes_to_device += moved.to_device
                entry.bytes_to_host += moved.to_host
