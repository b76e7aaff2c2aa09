"""The schedules that tuning chooses from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from chipsparse.config import SparsityConfig

WARM_UP_SHARES = (0.06, 0.1, 0.13, 0.16, 0.2, 0.24)
FINAL_SHARES = (0.0, 0.03, 0.06)
REFRESH_GAPS = (3, 5, 8, 12, 16)
GAP_GROWTHS = (1.0, 1.5)
# So many steps are skipped between two that are computed; all of them is one choice, too.
SKIPS = (0, 1, 2, 3, math.inf)

# What a candidate replaces of the schedule that it starts from.
PLAIN: dict[str, Any] = {
    "schedule.actions": None,
    "schedule.dense_steps": (),
    "schedule.skip_threshold": None,
    "schedule.first_dense_layers": 0,
}


def schedules(base: SparsityConfig, steps: int) -> Iterator[SparsityConfig]:
    """Configs that differ from each other in their schedules; the base's own is the first.

    Args:
        base: what they have in common.
        steps: of the generation.
    """
    seen = set()
    own = base.override({"schedule.skip_threshold": None, "schedule.first_dense_layers": 0})
    for config in itertools.chain([own], _grid(base, steps)):
        if config not in seen:
            seen.add(config)
            yield config


def _grid(base: SparsityConfig, steps: int) -> Iterator[SparsityConfig]:
    for warm_up, final, refreshes, skipped in dict.fromkeys(_patterns(steps)):
        between = set(range(warm_up, steps - final)) - {*refreshes, *skipped}
        if not between and not skipped:
            continue
        yield base.override(
            {
                **PLAIN,
                "schedule.warmup_steps": warm_up,
                "schedule.final_dense_steps": final,
                "schedule.refresh_steps": refreshes,
                "schedule.skip_steps": skipped,
                # Without a sparse step there is nothing to record for.
                "attention.enabled": base.attention.enabled and bool(between),
                "mlp.enabled": base.mlp.enabled and bool(between),
            }
        )


def _patterns(steps: int) -> Iterator[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    """Steps of the warm-up and at the end, those of refreshes, and those that are skipped."""
    warm_ups = sorted({max(2, round(share * steps)) for share in WARM_UP_SHARES})
    finals = sorted({math.ceil(share * steps) for share in FINAL_SHARES})
    for warm_up, final, gap, growth, skips in itertools.product(
        warm_ups, finals, REFRESH_GAPS, GAP_GROWTHS, SKIPS
    ):
        refreshes = _refreshes(warm_up, steps - final, gap, growth)
        for first in [warm_up] if skips == 0 else [warm_up, max(warm_up, steps // 2)]:
            skipped = _skipped(first, steps - final, {warm_up - 1, *refreshes}, skips)
            yield warm_up, final, tuple(refreshes), tuple(skipped)


def _refreshes(warm_up: int, end: int, gap: float, growth: float) -> list[int]:
    """Refreshes behind the warm-up, at constant or growing distances."""
    steps, at = [], warm_up - 1 + gap
    while round(at) < end:
        steps.append(round(at))
        gap *= growth
        at += gap
    return steps


def _skipped(first: int, end: int, refreshes: set[int], skips: float) -> list[int]:
    """So many steps in a row behind each one that is computed."""
    skipped: list[int] = []
    behind = 0  # steps skipped since one was computed
    for step in range(first, end):
        if step in refreshes or behind >= skips:
            behind = 0
        else:
            skipped.append(step)
            behind += 1
    return skipped
