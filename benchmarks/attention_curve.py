"""Sparse attention over the keep fraction and over the tokens, against dense and the ideal."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import torch

from benchmarks.attention_ops import sparse
from benchmarks.case_tensors import CaseTensors
from benchmarks.cases import CASES, Case
from benchmarks.kernel_runs import COLUMNS as COLUMNS
from benchmarks.kernel_runs import at_most, measure, settings_from
from benchmarks.kernel_work import Settings
from benchmarks.run import Run

KEEP_FRACTIONS = (0.02, 0.05, 0.07, 0.10, 0.15, 0.20, 0.30, 0.50)
TOKENS = (4352, 8192, 16_384, 32_256, 65_536, 119_056)
TOKENS_KEEP = 0.07
# Heads run one beside the other: a few of a long sequence fill a GPU, and the ratio is the same.
MANY_TOKENS, FEW_HEADS = 40_000, 6


def curve_cases() -> list[tuple[str, Case, tuple[float, ...]]]:
    """The curve's name, the case and the keep fractions to measure on it."""
    base = CASES["hunyuan_720p"]
    of_keep = [("keep", CASES["hunyuan_32k"], KEEP_FRACTIONS), ("keep", base, KEEP_FRACTIONS)]
    of_tokens = [("tokens", base.scaled(tokens=tokens), (TOKENS_KEEP,)) for tokens in TOKENS]
    return [(curve, _few_heads(case), keeps) for curve, case, keeps in of_keep + of_tokens]


def run(args: Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Adds a record per point, of the backend chosen for the tensors unless one is forced."""
    settings = settings_from(args)[0]
    for curve, case, keeps in curve_cases():
        with to.attempt(f"curve over {curve}, {case.name}"):
            tensors = CaseTensors(at_most(case, args.tokens, args.heads), device, dtype)
            for keep in keeps:
                with to.attempt(f"curve over {curve}, {case.name}, keep {keep}"):
                    point(curve, tensors, replace(settings, density=keep), args.backend, to)
    if args.figure is not None:
        with to.attempt("figure"):  # matplotlib may be missing where only kernels are measured
            from benchmarks import curve_figure
            from benchmarks.figures import save_figure

            save_figure(curve_figure.draw(to.records), args.figure)


def point(
    curve: str, tensors: CaseTensors, settings: Settings, backend: str | None, to: Run
) -> None:
    """Measures one point."""
    work = sparse(tensors, settings)
    chosen = work.operation.choose(*work.inputs, backend=backend)
    record = measure("attention_curve", work, tensors, chosen.backend.name)
    to.add(record | {"curve": curve})
    print(
        f"{record['case']:28s} keep {settings.density:.2f} {record['latency_ms']:9.3f} ms  "
        f"{record['speedup']:.2f}x of {record['ideal']:.1f}x",
        flush=True,
    )


def _few_heads(case: Case) -> Case:
    return case.scaled(heads=FEW_HEADS) if case.tokens > MANY_TOKENS else case
