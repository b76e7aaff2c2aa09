"""How far the bounds of the regression tests are from right and from faulty results.

``python -m tests.regression.margins [NAME ...]`` compares the named cases (by default all), made
here, with dense and with the golden files; ``--faults`` puts every fault into them as well, and
``--dtype bfloat16`` makes them in another dtype. Results:
``benchmarks/notes/regression.md``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest
import torch

from tests.regression.cases import CASES, Case
from tests.regression.check import Closeness, closeness
from tests.regression.faults import FAULTS
from tests.regression.golden import read
from tests.regression.runs import Runs

HEADER = """\
| case | what | PSNR | SSIM | flicker | golden | golden dense |
| --- | --- | --- | --- | --- | --- | --- |"""


def row(case: Case, what: str, found: Closeness) -> str:
    """One line of the table."""
    flicker = "" if found.flicker is None else f"{found.flicker:.3f}"
    cells = (
        case.name,
        what,
        f"{found.psnr:.1f}",
        f"{found.ssim:.4f}",
        flicker,
        f"{found.golden:.1f}",
        f"{found.golden_dense:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def rows(case: Case, runs: Runs, *, faults: bool) -> Iterator[str]:
    """The line of the right result, and those of all faults where asked for."""
    dense, golden = runs.dense(case).frames, read(case)
    yield row(case, "right", closeness(dense, runs.sparse(case).frames, golden))
    for fault in FAULTS if faults else ():
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            faulty = runs.generate(case, runs.config(case))
        yield row(case, fault.__name__, closeness(dense, faulty.frames, golden))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument("--faults", action="store_true", help="also every fault in each of them")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(CASES):
        parser.error(f"unknown cases {', '.join(sorted(unknown))}")
    runs = Runs(torch.device("cpu"), getattr(torch, arguments.dtype))
    print(HEADER, flush=True)
    for name in arguments.names or CASES:
        for line in rows(CASES[name], runs, faults=arguments.faults):
            print(line, flush=True)


if __name__ == "__main__":
    main()
