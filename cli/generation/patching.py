"""A patched pipeline for as long as a command needs it; its errors are the user's to put right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import chipsparse
from chipsparse.cli.errors import user_errors
from chipsparse.config import ConfigError, SparsityConfig
from chipsparse.parallel.degrees import Parallel
from chipsparse.profiles.profile import Profile
from chipsparse.report.generation import GenerationReport

# Every step in full, over nothing that could be cut in fewer pieces than there are tokens.
IN_FULL = SparsityConfig().override(
    {"attention.enabled": False, "mlp.enabled": False, "schedule.actions": ["dense"], "tile": None}
)


@contextmanager
def patched(
    pipe: Any,
    config: SparsityConfig | Profile,
    *,
    strict: bool = False,
    layer_times: bool = False,
    parallel: Parallel | None = None,
) -> Iterator[GenerationReport]:
    """Patches the pipeline and gives its report; restores it at the end."""
    with user_errors(ValueError):
        handle = chipsparse.enable(
            pipe, config, strict=strict, layer_times=layer_times, parallel=parallel
        )
    with handle, user_errors(ConfigError):
        yield handle.report


def stock(pipe: Any, parallel: Parallel | None) -> AbstractContextManager[object]:
    """The stock pipeline: as it is, or computed in full by several processes together."""
    return nullcontext() if parallel is None else patched(pipe, IN_FULL, parallel=parallel)
