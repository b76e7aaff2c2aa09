"""How far the bounds of the regression tests are from right and from faulty results.

``python -m tests.regression.margins [NAME ...]`` compares the named cases (by default all), made
here, with dense and with the golden files. ``--noise N`` makes the sparse result N times more with
weights whose last bit is random, as other CPUs round differently; ``--faults`` puts every fault
into the case; ``--dtype bfloat16`` makes it in another dtype. What came out is in
``benchmarks/notes/regression.md``.
"""

from __future__ import annotations

import argparse
import contextlib

import pytest
import torch

from tests.regression.cases import CASES
from tests.regression.check import closeness
from tests.regression.faults import FAULTS
from tests.regression.golden import read
from tests.regression.runs import Runs

ROUNDING = torch.finfo(torch.float32).eps / 2
HEADER = """\
| case | what | PSNR | SSIM | flicker | golden | golden dense |
| --- | --- | --- | --- | --- | --- | --- |"""


def row(case, what, found):
    flicker = "" if found.flicker is None else f"{found.flicker:.3f}"
    of_golden = f"{found.golden:.1f} | {found.golden_dense:.1f}"
    of_dense = f"{found.psnr:.1f} | {found.ssim:.4f} | {flicker}"
    return f"| {case.name} | {what} | {of_dense} | {of_golden} |"


@contextlib.contextmanager
def rounded_otherwise(module, seed):
    """Changes the weights at random by about the rounding of float32, and puts them back."""
    generator = torch.Generator().manual_seed(seed)
    weights = list(module.parameters())
    kept = [weight.data for weight in weights]
    try:
        for weight in weights:
            noise = torch.randn(weight.shape, generator=generator)
            weight.data = weight.data * (1 + ROUNDING * noise)
        yield
    finally:
        for weight, data in zip(weights, kept, strict=True):
            weight.data = data


def rows(case, runs, *, noise, faults):
    """The line of the right result, and those of noisy and faulty ones where asked for."""
    dense = runs.dense(case).frames
    golden = read(case)
    config = runs.config(case)
    yield row(case, "right", closeness(dense, runs.sparse(case).frames, golden))
    for seed in range(noise):
        with rounded_otherwise(runs.model(case.model)[0].transformer, seed):
            noisy = runs.generate(case, config)
        yield row(case, f"noise {seed}", closeness(dense, noisy.frames, golden))
    for fault in FAULTS if faults else ():
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            faulty = runs.generate(case, config)
        yield row(case, fault.__name__, closeness(dense, faulty.frames, golden))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument("--noise", type=int, default=0, metavar="N", help="also N noisy results")
    parser.add_argument("--faults", action="store_true", help="also every fault in each of them")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(CASES):
        parser.error(f"unknown cases {', '.join(sorted(unknown))}")
    runs = Runs(torch.device("cpu"), getattr(torch, arguments.dtype))
    print(HEADER, flush=True)
    for name in arguments.names or CASES:
        for line in rows(CASES[name], runs, noise=arguments.noise, faults=arguments.faults):
            print(line, flush=True)


if __name__ == "__main__":
    main()
