"""Chooses the backend of an operation for given tensors, and says why the others were passed over.

An operation lists its backends fastest first. Nothing is remembered between calls: whoever runs an
operation many times on tensors of one kind (see `kind_of`) asks its ``select`` once, reports the
`Choice`, and hands it to the operation, which then looks at nothing again.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Backend:
    """One implementation of an operation.

    Attributes:
        name: how a caller forces it.
        launch: computes the operation from checked arguments.
        why_not: given the operation's tensors (and what else decides), why it cannot run, or None.
        why_not_unasked: likewise, the reason it is not chosen although it could run.
    """

    name: str
    launch: Callable[..., Any]
    why_not: Callable[..., str | None]
    why_not_unasked: Callable[..., str | None] = lambda *_: None


@dataclass(frozen=True)
class Choice:
    """The backend that runs, and ``(name, reason)`` of the ones passed over for it."""

    backend: Backend
    skipped: tuple[tuple[str, str], ...]


def runs_anywhere(*_: object) -> None:
    """The ``why_not`` of the references, which take whatever the operation accepts."""


def imported(module: str, name: str) -> Callable[..., Any]:
    """The function of that name, its module imported at the first call: Triton may be missing."""

    @functools.cache
    def function() -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return found

    def call(*args: Any, **kwargs: Any) -> Any:
        return function()(*args, **kwargs)

    return call


def kind_of(*tensors: torch.Tensor | None) -> tuple[object, ...]:
    """All that decides about backends: tensors of one kind differ in their values alone."""
    kind: list[object] = []
    for tensor in tensors:
        if tensor is None:
            kind.append(None)
        else:
            kind += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            kind.append(tensor.data_ptr() % 16)
    return tuple(kind)


def choose(
    op: str, backends: Sequence[Backend], *arguments: Any, force: str | None = None
) -> Choice:
    """Returns the first backend that can run on the arguments, or exactly the forced one.

    Raises:
        ValueError: the forced backend is unknown or cannot run, or none can.
    """
    if force is not None:
        named = {backend.name: backend for backend in backends}
        if force not in named:
            allowed = ", ".join(named)
            raise ValueError(f"{op}: unknown backend {force!r}; it has {allowed}")
        reason = named[force].why_not(*arguments)
        if reason is not None:
            raise ValueError(f"{op}: backend {force!r} cannot run here: {reason}")
        return Choice(named[force], ())
    skipped: list[tuple[str, str]] = []
    for backend in backends:
        reason = backend.why_not(*arguments) or backend.why_not_unasked(*arguments)
        if reason is None:
            return Choice(backend, tuple(skipped))
        skipped.append((backend.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped)
    raise ValueError(f"{op}: no backend can run here ({reasons})")
