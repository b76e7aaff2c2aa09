"""What a generation did: action, kept fractions and time of every step, and every fallback."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from chipsparse.kernels.dispatch import Choice
from chipsparse.plan import Action


class StepTimer:
    """Wall time of one transformer call: device events on CUDA, the host clock elsewhere."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._device = device
        self._clock = clock
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._seconds = 0.0
        if device.type == "cuda":
            self._events = (
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True),
            )
            self._events[0].record(torch.cuda.current_stream(device))
        self._start = clock()

    def stop(self) -> None:
        """Marks the end of the call; does not wait for the device."""
        if self._events is not None:
            self._events[1].record(torch.cuda.current_stream(self._device))
        self._seconds = self._clock() - self._start

    def seconds(self) -> float:
        """The measured time; waits for the device where it has not yet finished."""
        if self._events is not None:
            self._events[1].synchronize()
            self._seconds = self._events[0].elapsed_time(self._events[1]) / 1e3
            self._events = None
        return self._seconds


@dataclass
class StepRecord:
    """One transformer call.

    Attributes:
        step: denoising step from 0.
        steps_total: number of steps where known.
        branch: guidance branch.
        action: what the call did.
        bytes_to_device: bytes of caches that came from host memory.
        bytes_to_host: bytes of caches that went there.
        predicted_change: by what share of itself the output was predicted to have changed since it
            was last computed, where ``skip_threshold`` asked for that; see `StepCache`.
    """

    step: int
    steps_total: int | None
    branch: str
    action: Action
    timer: StepTimer | None = None
    attention_fractions: list[torch.Tensor | float] = field(default_factory=list)
    mlp_fractions: list[float] = field(default_factory=list)
    bytes_to_device: int = 0
    bytes_to_host: int = 0
    predicted_change: float | None = None

    @property
    def seconds(self) -> float:
        """Time of the transformer call in seconds (0 for a skipped one)."""
        return 0.0 if self.timer is None else self.timer.seconds()

    @property
    def attention_kept(self) -> float | None:
        """Mean share of attention columns computed, over layers; None where nothing ran sparse."""
        return _mean([float(value) for value in self.attention_fractions])

    @property
    def mlp_kept(self) -> float | None:
        """Mean share of MLP neurons computed, over layers; None where nothing ran sparse."""
        return _mean(self.mlp_fractions)


@dataclass
class GenerationReport:
    """The record of the current or last generation.

    Attributes:
        generation: its number, from 1.
        steps: one record per transformer call, in order.
        fallbacks: one sentence for everything that runs dense, or denser than the config asks.
        backends: the kernel backend that each op ran on.
        passed_over: for each op the faster backends that did not run, with the reason.
        cache_bytes: the largest size that the caches had, in bytes, wherever they live.
        host_bytes: how much of it was in host memory beside the device.
    """

    generation: int = 0
    steps: list[StepRecord] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    backends: dict[str, str] = field(default_factory=dict)
    passed_over: dict[str, dict[str, str]] = field(default_factory=dict)
    cache_bytes: int = 0
    host_bytes: int = 0

    def begin(self, generation: int, record: StepRecord) -> None:
        """Adds a record; the first one of another generation clears what was there."""
        if generation != self.generation:
            self.generation = generation
            self.steps, self.fallbacks = [], []
            self.backends, self.passed_over = {}, {}
            self.cache_bytes = self.host_bytes = 0
        self.steps.append(record)

    def fall_back(self, sentence: str) -> None:
        """Notes once that something runs dense, and why."""
        if sentence not in self.fallbacks:
            self.fallbacks.append(sentence)

    def run_on(self, choices: Mapping[str, Choice]) -> None:
        """Notes the backend of each op, and why the ones before it were passed over."""
        for op, choice in choices.items():
            self.backends[op] = choice.backend.name
            self.passed_over[op] = dict(choice.skipped)

    def backend_reasons(self) -> list[str]:
        """Why backends were passed over, one line for all ops with the same reasons."""
        ops: dict[str, list[str]] = {}
        for op, reasons in self.passed_over.items():
            text = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            if text:
                ops.setdefault(text, []).append(op)
        return [f"{', '.join(names)} not on {text}" for text, names in ops.items()]

    def actions(self) -> Counter[str]:
        """How many denoising steps took each action (each step counted once, not per branch)."""
        return Counter({record.step: record.action.value for record in self.steps}.values())

    def mean_seconds(self, *actions: str) -> float | None:
        """Mean time of a transformer call with one of these actions, or None without any."""
        return _mean([record.seconds for record in self.steps if record.action in actions])


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
