"""Lets the backends of an operation do something else for a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from chipsparse.kernels.dispatch import Backend, Operation

Launch = Callable[..., Any]  # of a backend


def wrap_backends(
    patch: pytest.MonkeyPatch, operation: Operation[..., Any], around: Callable[[Launch, Any], Any]
) -> None:
    """Lets every backend of an operation run as ``around(launch, call)``."""

    def wrapped(backend: Backend) -> Backend:
        return replace(backend, load=lambda: partial(around, backend.launch))

    patch.setattr(operation, "backends", tuple(map(wrapped, operation.backends)))
