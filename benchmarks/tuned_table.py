"""Tuned profiles beside the best that one budget for all layers reaches at the same quality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.records import Record

OP = "tuned"
ONE_BUDGET, TUNED = "one budget", "tuned"


# What "as close to dense" is told by: the median PSNR of the clips, and that of the worst one.
CRITERIA = ("psnr_median", "psnr_min")


@dataclass(frozen=True)
class Pairing:
    """A tuned profile and what it is to beat.

    Attributes:
        tuned: summary of its clips.
        criterion: one of `CRITERIA`.
        single: summary of the single budget that does least work among those that are as close to
            dense; None where none is.
        closest: summary of the single budget that is closest.
    """

    tuned: Record
    criterion: str
    single: Record | None
    closest: Record


def pairings(summaries: Sequence[Record]) -> list[Pairing]:
    """Two for every tuned profile, by model, from the least work on.

    Args:
        summaries: of `benchmarks.peers_table.summaries`.
    """
    in_order = sorted(summaries, key=lambda each: (each["model"], each.get("work", 0.0)))
    return [
        _pairing(tuned, criterion, summaries)
        for tuned in in_order
        if tuned["method"] == TUNED
        for criterion in CRITERIA
    ]


def _pairing(tuned: Record, criterion: str, summaries: Sequence[Record]) -> Pairing:
    singles = [
        each
        for each in summaries
        if each["method"] == ONE_BUDGET
        and all(each[name] == tuned[name] for name in ("model", "steps", "frames", "prompts"))
    ]
    as_close = [each for each in singles if each[criterion] >= tuned[criterion]]
    return Pairing(
        tuned,
        criterion,
        min(as_close, key=lambda each: each["work"], default=None),
        max(singles, key=lambda each: each[criterion]),
    )
