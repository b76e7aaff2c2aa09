"""FP8 attention on what a model computes: errors by layer and step, then whole clips."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from benchmarks.clips import Workload
from benchmarks.records import Record, environment
from benchmarks.run import Run
from chipsparse import SparsityConfig
from chipsparse.kernels.fp8_dense_attention import fp8_dense_attention
from chipsparse.kernels.fp8_quantization import fp8_quantization
from chipsparse.layers.attention import AttentionLayer, Unpatched
from chipsparse.layers.mlp import MLPLayer
from chipsparse.layers.state import StepState
from chipsparse.measure.quality import psnr
from chipsparse.pipelines.denoising_loop import DenoisingLoop
from chipsparse.report.generation import GenerationReport
from chipsparse.session import Session
from chipsparse.step import PositionTracker

EVERY = 12  # so many steps one is probed
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


class ErrorProbe:
    """Computes attention as the model does and, at some steps, in FP8 and float64 beside it.

    Attributes:
        errors: by layer and step, of each call.
    """

    def __init__(self, steps: frozenset[int]) -> None:
        self._steps = steps
        self.errors: dict[tuple[int, int], list[dict[str, float]]] = {}

    def attention(
        self,
        layer: AttentionLayer,
        state: StepState,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None,
        unpatched: Unpatched,
    ) -> torch.Tensor:
        """See `LayerObserver`."""
        output = unpatched(query, key, value, scale)
        step = state.context.step
        if step in self._steps:
            found = errors(query, key, value, output, scale=scale)
            self.errors.setdefault((layer.number, step), []).append(found)
        return output

    def mlp(self, layer: MLPLayer, *args: Any, **options: Any) -> torch.Tensor:
        """See `LayerObserver`."""
        return layer(*args, **options)


def errors(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    *,
    scale: float | None,
) -> dict[str, float]:
    """Relative L2 errors of some rows of all heads against float64; all ``[B, H, N, D]``.

    Args:
        query: as key and value, of the model.
        key: as query.
        value: as query.
        output: what the model computed.
        scale: factor of the scores, None for ``D ** -0.5``.
    """
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
    settings: dict[str, Any] = {"num_inference_steps": args.steps} if args.steps else {}
    if args.size is not None:
        settings |= dict(zip(("height", "width", "num_frames"), args.size, strict=False))
    with to.attempt("errors"):
        to.add(*measure(workload, settings))
    with to.attempt("clips"):
        to.add(*clips(workload, settings))


def measure(workload: Workload, settings: dict[str, Any]) -> list[Record]:
    """The records of a generation; every few steps are probed, and the last one."""
    from chipsparse.pipelines.registry import ADAPTERS  # needs diffusers

    pipe: Any = workload.pipe
    steps = workload.settings(**settings).get("num_inference_steps", 50)
    probe = ErrorProbe(frozenset(range(0, steps, EVERY)) | {steps - 1})
    session = Session(IN_FP8, GenerationReport(), observer=probe)
    adapter = ADAPTERS[type(pipe.transformer).__name__](
        pipe.transformer, session, PositionTracker(), DenoisingLoop(pipe)
    )
    try:
        workload.generate(None, **settings)
    finally:
        adapter.remove()
    records = []
    for (layer, step), found in sorted(probe.errors.items()):
        mean = {name: sum(each[name] for each in found) / len(found) for name in found[0]}
        case = {"case": f"layer {layer}, step {step}", "layer": layer, "step": step}
        records.append({"op": "fp8_captured", **case, **mean, **environment(workload.device)})
    return records


def clips(workload: Workload, settings: dict[str, Any]) -> list[Record]:
    """The PSNR of dense clips in FP8 against dense ones in the model's own precision."""
    own = workload.generate(None, **settings)
    in_fp8 = workload.generate(IN_FP8, **settings)
    return [
        {
            "op": "fp8_captured",
            "case": f"clip {number}",
            "psnr": psnr(found.cpu().numpy(), expected.cpu().numpy()),
            "seconds": in_fp8.seconds,
            "own_seconds": own.seconds,
            **environment(workload.device),
        }
        for number, (found, expected) in enumerate(zip(in_fp8.frames, own.frames, strict=True))
    ]
