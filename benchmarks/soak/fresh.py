"""The plain reference of a run in a process of its own: ``python -m benchmarks.soak.fresh``."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.soak.choices import Script, choose
from benchmarks.soak.player import Outcome, Player
from benchmarks.soak.settled import settled
from benchmarks.soak.subjects import Place

ROOT = Path(__file__).parents[2]


def reference(script: Script, place: Place) -> list[Outcome]:
    """What the calls of a run give on a fresh pipeline."""
    return Player(script, place, place.make(script.family), plain=True).play()


def in_a_fresh_process(script: Script, place: Place) -> list[Outcome]:
    """The `reference`, computed by a process that did nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcomes.pt"
        found = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        words = [script.seed, script.number, place.device, str(place.dtype).split(".")[1], file]
        subprocess.run(
            [sys.executable, "-m", "benchmarks.soak.fresh", *map(str, words), script.family],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, found)])},
            check=True,
        )
        outcomes: list[Outcome] = torch.load(file, weights_only=False)
    return outcomes


def main(words: Sequence[str]) -> None:
    """What the process does: its words are those that `in_a_fresh_process` gives it."""
    seed, number, device, dtype, file, family = words
    place = Place(torch.device(device), getattr(torch, dtype))
    with settled(place.device):
        torch.save(reference(choose(int(seed), int(number), family), place), file)


if __name__ == "__main__":
    main(sys.argv[1:])
