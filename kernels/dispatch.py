"""One way into every operation: its arguments are checked, a backend is chosen, and it runs.

An `Operation` is called like a function. Its arguments become one record, a `Call`, which names and
documents them once, checks them, and goes to the backend as it is. Calls of one kind differ in the
values of their tensors alone: the first is checked and decides about the backend of all.
Backends are chosen by the facts of a call: the few of its arguments that decide, a tensor first.
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from chipsparse.kernels.kinds import kind_of, known_of
from chipsparse.kernels.triton_support import (
    hopper_unsupported_reason,
    not_auto_reason,
    triton_unsupported_reason,
)

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@dataclass(slots=True, eq=False)
class Call(Generic[R_co]):
    """The arguments of one call of an operation whose result is an R; each has a record of its own.

    A field with ``compare=False`` decides neither about checks and backends nor about launches.

    Attributes:
        backend: forces one of those that the operation has (``gluon`` on Hopper, ``triton``,
            ``reference``); None takes the first that can run.
    """

    backend: str | None = field(default=None, kw_only=True)
    _known: dict[Any, Any] | None = field(default=None, init=False, repr=False, compare=False)

    def check(self) -> None:
        """Raises ``ValueError`` of what does not fit; the operation puts its name before it."""
        raise NotImplementedError

    @classmethod
    @functools.cache
    def _deciding(cls) -> Callable[[Any], tuple[Any, ...]]:
        return operator.attrgetter(*(item.name for item in fields(cls) if item.compare))

    def known(self) -> dict[Any, Any]:
        """Facts about calls of this kind, and a place for more; the record stays as it is."""
        if self._known is None:
            traced = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
            try:
                kind = None if traced else kind_of(*self._deciding()(self))
            except RuntimeError:  # a tensor has no memory, as under the transforms of `torch.func`
                kind = None
            self._known = {} if kind is None else known_of((type(self), kind))
        return self._known


# Given the facts of a call, the reason why a backend does not take it, or None.
Reason = Callable[..., str | None]


def runs_anywhere(*_: object) -> None:
    """The ``unsupported_reason`` of the references, which take whatever the operation accepts."""


@dataclass(frozen=True, eq=False)
class Backend:
    """One implementation of an operation."""

    name: str  # the word by which a caller forces it
    load: Callable[[], Callable[..., Any]]  # imports what computes it from a checked `Call`
    unsupported_reason: Reason = runs_anywhere  # why it cannot run
    not_auto_reason: Reason | None = None  # why it is not chosen although it could run

    @functools.cached_property
    def launch(self) -> Callable[..., Any]:
        """Computes the operation from a checked `Call`; imported once."""
        return self.load()


@functools.cache
def imported(module: str, name: str) -> Callable[[], Callable[..., Any]]:
    """Loads the function of that name where it first runs: Triton may be missing."""
    return lambda: getattr(importlib.import_module(module), name)


def first_reason(*reasons: Reason) -> Reason:
    """Return the function that gives the first of several reasons, or None where there is none."""

    def reason(*facts: Any) -> str | None:
        return next((text for check in reasons if (text := check(*facts)) is not None), None)

    return reason


def gluon(module: str, function: str, *reasons: Reason, not_auto: Reason | None = None) -> Backend:
    """Return the backend of a Gluon kernel for Hopper GPUs, launched by a function of a module.

    The ``reasons`` speak against tensors that are on such a GPU. The module's ``compile_one``
    compiles one of its kernels, for releases of Triton that nobody has tried.
    """

    def not_on_hopper(tensor: torch.Tensor, *_: object) -> str | None:
        return gluon_unsupported_reason(module, tensor.device)

    reason = first_reason(not_on_hopper, *reasons)
    return Backend("gluon", imported(module, function), reason, not_auto)


def gluon_unsupported_reason(module: str, device: torch.device) -> str | None:
    """Return why a module's Gluon kernels cannot run on a device, or None."""
    if (reason := hopper_unsupported_reason(device)) is not None:
        return reason
    from chipsparse.kernels import gluon_compat  # here, because Triton may be missing

    return gluon_compat.not_compiled_reason(device, imported(module, "compile_one"))


def triton_or_reference(
    package: str,
    function: str,
    *reasons: Reason,
    triton_package: str | None = None,
) -> tuple[Backend, Backend]:
    """Return the backends of most operations: a Triton kernel and the definition.

    The function has one name in the package's ``triton_kernel`` and ``reference``. The ``reasons``
    speak against tensors on a device that runs Triton. A ``triton_package`` is one whose kernel
    computes this operation, too.
    """
    triton = imported(f"{triton_package or package}.triton_kernel", function)
    reason = first_reason(triton_unsupported_reason, *reasons)
    return (
        Backend("triton", triton, reason, not_auto_reason),
        Backend("reference", imported(f"{package}.reference", function)),
    )


@dataclass(frozen=True)
class Choice:
    """The backend that runs, and ``(name, reason)`` of the ones rejected before it."""

    backend: Backend
    rejected: tuple[tuple[str, str], ...]


class Operation(Generic[P, R]):
    """An operation with its backends, called with the arguments of its record.

    Args:
        name: its name in messages.
        record: the `Call` that holds the arguments; its documentation is the operation's.
        facts: gives of such a record the arguments of `choose`.
        backends: fastest first.
    """

    def __init__(
        self,
        name: str,
        record: Callable[P, Call[R]],
        facts: Callable[[Any], tuple[Any, ...]],
        *backends: Backend,
    ) -> None:
        functools.update_wrapper(self, record, updated=())
        self.__name__ = name
        self.backends = backends
        self._record = record
        self._facts = facts

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the operation on the arguments of its record.

        Raises:
            ValueError: an argument does not fit, or the backend asked for cannot run.
        """
        return self.run(self._record(*args, **kwargs))

    def run(self, call: Call[R]) -> R:
        """Runs the call; the first of its kind is checked, and its backend chosen for all."""
        known = call.known()
        backend = known.get(self.backends)
        if backend is None:
            try:
                call.check()
            except ValueError as error:
                raise ValueError(f"{self.__name__}: {error}") from None
            backend = self.choose(*self._facts(call), backend=call.backend).backend
            known[self.backends] = backend
        result: R = backend.launch(call)
        return result

    def choose(self, *facts: Any, backend: str | None = None) -> Choice:
        """The first backend that can run on calls with these facts, or exactly the one asked for.

        Raises:
            ValueError: the backend asked for is unknown or cannot run, or none can.
        """
        if backend is not None:
            named = {candidate.name: candidate for candidate in self.backends}
            if backend not in named:
                allowed = ", ".join(named)
                raise ValueError(f"{self.__name__}: unknown backend {backend!r}; it has {allowed}")
            reason = named[backend].unsupported_reason(*facts)
            if reason is not None:
                raise ValueError(f"{self.__name__}: backend {backend!r} cannot run here: {reason}")
            return Choice(named[backend], ())
        rejected: list[tuple[str, str]] = []
        for candidate in self.backends:
            reason = candidate.unsupported_reason(*facts)
            if reason is None and candidate.not_auto_reason is not None:
                reason = candidate.not_auto_reason(*facts)
            if reason is None:
                return Choice(candidate, tuple(rejected))
            rejected.append((candidate.name, reason))
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected)
        raise ValueError(f"{self.__name__}: no backend can run here ({reasons})")
