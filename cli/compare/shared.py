"""Whether several processes can share what `compare` is to make of two configs."""

from __future__ import annotations

from chipsparse.cli.commands.compare import CompareOptions
from chipsparse.cli.compare.configs import profiles_of
from chipsparse.cli.planning.request import look_up
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.cli.ranks.several import check_shared
from chipsparse.parallel.degrees import Parallel


def check(options: CompareOptions, parallel: Parallel, display: ProgressDisplay) -> None:
    """Raises `UserError` where so many processes cannot share it; loads no weight."""
    model = look_up(options, display)
    for profile in profiles_of(options, model).values():
        if profile is not None:
            check_shared(options, model, profile, parallel)
