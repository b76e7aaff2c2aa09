"""Successive halving: all rivals on the first prompt, the better half on the next, and so on."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

Rival = TypeVar("Rival")
Prompt = TypeVar("Prompt")


def halve(
    rivals: Sequence[Rival], prompts: Sequence[Prompt], score: Callable[[Rival, Prompt], float]
) -> Rival:
    """The rival with the best mean score, over all prompts where as many lasted so long.

    Args:
        rivals: at least one; of equal ones the first wins.
        prompts: at least one.
        score: the larger, the better; asked once for each rival and prompt that come together.
    """
    scores: dict[int, list[float]] = {place: [] for place in range(len(rivals))}
    for turn, prompt in enumerate(prompts):
        if len(scores) == 1:
            break
        for place, own in scores.items():
            own.append(score(rivals[place], prompt))
        best = sorted(scores, key=lambda place: -statistics.fmean(scores[place]))
        kept = 1 if turn == len(prompts) - 1 else math.ceil(len(best) / 2)
        scores = {place: scores[place] for place in best[:kept]}
    return rivals[next(iter(scores))]
