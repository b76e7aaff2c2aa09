"""Sparse transformer calls, captured once as a CUDA graph and then replayed.

The sparse step of an image launches a thousand kernels of a few microseconds each, and a host takes
longer for that than a fast GPU takes to run them. All sparse calls of a generation launch the same
ones, on the same memory as long as the caches stay where they are (see `keep_in_place`). So the
first runs as usual, which compiles what there is to compile, the next one is captured, and it and
all that follow are replayed.

A replay runs none of the model's Python and reads its weights where they were. Whoever runs calls
here says so with `StepGraphs.drop_all` when the model has changed; see `ModelState`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from chipsparse.graphs.cuda_capture import CudaCapturer
from chipsparse.plan import NOT_CAPTURED, Action
from chipsparse.report.generation import LayerRecord, StepRecord

# A pipeline whose arguments change all the time is left alone after so many captures, and a model
# that cannot be captured after so many attempts: a first call may still compile and tune.
MOST_CAPTURES = 4
MOST_ATTEMPTS = 2
PLAIN = (bool, int, float, str, type(None))


class Capture(Protocol):
    """A captured call."""

    def replay(self) -> None:
        """Computes it, on the current stream."""

    def release(self) -> None:
        """Frees its memory, once the device has done with it; it is not replayed again."""


class Capturer(Protocol):
    """The capture of calls on devices of one type."""

    device_type: str

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        """Makes it the current device, on which calls are captured and replayed."""

    def capture(self, call: Callable[[], Any]) -> tuple[Any, Capture]:
        """Makes a call that computes nothing: its result, and what computes it.

        Raises:
            RuntimeError: where the call cannot be captured, such as one that waits for the device.
            torch.OutOfMemoryError: where there is no memory for it now.
        """


@dataclass(frozen=True)
class ModelCall:
    """A call of the model's own forward, yet to be made."""

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def run(self) -> Any:
        """Return the output of the forward."""
        return self.forward(*self.args, **self.kwargs)


class Arguments:
    """The arguments of a call, taken apart into tensors and other things.

    Args:
        call: the call.
        device_type: where calls are captured. The values of tensors elsewhere become part of what
            is captured, as numbers do.
    """

    def __init__(self, call: ModelCall, device_type: str) -> None:
        self.leaves, self.form = pytree.tree_flatten((call.args, dict(call.kwargs)))
        self._numbers = {
            place: leaf.detach().clone()
            for place, leaf in enumerate(self.leaves)
            if isinstance(leaf, torch.Tensor) and leaf.device.type != device_type
        }

    def are_like(self, other: Arguments) -> bool:
        """Return True where both differ in the values of tensors on the device alone."""
        return (
            self.form == other.form
            and all(map(_alike, self.leaves, other.leaves))
            and all(torch.equal(own, other._numbers[place]) for place, own in self._numbers.items())
        )

    def others(self, before: Arguments) -> frozenset[int]:
        """The places where those before, which are like these, have different tensors."""
        pairs = zip(self.leaves, before.leaves, strict=True)
        return frozenset(
            place
            for place, (leaf, other) in enumerate(pairs)
            if isinstance(leaf, torch.Tensor) and leaf is not other and place not in self._numbers
        )

    def call(self, forward: Callable[..., Any]) -> Any:
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
    """A captured call.

    Attributes:
        inputs: the arguments that it reads.
        copied: places of the tensors among them that the values of each call are copied to. The
            others are those that the pipeline passes at every step, and are read where they are:
            what is known of them by their identity, such as the length of a prompt, stays known.
        result: what it writes, as the model returned it.
        layers: what its layers do.
        capture: runs it.
    """

    inputs: Arguments
    copied: frozenset[int]
    result: Any
    layers: tuple[LayerRecord, ...]
    capture: Capture

    def fits(self, arguments: Arguments) -> bool:
        """Return True where it computes the call with these arguments."""
        return arguments.are_like(self.inputs) and self.copied >= arguments.others(self.inputs)

    def run(self, arguments: Arguments) -> Any:
        """The result for these arguments, in memory of its own."""
        for place in self.copied:
            self.inputs.leaves[place].copy_(arguments.leaves[place])
        self.capture.replay()
        return pytree.tree_map_only(torch.Tensor, torch.clone, self.result)


class StepGraphs:
    """The captured sparse calls of one transformer, one for each guidance branch."""

    def __init__(self, capturer: Capturer | None = None) -> None:
        self._capturer = CudaCapturer() if capturer is None else capturer
        self.device_type, self.on = self._capturer.device_type, self._capturer.on
        self._graphs: dict[str, StepGraph] = {}
        # What cannot be captured in one generation cannot in the next.
        self._attempts = 0
        self._not_captured_reason = ""
        self.reset()

    def reset(self) -> None:
        """Forgets all calls and frees their memory."""
        self.drop_all()
        self._captures: dict[str, int] = {}

    def __contains__(self, branch: str) -> bool:
        """Return True where a call of a branch is captured: its caches must not move."""
        return branch in self._graphs

    @contextlib.contextmanager
    def kept_in_place(self, branch: str, cache: Any, kinds: Collection[str]) -> Iterator[None]:
        """Leaves what a layer records anew where the captured call, if there is one, reads it.

        Args:
            branch: guidance branch.
            cache: of the layer.
            kinds: what of it a sparse step reads and writes.
        """
        if branch not in self:
            yield
            return
        before = TensorsInPlace(cache, kinds)
        yield
        if not before.take(cache):
            self.drop(branch)

    def drop(self, branch: str) -> None:
        """Forgets the call of a branch; another one may be captured."""
        self._last.pop(branch, None)
        graph = self._graphs.pop(branch, None)
        if graph is not None:
            graph.capture.release()

    def drop_all(self) -> bool:
        """Forgets the calls of all branches; returns whether there were any."""
        # The arguments of the last call of each branch, if it ran as usual.
        self._last: dict[str, Arguments] = {}
        dropped = list(self._graphs)
        for branch in dropped:
            self.drop(branch)
        return bool(dropped)

    def run(self, call: ModelCall, record: StepRecord, note: Callable[[str], None]) -> Any:
        """A sparse call: as usual the first time, later ones replayed.

        Args:
            call: of the model.
            record: of the call; gets the layers, which do nothing that could record them when
                they are replayed.
            note: gets a sentence on why nothing is captured any more.

        Returns:
            What the forward returns.
        """
        if self._attempts >= MOST_ATTEMPTS:
            note(f"{NOT_CAPTURED}: {self._not_captured_reason}")
            return call.run()
        branch, arguments = record.branch, Arguments(call, self.device_type)
        graph = self._graphs.get(branch)
        if graph is not None and not graph.fits(arguments):
            self.drop(branch)
            graph = None
        before = self._last.pop(branch, None)
        if graph is None and before is not None and arguments.are_like(before):
            graph = self._graph(call, arguments, before, record, note)
        if graph is not None:
            record.replayed = True
            record.layers = [dataclasses.replace(layer) for layer in graph.layers]
            return graph.run(arguments)
        result = call.run()
        if _was_plain(record) and self._captures.get(branch, 0) < MOST_CAPTURES:
            self._last[branch] = arguments
        return result

    def _graph(
        self,
        call: ModelCall,
        arguments: Arguments,
        before: Arguments,
        record: StepRecord,
        note: Callable[[str], None],
    ) -> StepGraph | None:
        """The call as a graph; None where it cannot be captured."""
        branch, copied = record.branch, arguments.others(before)
        self._captures[branch] = self._captures.get(branch, 0) + 1
        try:
            inputs = arguments.with_copies(copied)
            result, capture = self._capturer.capture(lambda: inputs.call(call.forward))
        except torch.OutOfMemoryError as error:  # there may be enough for another generation
            self._captures[branch] = MOST_CAPTURES
            note(f"{NOT_CAPTURED}: {_first_line(error)}")
        except RuntimeError as error:
            self._attempts += 1
            self._not_captured_reason = _first_line(error)
            if self._attempts >= MOST_ATTEMPTS:
                note(f"{NOT_CAPTURED}: {self._not_captured_reason}")
        else:
            graph = StepGraph(inputs, copied, result, tuple(record.layers), capture)
            self._graphs[branch] = graph
            return graph
        record.layers.clear()
        return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _was_plain(record: StepRecord) -> bool:
    """Return True where all layers did what a sparse step does, and none more to catch up."""
    return all(layer.action is Action.SPARSE or layer.reason is not None for layer in record.layers)


class TensorsInPlace:
    """The memory of a layer's cache that a captured call reads and writes.

    Args:
        cache: of the layer.
        kinds: the kinds of tensors; the lists of columns are among them anyway.
    """

    def __init__(self, cache: Any, kinds: Collection[str]) -> None:
        self._memory = {
            kind: _as_tuple(getattr(cache, kind))
            for kind in (*kinds, "lists")
            if getattr(cache, kind, None) is not None
        }
        self._capacity = getattr(cache, "capacity", None)

    def take(self, cache: Any) -> bool:
        """Moves what a layer recorded anew to where it was before.

        Returns:
            False where it stays where it is: it has another form, or longer lists of columns than
            the captured call makes room for.
        """
        if self._capacity is not None and (cache.capacity or 0) > self._capacity:
            return False
        for kind, memory in self._memory.items():
            held = getattr(cache, kind)
            new = _as_tuple(held)
            if len(new) != len(memory) or not all(map(_alike, new, memory)):
                return False
            for source, target in zip(new, memory, strict=True):
                if source is not target:
                    target.copy_(source)
            setattr(cache, kind, memory if isinstance(held, tuple) else memory[0])
        return True


def _as_tuple(held: Any) -> tuple[Any, ...]:
    return held if isinstance(held, tuple) else (held,)
