"""FP8 attention on what a model computes: errors by layer and step, then whole clips."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from benchmarks.clips import Workload, asked_for
from benchmarks.probes import probed
from benchmarks.records import Record, environment
from benchmarks.run import Run
from chipsparse import SparsityConfig
from chipsparse.kernels.fp8_dense_attention import fp8_dense_attention
from chipsparse.kernels.fp8_quantization import fp8_quantization
from chipsparse.measure.quality import psnr

ROWS = 256  # of a head, against float64
IN_FP8 = SparsityConfig.dense().override({"attention.precision": "fp8"})
COLUMNS = {
    "case": "",
    "rel_error": ".1e",
    "rel_error_unrotated": ".1e",
    "rel_error_own": ".1e",
    "lse_error": ".1e",
    "psnr": ".2f",
}


def errors(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    *,
    scale: float | None,
) -> dict[str, float]:
    """Relative L2 errors of some rows of all heads against float64: in FP8, and the model's own."""
    rows = torch.linspace(0, query.shape[2] - 1, min(ROWS, query.shape[2])).long().to(query.device)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    exact = torch.empty_like(query[:, :, rows], dtype=torch.float64)
    exact_lse = torch.empty(exact.shape[:3], dtype=torch.float64, device=query.device)
    for head in range(query.shape[1]):
        scores = query[:, head, rows].double() @ key[:, head].double().mT * factor
        exact_lse[:, head] = scores.logsumexp(-1)
        exact[:, head] = scores.softmax(-1) @ value[:, head].double()

    def error(found: torch.Tensor) -> float:
        return ((found[:, :, rows] - exact).norm() / exact.norm()).item()

    result = {"rel_error_own": error(output)}
    for name, rotate in (("rel_error_unrotated", False), ("rel_error", True)):
        tensors = fp8_quantization(query, key, value, rotate=rotate, scale=scale)
        found, lse, _ = fp8_dense_attention(tensors)
        result[name] = error(found)
        result["lse_error"] = (lse[:, :, rows] - exact_lse).pow(2).mean().sqrt().item()
    return result


def run(args: Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Adds a record per layer and probed step of a dense generation, then one for each clip."""
    workload = Workload.of(args, device, dtype)
    settings = asked_for(args)
    with to.attempt("errors"):
        to.add(*probed("fp8_captured", workload, IN_FP8, errors, settings))
    with to.attempt("clips"):
        to.add(*clips(workload, settings))


def clips(workload: Workload, settings: dict[str, Any]) -> list[Record]:
    """The PSNR of dense clips in FP8 against dense ones in the model's own precision."""
    own = workload.generate(None, **settings)
    in_fp8 = workload.generate(IN_FP8, **settings)
    return [
        {
            "op": "fp8_captured",
            "case": f"clip {number}",
            "psnr": psnr(found, expected),
            "seconds": in_fp8.seconds,
            "own_seconds": own.seconds,
            **environment(workload.device),
        }
        for number, (found, expected) in enumerate(zip(in_fp8.frames, own.frames, strict=True))
    ]
