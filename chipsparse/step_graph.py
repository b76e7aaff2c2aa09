"""Sparse transformer calls, recorded once as a CUDA graph and then launched as a whole.

The sparse step of an image launches a thousand kernels of a few microseconds each, and a host takes
longer for that than a fast GPU takes to run them. All sparse calls of a generation launch the same
ones, on the same memory as long as the caches stay where they are (see `keep_in_place`). So the
first runs as usual, which compiles what there is to compile, the second one is recorded, and it and
all later ones are launched at once.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from chipsparse.cuda_recorder import CudaRecorder
from chipsparse.plan import NOT_RECORDED, Action
from chipsparse.report import LayerRecord, StepRecord

Forward = Callable[..., Any]
Launch = Callable[[], None]
TensorsInPlace = Mapping[str, tuple[torch.Tensor, ...]]

# A pipeline whose arguments change all the time is left alone after so many recordings, and a model
# that waits for the device after so many calls: the first ones may, while they compile and tune.
MOST_RECORDINGS = 4
MOST_WAITS = 3
PLAIN = (bool, int, float, str, type(None))


class Recorder(Protocol):
    """How calls are recorded on devices of one type."""

    device_type: str

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        """Makes it the current device, on which calls are recorded and launched."""

    def watch(self, call: Callable[[], Any]) -> tuple[Any, bool]:
        """Makes a call as usual: its result, and whether the host waited for the device."""

    def record(self, call: Callable[[], Any]) -> tuple[Any, Launch]:
        """Makes a call that computes nothing: its result, and what computes it."""


class Arguments:
    """The arguments of a call, taken apart into tensors and other things.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.leaves, self.form = pytree.tree_flatten((args, dict(kwargs)))

    def are_like(self, other: Arguments) -> bool:
        """Whether both differ in the values of tensors alone."""
        return self.form == other.form and all(map(_alike, self.leaves, other.leaves))

    def call(self, forward: Forward) -> Any:
        """Calls a function with them."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self.form)
        return forward(*args, **kwargs)

    def with_copies(self, places: Collection[int]) -> Arguments:
        """The same, but for copies of the tensors at some places."""
        copied = copy.copy(self)
        copied.leaves = [
            leaf.clone() if place in places else leaf for place, leaf in enumerate(self.leaves)
        ]
        return copied


def _alike(leaf: Any, other: Any) -> bool:
    if leaf is other:
        return True
    if isinstance(leaf, torch.Tensor) and isinstance(other, torch.Tensor):
        return _facts(leaf) == _facts(other)
    return type(leaf) is type(other) and isinstance(leaf, PLAIN) and bool(leaf == other)


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


@dataclass(frozen=True)
class StepGraph:
    """A recorded call.

    Attributes:
        inputs: the arguments that it reads.
        copied: places of the tensors among them that the values of each call are copied to. The
            others are those that the pipeline passes at every step, and are read where they are:
            what is known of them by their identity, such as the length of a prompt, stays known.
        result: what it writes, as the model returned it.
        layers: what its layers do.
        launch: runs it on the current stream.
    """

    inputs: Arguments
    copied: frozenset[int]
    result: Any
    layers: tuple[LayerRecord, ...]
    launch: Launch

    def fits(self, arguments: Arguments) -> bool:
        """Whether it computes the call with these arguments."""
        return arguments.are_like(self.inputs) and self.copied >= _others(arguments, self.inputs)

    def run(self, arguments: Arguments) -> Any:
        """The result for these arguments, in memory of its own."""
        for place in self.copied:
            self.inputs.leaves[place].copy_(arguments.leaves[place])
        self.launch()
        return pytree.tree_map_only(torch.Tensor, torch.clone, self.result)


class StepGraphs:
    """The recorded sparse calls of one transformer, one for each guidance branch.

    Args:
        recorder: records them.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self._recorder = CudaRecorder() if recorder is None else recorder
        self.device_type, self.on = self._recorder.device_type, self._recorder.on
        self.reset()

    def reset(self) -> None:
        """Forgets all calls and frees their memory."""
        self._graphs: dict[str, StepGraph] = {}
        self._last: dict[str, Arguments] = {}
        self._recordings: dict[str, int] = {}
        self._waits: dict[str, int] = {}

    def __contains__(self, branch: str) -> bool:
        """Whether a call of a branch is recorded, so that its caches must stay where they are."""
        return branch in self._graphs

    def drop(self, branch: str) -> None:
        """Forgets the call of a branch; another one may be recorded."""
        self._graphs.pop(branch, None)
        self._last.pop(branch, None)

    def run(
        self,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        record: StepRecord,
        note: Callable[[str], None],
    ) -> Any:
        """A sparse call: as usual the first time, later ones as they were recorded.

        Args:
            forward: the model's own.
            args: its positional arguments.
            kwargs: its keyword arguments.
            record: of the call; gets the layers, which do nothing that could record them when
                they are launched as a whole.
            note: told in one sentence why nothing is recorded any more.

        Returns:
            What the forward returns.
        """
        branch, arguments = record.branch, Arguments(args, kwargs)
        graph = self._graphs.get(branch)
        if graph is not None and not graph.fits(arguments):
            self.drop(branch)
            graph = None
        before = self._last.pop(branch, None)
        if graph is None and before is not None and arguments.are_like(before):
            graph = self._graph(forward, arguments, before, record, note)
        if graph is not None:
            record.replayed = True
            record.layers = [dataclasses.replace(layer) for layer in graph.layers]
            return graph.run(arguments)
        if self._gave_up(branch):
            return forward(*args, **kwargs)
        result, waited = self._recorder.watch(lambda: forward(*args, **kwargs))
        if waited:
            self._waits[branch] = self._waits.get(branch, 0) + 1
            if self._gave_up(branch):
                note(f"{NOT_RECORDED}: the model makes the host wait for the device in every step")
        elif _was_plain(record):
            self._last[branch] = arguments
        return result

    def _gave_up(self, branch: str) -> bool:
        recordings, waits = (each.get(branch, 0) for each in (self._recordings, self._waits))
        return recordings >= MOST_RECORDINGS or waits >= MOST_WAITS

    def _graph(
        self,
        forward: Forward,
        arguments: Arguments,
        before: Arguments,
        record: StepRecord,
        note: Callable[[str], None],
    ) -> StepGraph | None:
        """The call as a graph; None where it cannot be recorded."""
        branch, copied = record.branch, _others(arguments, before)
        inputs = arguments.with_copies(copied)
        self._recordings[branch] = self._recordings.get(branch, 0) + 1
        try:
            result, launch = self._recorder.record(lambda: inputs.call(forward))
        except RuntimeError as error:  # of CUDA: it cannot be recorded, or there is no memory
            record.layers.clear()
            self._recordings[branch] = MOST_RECORDINGS
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            note(f"{NOT_RECORDED}: {reason}")
            return None
        graph = StepGraph(inputs, copied, result, tuple(record.layers), launch)
        self._graphs[branch] = graph
        return graph


def _others(arguments: Arguments, before: Arguments) -> frozenset[int]:
    """The places where both, of one form, have different tensors."""
    pairs = zip(arguments.leaves, before.leaves, strict=True)
    return frozenset(
        place
        for place, (leaf, other) in enumerate(pairs)
        if isinstance(leaf, torch.Tensor) and leaf is not other
    )


def _was_plain(record: StepRecord) -> bool:
    """Whether all layers did what a sparse step does, and none more to catch up."""
    return all(layer.action is Action.SPARSE or layer.reason is not None for layer in record.layers)


# Caches that a graph reads and writes.


def tensors_in_place(cache: Any, kinds: Collection[str]) -> TensorsInPlace:
    """The tensors of some kinds that a layer's cache holds, and its lists of columns."""
    named = {kind: getattr(cache, kind) for kind in (*kinds, "lists") if hasattr(cache, kind)}
    return {
        kind: held if isinstance(held, tuple) else (held,)
        for kind, held in named.items()
        if held is not None
    }


def keep_in_place(cache: Any, before: TensorsInPlace) -> bool:
    """Moves what a layer recorded anew to where it was before.

    Args:
        cache: of the layer.
        before: its `tensors_in_place` before.

    Returns:
        False where something new has another form, so that it stays where it is.
    """
    for kind, memory in before.items():
        held = getattr(cache, kind)
        new = held if isinstance(held, tuple) else (held,)
        if len(new) != len(memory) or not all(map(_alike, new, memory)):
            return False
        for source, target in zip(new, memory, strict=True):
            if source is not target:
                target.copy_(source)
        setattr(cache, kind, memory if isinstance(held, tuple) else memory[0])
    return True
