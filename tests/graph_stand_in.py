"""A CUDA graph in software, for tests of recorded steps on a CPU.

`TapeRecorder` writes down what a call would launch on a GPU, in order and with the very memory that
it reads and writes: PyTorch's operations and our kernels. A launch runs those again and nothing
else: no line of the model's Python, no hook, no processor. So it shows what a CUDA graph would:

- Weights, caches and inputs are read where they were when the call was recorded. Whoever puts
  another tensor in their place (``parameter.data = ...``) sees the old values used. The tape keeps
  that memory, so that nothing crashes, and counts the launches that read it (`dangling`).
- What Python did while recording (an age counted up, a hook called) is not done again.
- Results stand in memory of the tape, the same at every launch.
- To read a tensor's value on the host is an error while recording. Our kernels may do so here: on a
  CPU their references look at what those of a GPU do not.
- One call of the process is recorded at a time; others wait.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from chipsparse.kernels.dispatch import Backend

LAUNCH = vars(Backend)["launch"]
IMPLICIT = torch._C.DispatchKey.CompositeImplicitAutograd
EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd
# They only find memory: as in a graph, it holds at each launch what the last one left there.
aten = torch.ops.aten
EMPTY = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)
# The constant that a call makes of Python's numbers, in memory that no tensor had before.
LITERAL = (aten.lift, aten.lift_fresh)
# What a host must wait for: results that are numbers, or have as many entries as the values say.
WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _by_number(function, args):
    """Return whether it takes entries by their numbers, not by a mask, which says how many."""
    if function is not aten.index.Tensor:
        return False
    return all(index is None or index.dtype != torch.bool for index in args[1])


class TapeRecorder:
    """Does what `chipsparse.sparse.graphs.cuda_capture.CudaCapturer` does, on the CPU.

    It counts in ``dangling`` the launches that used memory which nobody but the tape held any more
    (on a GPU it may have been somebody else's by then), in ``held`` recordings not given back.
    """

    device_type = "cpu"

    def __init__(self):
        self.dangling = self.held = 0

    def on(self, device):
        assert device.type == "cpu", device
        return contextlib.nullcontext()

    def capture(self, call):
        """Records a call; whatever it wrote to memory not its own is taken back.

        Raises:
            RuntimeError: where the call makes the host wait for the device.
        """
        tape = Tape()
        with _one_recording, tape.recording():
            result = call()
        self.held += 1
        return result, TapeRecording(self, tape)


class TapeRecording:
    """Does what `CudaCapture` does; the recorder counts what is done."""

    def __init__(self, recorder, tape):
        self._recorder = recorder
        self._tape: Tape | None = tape

    def replay(self):
        assert self._tape is not None, "launched after it was released"
        self._recorder.dangling += self._tape.dangles()
        self._tape.play()

    def release(self):
        assert self._tape is not None, "released twice"
        self._tape = None
        self._recorder.held -= 1


# What is written down.


@dataclass
class Operation:
    """An operation of PyTorch, or a kernel of ours.

    Tensors among its arguments are aliases: they keep the memory even where the tensor itself is
    given other memory later. Its outputs are the leaves of its result in memory that it made, which
    each launch writes anew; None for those in memory that was there before.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[torch.Tensor | None]

    def play(self):
        leaves = pytree.tree_leaves(self.function(*self.args, **self.kwargs))
        for leaf, output in zip(leaves, self.outputs, strict=True):
            if output is not None:
                assert leaf.shape == output.shape, f"a launch of {self.function}"
                output.copy_(leaf)


class Tape:
    """The operations of one call."""

    def __init__(self):
        self._operations = []
        # Memory by the number of its storage: made by the call, and all other, with what that held
        # before the call wrote to it. They are kept, so that the numbers stay theirs.
        self._own = {}
        self._outside = {}
        self._before = {}
        self._held = {}  # how often the tape itself holds outside memory

    @contextlib.contextmanager
    def recording(self):
        """Records what this thread launches; afterwards outside memory is as it was before."""
        try:
            with Writer(self).writing():
                yield
        finally:
            for number, before in self._before.items():
                self._outside[number].copy_(before)
            self._before.clear()

    def play(self):
        # They were recorded below autocast, which would cast their arguments once more.
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for operation in self._operations:
                operation.play()

    def dangles(self):
        """Return whether an operation uses memory that only this tape still holds."""
        return any(
            torch._C._storage_Use_Count(storage._cdata) <= self._held[number]
            for number, storage in self._outside.items()
        )

    def run(self, function, args, kwargs, written):
        """Runs an operation, which may write to the last tensors, and writes it down."""
        packet = getattr(function, "overloadpacket", None)
        if packet in LITERAL:
            self._adopt(args[0])
        writes = [self._save(tensor) for tensor in written]
        aliases = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        result = function(*args, **kwargs)
        before = {_number(tensor) for tensor in _tensors((args, kwargs))}
        made = [
            leaf if isinstance(leaf, torch.Tensor) and _number(leaf) not in before else None
            for leaf in pytree.tree_leaves(result)
        ]
        for leaf in made:
            if leaf is not None:
                self._adopt(leaf)
        is_view = not writes and all(leaf is None for leaf in made)  # and stays one
        if not (is_view or packet in EMPTY):
            outputs = [None if leaf is None else leaf.detach() for leaf in made]
            self._operations.append(Operation(function, *aliases, outputs))
            for alias in _tensors(aliases):
                self._hold(alias)
        return result

    def _adopt(self, tensor):
        self._own[_number(tensor)] = tensor.untyped_storage()

    def _hold(self, alias):
        number = _number(alias)
        if number not in self._own:
            self._keep(alias)
            self._held[number] += 1

    def _save(self, tensor):
        number = _number(tensor)
        if number not in self._own and number not in self._before:
            self._before[number] = self._keep(tensor).clone()

    def _keep(self, tensor):
        number = _number(tensor)
        self._held.setdefault(number, 1)  # by the object made here
        return self._outside.setdefault(number, tensor.untyped_storage())


# What looks at a call while it runs.


class Writer(TorchDispatchMode):
    """Has what this thread launches written to a tape: operations one by one, our kernels as one.

    Operations that are made of others are taken apart, and so are our custom ops, which run Python
    of ours. A call that waits is broken off, as CUDA does.
    """

    def __init__(self, tape):
        super().__init__()
        self._tape = tape

    @contextlib.contextmanager
    def writing(self):
        with _kernels_written_to(self), self:
            yield

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        of_others = EXPLICIT if function.namespace == "chipsparse" else IMPLICIT
        if torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), of_others):
            with self:
                return function._op_dk(of_others, *args, **kwargs)
        if WAITING.intersection(function.tags) and not _by_number(function, args):
            raise RuntimeError(f"{function} waits for the device, which is not permitted here")
        return self._tape.run(function, args, kwargs, _written(function, args, kwargs))

    def kernel(self, launch, call):
        """Runs a kernel of ours, which may write to whatever it is given."""
        given = {each.name: getattr(call, each.name) for each in fields(call) if each.init}
        record = type(call)
        with torch._C._DisableTorchDispatch():
            return self._tape.run(lambda **args: launch(record(**args)), (), given, _tensors(given))


@contextlib.contextmanager
def _kernels_written_to(writer):
    """Tells the writer of the kernels of ours that this thread launches."""
    thread = threading.get_ident()

    def launch_of(backend):
        launch: Callable[..., Any] = LAUNCH.__get__(backend)
        is_ours = threading.get_ident() == thread
        return functools.partial(writer.kernel, launch) if is_ours else launch

    Backend.launch = property(launch_of)
    try:
        yield
    finally:
        Backend.launch = LAUNCH


_one_recording = threading.Lock()


def _number(tensor):
    return tensor.untyped_storage()._cdata


def _tensors(tree):
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written(function, args, kwargs):
    """The tensors that an operation writes to, by its schema."""
    parameters = function._schema.arguments
    given = itertools.chain(
        zip(parameters, args, strict=False),
        ((parameter, kwargs.get(parameter.name)) for parameter in parameters),
    )
    for parameter, value in given:
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            yield from _tensors(value)
