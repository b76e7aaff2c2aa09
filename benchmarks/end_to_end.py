"""Denoising loop of the profile against the stock pipeline: time and quality, paired by prompt."""

from __future__ import annotations

import statistics
from argparse import Namespace

import torch

from benchmarks.clips import Workload
from benchmarks.records import Record, environment
from benchmarks.run import Run
from chipsparse.measure.quality import psnr, ssim

COLUMNS = {
    "case": "",
    "baseline_ms": ".0f",
    "latency_ms": ".0f",
    "speedup": ".2f",
    "psnr": ".1f",
    "ssim": ".3f",
}


def run(args: Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Adds one record per prompt and one with the medians."""
    with to.attempt("end_to_end"):
        to.add(*measure(Workload.of(args, device, dtype)))


def measure(workload: Workload) -> list[Record]:
    """One record per prompt and one with the medians; which of the two goes first alternates."""
    workload.generate(None, prompts=workload.prompts[:1], num_inference_steps=2)  # warm up
    configs = {"dense": None, "sparse": workload.profile.sparsity}
    records: list[Record] = []
    for seed, prompt in enumerate(workload.prompts):
        order = list(configs) if seed % 2 == 0 else list(reversed(configs))
        clips = {
            name: workload.generate(configs[name], prompts=[prompt], first_seed=seed)
            for name in order
        }
        dense, sparse = clips["dense"], clips["sparse"]
        assert sparse.report is not None
        records.append(
            {
                "case": prompt,
                "latency_ms": sparse.seconds * 1e3,
                "baseline_ms": dense.seconds * 1e3,
                "speedup": dense.seconds / sparse.seconds,
                "psnr": psnr(dense.frames[0], sparse.frames[0]),
                "ssim": ssim(dense.frames[0], sparse.frames[0]),
                "schedule": dict(sparse.report.actions()),
                "cache_bytes": sparse.report.cache_bytes,
            }
        )
        print(f"{records[-1]['speedup']:.2f}x {records[-1]['psnr']:.1f} dB  {prompt}", flush=True)
    numbers = ("latency_ms", "baseline_ms", "speedup", "psnr", "ssim")
    medians: Record = {
        name: statistics.median(record[name] for record in records) for name in numbers
    }
    records.append({"case": f"median of {len(records)} prompts", **medians})
    common = {
        "op": "end_to_end",
        "model": type(workload.pipe).__name__,
        "baseline": "stock pipeline",
        "steps": workload.settings().get("num_inference_steps"),
        **environment(workload.device),
    }
    return [record | common for record in records]
