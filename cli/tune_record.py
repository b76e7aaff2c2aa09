"""What a search of `chipsparse tune` predicted and chose, kept for the page of `report`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chipsparse.cache_kinds import PARTS
from chipsparse.cli.tune_lab import config_digest
from chipsparse.plan import SparsityPlan
from chipsparse.tuned_range import TunedTarget
from chipsparse.tuning.allocation import Candidate
from chipsparse.tuning.results_file import ResultsFile


class SearchRecord:
    """The record of one search in the results file; there from the prediction on.

    Args:
        results: where it is kept.
        target: what is searched for; a later search for the same one takes its place.
        candidates: the frontier, from the fastest to the most accurate.
        dense_seconds: what a dense generation is predicted to take.
        held_out: names of the prompts that verify.
    """

    def __init__(
        self,
        results: ResultsFile,
        target: TunedTarget,
        candidates: Sequence[Candidate],
        dense_seconds: float,
        held_out: Sequence[str],
    ) -> None:
        values = {name: value for name, value in vars(target).items() if value is not None}
        self._results = results
        self._name = ", ".join(f"{name} {value:g}" for name, value in values.items())
        self._content: dict[str, Any] = {
            "target": values,
            "dense_seconds": dense_seconds,
            "held_out": list(held_out),
            "candidates": [
                {
                    "config": config_digest(each.config),
                    "psnr_db": each.psnr_db,
                    "seconds": each.seconds,
                }
                for each in candidates
            ],
            "chosen": None,
        }
        if results.search(self._name) is None:
            results.keep_search(self._name, self._content)

    def choose(self, plan: SparsityPlan) -> None:
        """Adds what was chosen: the action of every step, and the share that every layer keeps."""
        chosen: dict[str, Any] = {
            "config": config_digest(plan.config),
            "actions": [action.value for action in plan.actions()],
        }
        for part in PARTS:
            layers = range(plan.layout.layers)
            chosen[part] = [plan.keep_fraction(layer, part) for layer in layers]
        self._results.keep_search(self._name, {**self._content, "chosen": chosen})
