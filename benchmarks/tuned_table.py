"""Tuned profiles beside the best that one budget for all layers reaches at the same quality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.records import Record

OP = "tuned"
ONE_BUDGET, TUNED = "one budget", "tuned"


@dataclass(frozen=True)
class Pairing:
    """A tuned profile and what it is to beat.

    Attributes:
        tuned: summary of its clips.
        single: summary of the single budget that does least work among those whose worst clip is no
            further from dense; None where none is that close.
        closest: summary of the single budget with the best worst clip.
    """

    tuned: Record
    single: Record | None
    closest: Record


def pairings(summaries: Sequence[Record]) -> list[Pairing]:
    """One for every tuned profile, by model, from the least work on.

    Args:
        summaries: of `benchmarks.peers_table.summaries`.
    """
    made = []
    for tuned in sorted(summaries, key=lambda each: (each["model"], each.get("work", 0.0))):
        if tuned["method"] != TUNED:
            continue
        singles = [
            each
            for each in summaries
            if each["method"] == ONE_BUDGET
            and all(each[name] == tuned[name] for name in ("model", "steps", "frames", "prompts"))
        ]
        as_close = [each for each in singles if each["psnr_min"] >= tuned["psnr_min"]]
        made.append(
            Pairing(
                tuned,
                min(as_close, key=lambda each: each["work"], default=None),
                max(singles, key=lambda each: each["psnr_min"]),
            )
        )
    return made
