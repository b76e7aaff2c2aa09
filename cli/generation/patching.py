"""A patched pipeline for as long as a command needs it; its errors are the user's to put right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import chipsparse
from chipsparse.cli.errors import UserError, first_line
from chipsparse.config import ConfigError, SparsityConfig
from chipsparse.pipelines.generic import UnservedModelError
from chipsparse.profiles.profile import Profile
from chipsparse.report.generation import GenerationReport


@contextmanager
def patched(
    pipe: Any, config: SparsityConfig | Profile, *, strict: bool = False, layer_times: bool = False
) -> Iterator[GenerationReport]:
    """Patches the pipeline and gives its report; restores it at the end."""
    try:
        handle = chipsparse.enable(pipe, config, strict=strict, layer_times=layer_times)
    except ValueError as error:
        raise UserError(first_line(error)) from error
    with handle, user_errors():
        yield handle.report


@contextmanager
def user_errors() -> Iterator[None]:
    """What the first call of a patched pipeline refuses is the user's to put right."""
    try:
        yield
    except (ConfigError, UnservedModelError) as error:
        raise UserError(str(error)) from error
