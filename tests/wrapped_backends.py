"""Lets the backends of an operation do something else for a test."""

from dataclasses import replace
from functools import partial


def wrap_backends(patch, operation, around):
    """Lets every backend of an operation run as ``around(launch, call)``."""

    def wrapped(backend):
        return replace(backend, load=lambda: partial(around, backend.launch))

    patch.setattr(operation, "backends", tuple(map(wrapped, operation.backends)))
