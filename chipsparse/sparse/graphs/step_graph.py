"""Sparse transformer calls, captured once as a CUDA graph and then replayed.

The sparse step of an image launches a thousand kernels of a few microseconds each, and a host takes
longer for that than a fast GPU takes to run them. All sparse calls of a generation launch the same
ones, on the same memory as long as the caches stay where they are (see `kept_in_place`). So the
first runs as usual, which compiles what there is to compile, the next one is captured, and it and
all that follow are replayed.

A replay runs none of the model's Python and reads its weights where they were. Whoever runs calls
here says so with `StepGraphs.model_changed`; see `ModelState`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from chipsparse.common.errors import first_line
from chipsparse.config import Action
from chipsparse.reasons.memory import capture_dropped, not_captured
from chipsparse.report.generation import GenerationReport
from chipsparse.report.records import LayerRecord, StepRecord
from chipsparse.sparse.cache.store import CacheStore
from chipsparse.sparse.cache.tensors import Kept, PartCache
from chipsparse.sparse.graphs.cuda_capture import CudaCapture, CudaCapturer
from chipsparse.sparse.layers.state import OpenCall

# A pipeline whose arguments change all the time is left alone after so many captures, and a model
# that cannot be captured after so many attempts: a first call may still compile and tune.
MOST_CAPTURES = 4
MOST_ATTEMPTS = 2
PLAIN = (bool, int, float, str, type(None))
UNKNOWN = "not asked yet"


class Arguments:
    """The arguments of a call, taken apart into tensors and other things.

    The values of tensors elsewhere than on ``device_type``, where calls are captured, become part
    of what is captured, as numbers do.
    """

    def __init__(self, call: partial[Any], device_type: str) -> None:
        self.leaves, self.form = pytree.tree_flatten((call.args, call.keywords))
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

    def call(self, forward: Callable[..., object]) -> object:
        """Call a function with the arguments that the leaves form."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self.form)
        return forward(*args, **kwargs)

    def with_copies(self, places: Collection[int]) -> Arguments:
        """The same, but for copies of the tensors at some places."""
        copied = copy.copy(self)
        copied.leaves = [
            leaf.clone() if place in places else leaf for place, leaf in enumerate(self.leaves)
        ]
        return copied


def _alike(leaf: object, other: object) -> bool:
    if leaf is other:
        return True
    if isinstance(leaf, torch.Tensor) and isinstance(other, torch.Tensor):
        same_type = leaf.dtype == other.dtype and leaf.device == other.device
        return same_type and leaf.shape == other.shape
    return type(leaf) is type(other) and isinstance(leaf, PLAIN) and bool(leaf == other)


@dataclass(frozen=True)
class StepGraph:
    """A captured call."""

    inputs: Arguments  # the arguments that it reads
    # Places of the tensors among them that the values of each call are copied to. The others are
    # those that the pipeline passes at every step, and are read where they are: what is known of
    # them by their identity, such as the length of a prompt, stays known.
    copied: frozenset[int]
    result: object  # what it writes, as the model returned it
    layers: tuple[LayerRecord, ...]  # what its layers do
    capture: CudaCapture  # runs it

    def fits(self, arguments: Arguments) -> bool:
        """Return whether a replay with these arguments does what the model would do."""
        return arguments.are_like(self.inputs) and self.copied >= arguments.others(self.inputs)

    def run(self, arguments: Arguments) -> object:
        """The result for these arguments, in memory of its own."""
        for place in self.copied:
            self.inputs.leaves[place].copy_(arguments.leaves[place])
        self.capture.replay()
        return pytree.tree_map_only(torch.Tensor, torch.clone, self.result)


class StepGraphs:
    """The captured sparse calls of one transformer, one for each guidance branch."""

    def __init__(
        self,
        caches: CacheStore,
        report: GenerationReport,
        capturer: CudaCapturer | None = None,
    ) -> None:
        self._caches = caches
        self._report = report
        self._capturer = CudaCapturer() if capturer is None else capturer
        self._graphs: dict[str, StepGraph] = {}
        self._last: dict[str, Arguments] = {}  # of each branch, if it ran as usual
        self._attempts = 0  # in all: what cannot be captured in one generation cannot in the next
        self._error = ""
        self.reset()

    def reset(self) -> None:
        """Forgets all calls and frees their memory: another generation begins."""
        for branch in list(self._graphs):
            self.drop(branch)
        self._last.clear()
        self._captures = Counter[str]()  # by branch
        self._not_captured_reason: str | None = UNKNOWN

    @contextlib.contextmanager
    def kept_in_place(
        self,
        branch: str,
        cache: PartCache,
        read: Collection[Kept],
    ) -> Iterator[None]:
        """Leaves what a layer records anew where the captured call, if there is one, reads it."""
        if branch not in self._graphs:
            yield
            return
        before = {**vars(cache)}
        yield
        if not put_back(cache, before, read):
            self.drop(branch)

    def drop(self, branch: str) -> None:
        """Forgets the call of a branch; another one may be captured."""
        self._last.pop(branch, None)
        graph = self._graphs.pop(branch, None)
        if graph is not None:
            graph.capture.release()

    def model_changed(self, what: str) -> None:
        """Drops the captured calls, which do what the model did before."""
        self._not_captured_reason = UNKNOWN
        if self._graphs:
            self._report.add(capture_dropped(what))
        for branch in [*self._graphs, *self._last]:
            self.drop(branch)

    def run(
        self,
        call: partial[object],  # of the model
        state: OpenCall,  # its record gets the layers, which a replay does not run
        device: torch.device,
        # Why the model may not do the same at every sparse step, or None; asked once a generation,
        # and again after `model_changed`.
        not_captured_reason: Callable[[], str | None],
    ) -> object:
        """Return the model's output in the open call, by a CUDA graph where that pays."""
        if not self._may_be_captured(state, device, not_captured_reason):
            return call()
        record = state.record
        with self._capturer.on(device):
            arguments = Arguments(call, self._capturer.device_type)
            graph = self._graph_for(call, arguments, record)
            if graph is not None:
                record.replayed = True
                record.layers = [dataclasses.replace(layer) for layer in graph.layers]
                result = graph.run(arguments)
                for entry in record.layers:
                    if entry.part == "attention" and entry.action is Action.SPARSE:
                        cache = self._caches[record.branch, entry.layer].attention
                        entry.computed = cache.kept_fraction
                return result
            result = call()
        # All layers did what a sparse step does, and none more to catch up.
        plain = all(layer.action is Action.SPARSE or layer.reason for layer in record.layers)
        if plain and self._captures[record.branch] < MOST_CAPTURES:
            self._last[record.branch] = arguments
        return result

    def _may_be_captured(
        self,
        state: OpenCall,
        device: torch.device,
        not_captured_reason: Callable[[], str | None],
    ) -> bool:
        """Return True where the open call does just what other sparse calls of its branch do."""
        if state.action is not Action.SPARSE or not state.captures:
            return False
        if device.type != self._capturer.device_type or self._report.layer_times:
            return False
        if not self._caches.all_on_device(state.branch):
            return False
        if self._not_captured_reason is UNKNOWN:
            self._not_captured_reason = not_captured_reason()
            if self._not_captured_reason is not None:
                self._note(self._not_captured_reason)
        if self._attempts >= MOST_ATTEMPTS:
            self._note(self._error)
            return False
        return self._not_captured_reason is None

    def _note(self, reason: str) -> None:
        self._report.add(not_captured(reason))

    def _graph_for(
        self,
        call: partial[Any],
        arguments: Arguments,
        record: StepRecord,
    ) -> StepGraph | None:
        """The captured call of the branch, captured now where the last one was like this one."""
        branch = record.branch
        graph = self._graphs.get(branch)
        before = self._last.get(branch)
        if graph is not None and graph.fits(arguments):
            return graph
        self.drop(branch)
        if before is None or not arguments.are_like(before):
            return None
        copied = arguments.others(before)
        self._captures[branch] += 1
        try:
            inputs = arguments.with_copies(copied)
            result, capture = self._capturer.capture(lambda: inputs.call(call.func))
        except torch.OutOfMemoryError as error:  # there may be enough for another generation
            self._captures[branch] = MOST_CAPTURES
            self._note(first_line(error))
        except RuntimeError as error:
            self._attempts += 1
            self._error = first_line(error)
            if self._attempts >= MOST_ATTEMPTS:
                self._note(self._error)
        else:
            graph = StepGraph(inputs, copied, result, tuple(record.layers), capture)
            self._graphs[branch] = graph
            return graph
        record.layers.clear()
        return None


def put_back(cache: PartCache, before: Mapping[str, Any], read: Collection[Kept]) -> bool:
    """Moves what a layer recorded anew to the memory that its cache's fields had before.

    Returns False where it cannot: it has another form, or longer index lists than the captured call
    makes room for.
    """
    capacity = before.get("capacity")
    if capacity is not None and (vars(cache)["capacity"] or 0) > capacity:
        return False
    for kept in read:
        memory = before[kept.field]
        if memory is None:
            continue
        new = pytree.tree_leaves(getattr(cache, kept.field))
        old = pytree.tree_leaves(memory)
        if len(new) != len(old) or not all(map(_alike, new, old)):
            return False
        for source, target in zip(new, old, strict=True):
            if source is not target:
                target.copy_(source)
        setattr(cache, kept.field, memory)
    return True
