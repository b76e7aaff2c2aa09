"""The memory of caches at full size, planned as before a generation; nothing is run."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.models import MODELS, FullModel
from chipsparse.config import SparsityConfig
from chipsparse.sparse.cache.memory_plan import (
    UNLIMITED,
    MemoryDemand,
    plan_memory,
    working_bytes,
)
from chipsparse.sparse.cache.placement import Capacity
from chipsparse.sparse.plan import SparsityPlan
from docs.tables.markdown import table

STEPS = 50
BF16 = torch.bfloat16
# Memory of GPUs in GB, as their vendors count.
GPUS = {
    24: "RTX 4090",
    32: "RTX 5090",
    48: "L40S",
    80: "A100 or H100",
    96: "RTX PRO 6000",
    141: "H200",
}
SHOWN = {
    "wan14b_480p": ("Wan 14B 480p", 0),
    "wan14b_720p": ("Wan 14B 720p", 0),
    "hunyuan_720p": ("HunyuanVideo 720p", 256),
    "h3_10s": ("MiniMax-H3, 10 s", 512),
}


def memory() -> str:
    """Return what caches take at `balanced`, with sparse MLPs and without, and what holds them."""
    rows = []
    for case, (title, text_tokens) in SHOWN.items():
        model = MODELS[case]
        balanced = model.qualities()["balanced"]
        before = balanced  # with sparse steps at any cost
        with_mlps = before.override({"mlp.density": 0.3})
        weights = weight_bytes(model)
        now = cache_bytes(model, model.decided(balanced), text_tokens)
        work = working_bytes(plan_of(model, balanced, text_tokens), dtype=BF16)
        rows.append(
            {
                "model": title,
                "transformer": _gb(weights),
                "a step's work": _gb(work),
                "caches with MLPs at 30 %": _gb(cache_bytes(model, with_mlps, text_tokens)),
                "with dense MLPs": _gb(cache_bytes(model, before, text_tokens)),
                "`balanced` now": _gb(now) if now else "none",
                "all of it on": smallest_gpu(weights + work + now),
            },
        )
    return table(rows, texts=1)


def plan_of(model: FullModel, config: SparsityConfig, text_tokens: int) -> SparsityPlan:
    """Return the plan of a generation of 50 steps."""
    return SparsityPlan(config, replace(model.layout(), text_tokens=text_tokens), STEPS)


def cache_bytes(model: FullModel, config: SparsityConfig, text_tokens: int) -> int:
    """Return the bytes of all caches, of all guidance branches, where there is room for them."""
    plan = plan_of(model, config, text_tokens)
    if plan.is_dense():
        return 0
    capacity = Capacity(UNLIMITED, 0)
    planned = plan_memory(plan, capacity, MemoryDemand(BF16, branches=len(model.branches)))
    return planned.device_bytes


def weight_bytes(model: FullModel) -> int:
    """Return the bytes of the transformer's weights in 16 bits; no weight is made."""
    import diffusers

    with torch.device("meta"):
        transformer = getattr(diffusers, model.transformer_class)(**model.config)
    return BF16.itemsize * sum(weights.numel() for weights in transformer.parameters())


def smallest_gpu(needed: int) -> str:
    """Return the smallest of `GPUS` that holds so many bytes."""
    for gigabytes, name in GPUS.items():
        if needed < 0.94 * gigabytes * 1e9:  # what drivers and libraries take
            return f"{gigabytes} GB ({name})"
    return "none: a part in host memory"


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
