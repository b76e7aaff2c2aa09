"""What `tuned` compares: profiles that `chipsparse tune` wrote, and one budget for all layers.

The single budgets are what a user would try by hand: the schedule of the model's profile with more
or fewer skipped steps, and one share of columns and one of neurons everywhere.
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

# Shares of columns and of neurons.
BUDGETS = ((0.05, 0.1), (0.1, 0.2), (0.2, 0.3), (0.3, 0.5), (0.5, 0.5))


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
            Row(
                ONE_BUDGET,
                setting(attention, mlp, skips),
                single(base, steps, attention, mlp, skips),
            )
            for skips, (attention, mlp) in itertools.product(SKIPS, BUDGETS)
        ),
        *(Row(TUNED, path.stem, load_profile(path).sparsity) for path in profiles),
    ]


def setting(attention: float, mlp: float, skips: int) -> str:
    """What a single budget is called."""
    return f"{attention:.0%} and {mlp:.0%}, {skips} skipped in a row"


def single(
    base: SparsityConfig, steps: int, attention: float, mlp: float, skips: int
) -> SparsityConfig:
    """The profile's kind of schedule with one share of columns and one of neurons everywhere."""
    return scheduled(base, steps, skips).override(
        {
            "attention.keep_fraction": attention,
            "mlp.keep_fraction": mlp,
            "schedule.first_dense_layers": 0,
            "layers": (),
        }
    )
