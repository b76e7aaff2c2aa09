"""Columns chosen at the first step: where the LSE comes from, what that costs and loses.

Captures q, k and v of the first steps of one dense generation, chooses the columns of step 0 in
each way, and prints the softmax mass that they hold there and the error of a sparse step 1 with
them: ``python -m benchmarks.first_columns --model assets/tiny-wan --steps 4``.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from diffusers import DiffusionPipeline

from chipsparse.api import attach
from chipsparse.cache.tensors import AttentionCache
from chipsparse.kernels.column_selection import column_selection
from chipsparse.kernels.dense_attention import dense_attention
from chipsparse.kernels.dense_attention_column_sums import dense_attention_column_sums
from chipsparse.layers.attention import (
    AttentionLayer,
    Unpatched,
    estimated_lse,
    record_residual,
    sparse_step,
)
from chipsparse.layers.attention_inputs import AttentionInputs
from chipsparse.layers.mlp import MLPLayer
from chipsparse.layers.state import StepState
from chipsparse.profiles.profile import load_profile
from chipsparse.session import Session

DENSITIES = (0.1, 0.2)
EVERY = 3  # so many layers one is measured
ROWS = 8  # of a block, in the ways that sample rows
PROMPT = "a large yellow square bounces over purple stripes"
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Sums = Callable[[Tensors, torch.Tensor, int], torch.Tensor]


class Capture:
    """Keeps q, k and v of the branch with the prompt at the first two steps, by layer and step."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, int], Tensors] = {}

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
        if state.branch != "uncond" and state.context.step < 2:
            kept = tuple(each.detach().clone() for each in (query, key, value))
            self.found[layer.number, state.context.step] = kept  # type: ignore[assignment]
        return unpatched(query, key, value, scale)

    def mlp(self, layer: MLPLayer, *args: Any, **options: Any) -> torch.Tensor:
        """See `LayerObserver`."""
        return layer(*args, **options)


def _sums(qkv: Tensors, lse: torch.Tensor, block: int) -> torch.Tensor:
    return dense_attention_column_sums(*qkv, lse, block_size_q=block)[2]


def _of_sampled_rows(qkv: Tensors, lse: torch.Tensor, block: int) -> torch.Tensor:
    """The sums over some rows of each block alone, with their exact LSE."""
    query, key, value = qkv
    step = block // ROWS
    return _sums((query[:, :, ::step], key, value), lse[:, :, ::step].contiguous(), ROWS)


def _block_constants(qkv: Tensors, lse: torch.Tensor, block: int) -> torch.Tensor:
    """One constant for each block: the mean LSE of some of its rows."""
    sampled = lse[:, :, :: block // ROWS]
    blocks = sampled.split(ROWS, 2)
    means = torch.cat([each.mean(2, keepdim=True).expand_as(each) for each in blocks], 2)
    return _sums(qkv, means.repeat_interleave(block // ROWS, 2)[:, :, : lse.shape[2]], block)


def _sampled_keys(every: int) -> Sums:
    return lambda qkv, _, block: _sums(
        qkv, estimated_lse(AttentionInputs(*qkv), every=every), block
    )


# The cost besides a dense attention's, in units of one, where the sums cost 0.08 of it.
WAYS: dict[str, tuple[Sums, Callable[[int], float]]] = {
    "second pass, exact LSE": (_sums, lambda _: 1.08),
    "LSE of every 8th key": (_sampled_keys(8), lambda _: 0.08 + 1 / 8),
    "LSE of every 16th key": (_sampled_keys(16), lambda _: 0.08 + 1 / 16),
    "LSE of every 64th key": (_sampled_keys(64), lambda _: 0.08 + 1 / 64),
    "a block's mean LSE of 8 rows": (_block_constants, lambda block: 0.08 + ROWS / block),
    "sums of 8 rows alone": (_of_sampled_rows, lambda block: ROWS / block),
    "at random": (lambda qkv, lse, block: torch.rand_like(_sums(qkv, lse, block)), lambda _: 0.0),
}


def capture(model: str, steps: int) -> tuple[dict[tuple[int, int], Tensors], int]:
    """q, k and v of the first two steps, and the query block of the model's profile."""
    pipe = DiffusionPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    profile, probe = load_profile(f"{model}/chipsparse.yaml"), Capture()
    config = profile.sparsity.override(
        {"mlp.enabled": False, "schedule": {"actions": ["dense", "refresh", "sparse"]}}
    )
    settings = {k: v for k, v in vars(profile.generation).items() if v is not None}
    call = {
        **settings,
        "num_inference_steps": steps,
        "negative_prompt": "",
        "output_type": "latent",
    }
    # Two steps are enough; the others would only take their time.
    call["callback_on_step_end"] = _stop
    handle = attach(pipe, config, functools.partial(Session, observer=probe))
    with handle:
        pipe(PROMPT, generator=torch.Generator().manual_seed(3), **call)
    return probe.found, config.attention.block_size_q


def _stop(pipe: Any, step: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    pipe._interrupt = step > 0
    return tensors


def measure(found: dict[tuple[int, int], Tensors], block: int) -> None:
    """Prints a row for each way and density: means over some layers."""
    layers = sorted({layer for layer, _ in found})[::EVERY]
    print("density  way                           cost   mass   error at step 1: merge difference")
    for density in DENSITIES:
        for name, (sums, cost) in WAYS.items():
            rows = [
                _one(found[layer, 0], found[layer, 1], density, sums, block) for layer in layers
            ]
            mass, merge, difference = torch.tensor(rows).mean(0).tolist()
            print(
                f"{density:7.0%}  {name:29s} {cost(block):5.2f}  {mass:5.3f}   {merge:20.4f}"
                f" {difference:10.4f}",
                flush=True,
            )


def _one(
    first: Tensors, second: Tensors, density: float, sums: Sums, block: int
) -> tuple[float, float, float]:
    """The mass of the columns at step 0, and the error of a sparse step 1 by either rule."""
    output, lse = dense_attention(*first)
    expected, _ = dense_attention(*second)
    exact = _sums(first, lse, block)
    tokens = first[1].shape[2]
    keep = round(density * tokens)
    packed = column_selection(sums(first, lse, block), keep_count=keep, seed=0)
    errors = []
    for rule in ("merge", "difference"):
        config = _config(rule, block)
        cache = AttentionCache()
        cache.lse, cache.columns = lse, packed
        record_residual(cache, output, AttentionInputs(*first), config=config)
        found = sparse_step(cache, AttentionInputs(*second), config=config)
        errors.append(((found - expected).norm() / expected.norm()).item())
    assert cache.lists is not None
    indices, counts = cache.lists
    listed = torch.arange(indices.shape[-1]) < counts[..., None]
    kept = exact.gather(-1, indices.clamp(min=0).long().clamp(max=tokens - 1)).where(listed, 0)
    return (kept.sum() / exact.sum()).item(), errors[0], errors[1]


def _config(rule: str, block: int) -> Any:
    from chipsparse import SparsityConfig

    chosen = {"attention.delta_rule": rule, "attention.block_size_q": block}
    return SparsityConfig().override(chosen).attention


def main() -> None:
    """Captures and measures one model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="assets/tiny-wan")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    with torch.no_grad():
        measure(*capture(options.model, options.steps))


if __name__ == "__main__":
    main()
