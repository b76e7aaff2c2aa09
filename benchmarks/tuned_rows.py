"""What `tuned` compares: profiles that `chipsparse tune` wrote, and one budget for all layers.

The single budgets are what a user would try by hand: the schedule of the model's profile with more
or fewer skipped steps, and one share of columns and one of neurons everywhere, under the delta rule
that is better for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peer_rows import SKIPS, Row, scheduled
from benchmarks.peers_table import DENSE
from benchmarks.tuned_table import ONE_BUDGET, TUNED
from chipsparse.config import SparsityConfig
from chipsparse.profiles import load_profile

Budget = tuple[float, float, str]

# Shares of columns and of neurons, and the delta rule that is the better one for so many columns.
BUDGETS = (
    (0.05, 0.1, "merge"),
    (0.1, 0.2, "merge"),
    (0.3, 0.5, "difference"),
    (0.5, 0.5, "difference"),
)


def rows(base: SparsityConfig, steps: int, profiles: Sequence[Path]) -> list[Row]:
    """All of them; the first is dense.

    Args:
        base: the model's profile.
        steps: denoising steps that the profiles were tuned for.
        profiles: files that were tuned for this model.
    """
    return [
        Row(DENSE, "again"),
        *(
            Row(ONE_BUDGET, setting(budget, skips), single(base, steps, budget, skips))
            for skips, budget in itertools.product(SKIPS, BUDGETS)
        ),
        *(Row(TUNED, path.stem, load_profile(path).sparsity) for path in profiles),
    ]


def setting(budget: Budget, skips: int) -> str:
    """What a single budget is called."""
    attention, mlp, rule = budget
    return f"{attention:.0%} and {mlp:.0%}, {rule}, {skips} skipped in a row"


def single(base: SparsityConfig, steps: int, budget: Budget, skips: int) -> SparsityConfig:
    """The profile's kind of schedule with one share of columns and one of neurons everywhere."""
    attention, mlp, rule = budget
    return scheduled(base, steps, skips).override(
        {
            "attention.keep_fraction": attention,
            "attention.delta_rule": rule,
            "mlp.keep_fraction": mlp,
            "schedule.first_dense_layers": 0,
            "layers": (),
        }
    )
