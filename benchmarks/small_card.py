"""Steps of large models on a GPU whose memory is limited to that of a small card.

Wan 14B with random weights, offloaded in groups as diffusers does it for such cards, attention
alone sparse. Each record tells what the plan keeps where, that nothing ran out of memory, and the
times of a dense and of a sparse step, both guidance branches together::

    python -m benchmarks --op small_card --case wan14b_480p --cards 24,16
"""

from __future__ import annotations

import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

import chipsparse
from benchmarks.full_models import MODELS, FullModel, call, wan
from benchmarks.records import Record, environment
from benchmarks.run import Run
from benchmarks.sampled_checks import check_finite
from benchmarks.transformer_step import attention_backend, run_timed
from chipsparse import SparsityConfig
from chipsparse.common.machine import with_index
from chipsparse.config import ActionName

CASES: dict[str, FullModel] = {
    model.case: model
    for model in (wan("wan14b_480p", 40, 40, 13_824, 60, 104), MODELS["wan14b_720p"])
}
COLUMNS = {
    "case": "",
    "card_gb": "g",
    "residuals": "",
    "sparse_layers": "d",
    "stock_ms": ".0f",
    "dense_ms": ".0f",
    "refresh_ms": ".0f",
    "sparse_ms": ".0f",
    "speedup": ".2f",
    "peak_gpu_bytes": ".3e",
    "host_bytes": ".3e",
}
GB = 10**9
SCALE = 0.1  # of rows and columns, in a dry run
# The first of all takes memory for caches, the first sparse step measures and compiles kernels.
ACTIONS: list[ActionName] = ["dense", "refresh", "sparse", "sparse", "sparse"]


def add_arguments(parser: ArgumentParser) -> None:
    """Options of this benchmark alone; ``--small`` and ``--depth`` are those of full_size."""
    group = parser.add_argument_group("small_card")
    group.add_argument("--cards", default="24,16", help="memory of the cards in GB (10^9 bytes)")


def run(args: Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Adds a record for each case and card."""
    for name in args.case.split(",") if args.case else CASES:
        with to.attempt(f"small_card, {name}"):
            if name not in CASES:
                raise ValueError(f"no model for the case {name!r}; there are {list(CASES)}")
            model = CASES[name]
            transformer = offloaded(model, args.depth, args.small, device, dtype)
            for card in map(float, args.cards.split(",")):
                with to.attempt(f"small_card, {name}, {card:g} GB"):
                    to.add(measure(model, transformer, card, args.small, device, dtype))


def offloaded(
    model: FullModel, depth: float, small: bool, device: torch.device, dtype: torch.dtype
) -> Any:
    """The model with random weights in host memory, of which a few blocks are on the device."""
    host = torch.device("cpu")
    if small:
        transformer = model.make(model.layers_of(depth), small, host, dtype)
    else:
        with mock.patch.object(torch.nn.Linear, "reset_parameters", return_value=None):
            transformer = model.make(model.layers_of(depth), small, host, dtype)
        generator = torch.Generator(device).manual_seed(0)
        for module in transformer.modules():
            if isinstance(module, torch.nn.Linear):
                sizes = module.weight.shape
                weight = torch.randn(sizes, generator=generator, device=device, dtype=dtype)
                module.weight.copy_(weight * sizes[1] ** -0.5)
                if module.bias is not None:
                    module.bias.zero_()
    transformer.enable_group_offload(
        onload_device=device,
        offload_device=host,
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=device.type == "cuda",
    )
    return transformer


@contextmanager
def limited_to(card_bytes: float, device: torch.device) -> Iterator[None]:
    """Lets PyTorch have so much of a GPU and no more; a CPU is not limited."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    device = with_index(device)
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, card_bytes / total), device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def measure(
    model: FullModel,
    transformer: Any,
    card_gb: float,
    small: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> Record:
    """The record of a model on a card; raises ``torch.OutOfMemoryError`` where it has no room."""
    steps = len(ACTIONS) + 1  # caches are freed after the last
    inputs = model.inputs(SCALE if small else 1.0, transformer.config, steps, device, dtype)

    def all_branches(step: int) -> torch.Tensor:
        for branch in model.branches:
            output = call(transformer, inputs, branch, step, steps)
        return output

    config = SparsityConfig().override({"mlp.enabled": False, "schedule.actions": ACTIONS})
    attention = "_native_cudnn" if device.type == "cuda" else "native"
    with (
        torch.no_grad(),
        limited_to(card_gb * GB, device),
        attention_backend(transformer, attention),
    ):
        # The first call finds the order in which groups are fetched.
        stock_ms, _ = run_timed([partial(all_branches, 0)] * 2, device)
        stock_peak = _peak(device)
        with chipsparse.enable(model.pipe(transformer), config) as handle:
            calls = [partial(all_branches, step) for step in range(len(ACTIONS))]
            times, outputs = run_timed(calls, device)
            check_finite(outputs[-1])
            session, report = handle._adapters[0].session, handle.report
            memory = session._caches._branches[model.branches[0]].memory
            assert session.plan is not None
            tokens, layers = session.plan.layout.tokens, session.plan.layout.layers
            recomputed = sum(part == "attention" for _, part in memory.placement.recomputed)
            found = {
                "residuals": memory.residuals,
                "planned_gpu_bytes": memory.device_bytes,
                "cache_bytes": report.cache_bytes,
                "host_bytes": report.host_bytes,
                "sparse_layers": layers - recomputed,
                "backends": dict(report.backends),
                "fallbacks": list(report.fallbacks),
                "notes": list(report.notes),
            }
        peak = _peak(device)
    dense_ms, refresh_ms, *sparse_ms = times
    return {
        "op": "small_card",
        "case": model.case,
        "card_gb": card_gb,
        "tokens": tokens,
        "layers": layers,
        "branches": len(model.branches),
        "dtype": str(dtype).removeprefix("torch."),
        "density": config.attention.density,
        "backend": "chipsparse",
        "baseline": f"stock transformer, {attention.lstrip('_')} attention, group offload",
        "stock_ms": stock_ms[-1],
        "dense_ms": dense_ms,
        "refresh_ms": refresh_ms,
        "sparse_ms": statistics.median(sparse_ms[1:]),
        "sparse_step_ms": sparse_ms,
        "speedup": stock_ms[-1] / statistics.median(sparse_ms[1:]),
        "stock_peak_gpu_bytes": stock_peak,
        "peak_gpu_bytes": peak,
        **found,
        **environment(device),
    }


def _peak(device: torch.device) -> int | None:
    """The most that PyTorch held of a GPU, gaps between blocks included."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
