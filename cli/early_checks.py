"""Simple mistakes are refused before a command imports torch, which takes seconds."""

from __future__ import annotations

import functools
from collections.abc import Callable

from chipsparse.cli.errors import reported_errors
from chipsparse.cli.option_checks import check_values


def checked_early(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose options are checked by their names before anything of it runs."""

    @functools.wraps(command)
    def run(**options: object) -> None:
        with reported_errors(debug=bool(options.get("debug", False))):
            check_values(options)
        command(**options)

    return run
