"""``python -m benchmarks --op soak``: plays run after run, counts, says how to repeat a failure.

What it needs of diffusers is imported when it runs: kernels are measured without.
"""

from __future__ import annotations

import argparse
import itertools
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from benchmarks.records import Record, environment, table
from benchmarks.run import Run

if TYPE_CHECKING:
    from benchmarks.soak.choices import Script
    from benchmarks.soak.runner import Findings, Soak
    from benchmarks.soak.subjects import Place
    from tests.graph_stand_in import TapeRecorder

TABLE = {
    "change": "s",
    "runs": "d",
    "generations": "d",
    "times": "d",
    "differences": "d",
    "leaks": "d",
    "seconds": ".0f",
}
# A process of its own takes seconds, so one run in so many is compared with one.
RUNS_PER_PROCESS = 40
# One in so many is played twice in a row: what the second one leaves grows with every run.
RUNS_PER_REPEAT = 6
# What a run that is killed leaves of its record is so old at most.
RUNS_PER_SAVE = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the soak."""
    group = parser.add_argument_group("soak")
    group.add_argument("--generations", type=int, default=200, help="at least so many in all")
    group.add_argument("--seed", type=int, default=0, help="all that happens follows from it")
    group.add_argument(
        "--only", type=int, nargs="+", default=[], metavar="N", help="the runs of these numbers"
    )


def run(args: argparse.Namespace, device: torch.device, dtype: torch.dtype, output: Run) -> None:
    """Makes as many generations as asked for, or the runs that are named alone: one record."""
    from benchmarks.soak.runner import Soak
    from benchmarks.soak.settled import settled
    from benchmarks.soak.subjects import SHARES, Place

    place, count = Place(device, dtype), Count()
    started = time.perf_counter()

    def record() -> Record:
        return {
            "op": "soak",
            "seed": args.seed,
            "dtype": str(dtype).removeprefix("torch."),
            **count.to_dict(),
            "replayed_calls": soak.replayed,
            "broken_off_generations": soak.struck,
            "seconds": time.perf_counter() - started,
            **environment(device),
        }

    with settled(device):
        soak = Soak(place, _recorder(device))
        if not args.only:
            soak.prepare(SHARES)
        for script, is_repeated in _scripts(args):
            if not args.only and count.generations >= args.generations:
                break
            in_process = bool(args.only) or (count.runs + 1) % RUNS_PER_PROCESS == 0
            found = _tried(soak, script, in_process)
            count.add(script, found, in_process)
            if found:
                print("\n".join(failure(script, found, place)), flush=True)
            elif is_repeated:
                soak.memory.repeated()
            if count.runs % RUNS_PER_SAVE == 0:
                output.save([record()])
        for steady in soak.memory.growth():
            print(f"LEAK {steady}", flush=True)
            count.leaks["all"] += 1
    output.add(made := record())
    print(table(rows(made), TABLE))
    if made["differences"] or made["leaks"]:
        output.failed.append(f"soak: {made['differences']} differences, {made['leaks']} leaks")


def _scripts(args: argparse.Namespace) -> Iterator[tuple[Script, bool]]:
    """The runs in order, and whether each is the one before it once more."""
    from benchmarks.soak.choices import choose

    for number in args.only or itertools.count(args.first):
        script = choose(args.seed, number)
        yield script, False
        if not args.only and number % RUNS_PER_REPEAT == RUNS_PER_REPEAT - 1:
            yield script, True


class Count:
    """What was made and found so far: in all, and in runs with each kind of change."""

    def __init__(self) -> None:
        self.runs = self.generations = self.processes = 0
        self.failed: list[int] = []
        self.leaks, self._differences = Counter[str](), Counter[str]()
        self._runs, self._made, self._times = Counter[str](), Counter[str](), Counter[str]()

    def add(self, script: Script, found: Findings, in_process: bool) -> None:
        """Counts a run, which may also have been compared with a process of its own."""
        self.runs += 1
        self.generations += len(script.calls)
        self.processes += in_process
        if found:
            self.failed.append(script.number)
        kinds = script.kinds()
        self._times += kinds
        for name in ("all", *kinds):
            self._runs[name] += 1
            self._made[name] += len(script.calls)
            self._differences[name] += len(found.differences)
            self.leaks[name] += len(found.leaks)

    def to_dict(self) -> Record:
        """As the fields of a record."""
        return {
            "runs": self.runs,
            "generations": self.generations,
            "fresh_pipelines": self.runs,
            "fresh_processes": self.processes,
            "failed_runs": self.failed,
            "differences": self._differences["all"],
            "leaks": self.leaks["all"],
            "changes": [
                {
                    "change": name,
                    "runs": self._runs[name],
                    "generations": self._made[name],
                    "times": times,
                    "differences": self._differences[name],
                    "leaks": self.leaks[name],
                }
                for name, times in sorted(self._times.items(), key=lambda item: item[0].lower())
            ],
        }


def rows(record: Record) -> list[Record]:
    """A record as lines of a table: all runs, then those with each kind of change."""
    times = sum(change["times"] for change in record["changes"])
    return [{**record, "change": "all", "times": times}, *record["changes"]]


def failure(script: Script, found: Findings, place: Place) -> list[str]:
    """What a run did, what was wrong, and how to see it again."""
    return [
        f"FAILED run {script.number}",
        *(f"    {line}" for line in script.lines()),
        *(f"  DIFFERENCE {problem}" for problem in found.differences),
        *(f"  LEAK {problem}" for problem in found.leaks),
        f"  again: python -m benchmarks --op soak --device {place.device} "
        f"--seed {script.seed} --only {script.number}",
    ]


def _tried(soak: Soak, script: Script, in_process: bool) -> Findings:
    from benchmarks.soak.runner import Findings

    try:
        return soak.run(script, in_process=in_process)
    except Exception as error:
        traceback.print_exc()
        return Findings([f"the run broke off: {type(error).__name__}: {error}"])


def _recorder(device: torch.device) -> TapeRecorder | None:
    """What stands in for CUDA graphs, on a CPU."""
    if device.type == "cuda":
        return None
    from tests.graph_stand_in import TapeRecorder

    return TapeRecorder()
