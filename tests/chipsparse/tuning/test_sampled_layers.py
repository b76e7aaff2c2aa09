"""Sampled errors against the formulas, computed directly in float64."""

import pytest
import torch
import torch.nn.functional as F

from chipsparse.attention import AttentionBudget
from chipsparse.config import AttentionConfig, MLPConfig
from chipsparse.mlp import MLPWeights
from chipsparse.tuning.sampled_layers import (
    SampledAttention,
    SampledMLP,
    SampledRows,
    head_group_errors,
    relative_error,
)

B, H, N, D, R = 2, 4, 60, 8, 16
STARTS = [16, 44]  # the second reaches to the end, and so stands between two groups
BUDGETS = (4, 20, 60)


def drifting(seed, *shape):
    """Tensors of three steps that change a little from one to the next, float64."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(*shape, dtype=torch.float64, generator=generator)
    change = torch.randn(*shape, dtype=torch.float64, generator=generator)
    return [start + 0.3 * step * change for step in range(3)]


def softmax_parts(query, key, value, kept=None):
    """Output and log-sum-exp over the kept columns of ``[N]`` masks per row."""
    scores = query @ key.mT * D**-0.5
    if kept is not None:
        scores = scores.masked_fill(~kept, float("-inf"))
    return torch.softmax(scores, -1) @ value, torch.logsumexp(scores, -1)


def kept_columns(query, key, lse_before, count):
    """The columns with the largest sums, per group of rows, as a mask of every sampled row."""
    weights = torch.exp(query @ key.mT * D**-0.5 - lse_before[..., None])
    sums = weights.unflatten(2, (-1, R)).sum(3)
    chosen = torch.zeros_like(sums, dtype=torch.bool).scatter(-1, sums.topk(count).indices, True)
    return chosen.repeat_interleave(R, dim=2)


@pytest.mark.parametrize("rule", ["merge", "difference", "kept_only", "reuse"])
def test_attention_errors_and_masses(rule):
    queries, keys, values = (drifting(seed, B, H, N, D) for seed in range(3))
    sample = SampledRows(STARTS, R)
    sampled = SampledAttention(
        AttentionConfig(group_rows=R, delta_rule=rule),
        [AttentionBudget(count, 0, None, seed=0) for count in BUDGETS],
        sample,
        scale=None,
        backend="reference",
        head_groups=2,
    )
    sampled.record_constants(queries[0], keys[0], values[0])
    masses = sampled.refresh(1, queries[1], keys[1], values[1])
    outputs = sampled.outputs(1, queries[2], keys[2], values[2])

    rows = [torch.cat([q[:, :, s : s + R] for s in STARTS], 2) for q in queries]
    _, lse_before = softmax_parts(rows[0], keys[0], values[0])
    exact, lse = softmax_parts(rows[1], keys[1], values[1])
    exact_now, _ = softmax_parts(rows[2], keys[2], values[2])
    for count, output, mass in zip(BUDGETS, outputs, masses, strict=True):
        kept = kept_columns(rows[1], keys[1], lse_before, count)
        part, part_lse = softmax_parts(rows[1], keys[1], values[1], kept)
        now, now_lse = softmax_parts(rows[2], keys[2], values[2], kept)
        weight = torch.exp(part_lse - lse)[..., None]
        a = torch.exp(now_lse - lse)[..., None]
        expected = {
            "difference": exact - part + now,
            "merge": (a * now + exact - weight * part) / (a + 1 - weight),
            "kept_only": now,
            "reuse": exact,
        }[rule]
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            mass.double(),
            torch.stack([heads.mean() for heads in weight.chunk(2, 1)]),
            rtol=1e-5,
            atol=1e-6,
        )
        wrong = (expected - exact_now).square().sum().sqrt() / exact_now.square().sum().sqrt()
        assert float(relative_error(output, exact_now)) == pytest.approx(float(wrong), abs=1e-5)
        halves = head_group_errors(output, exact_now, 2)
        first = (expected - exact_now)[:, :2].square().sum() / exact_now[:, :2].square().sum()
        assert float(halves[0]) == pytest.approx(float(first.sqrt()), abs=1e-5)


def test_mlp_errors_follow_the_caches_from_step_to_step():
    width, channels = 24, D
    hidden = drifting(7, B, N, channels)
    generator = torch.Generator().manual_seed(8)
    up = torch.randn(width, channels, dtype=torch.float64, generator=generator)
    down = torch.randn(channels, width, dtype=torch.float64, generator=generator)
    bias = torch.randn(width, dtype=torch.float64, generator=generator)
    weights = MLPWeights(up, bias, down, None, "gelu-tanh")
    counts = (0, 6, width)
    sampled = SampledMLP(MLPConfig(group_rows=R), counts, SampledRows(STARTS, R), backend=None)
    sampled.refresh(0, hidden[0], weights)
    sampled.outputs(0, hidden[1], weights)
    outputs = sampled.outputs(0, hidden[2], weights)

    rows = [torch.cat([h[:, s : s + R] for s in STARTS], 1) for h in hidden]
    grouped = [r.unflatten(1, (-1, R)) for r in rows]  # [B, S, R, C]
    neurons = [F.gelu(g @ up.T + bias, approximate="tanh") for g in grouped]
    means = [g.mean(2) @ up.T + bias for g in grouped]  # [B, S, F]
    torch.testing.assert_close(
        sampled.exact(hidden[2], weights), (neurons[2] @ down.T).flatten(1, 2)
    )
    for count, output in zip(counts, outputs, strict=True):
        cached, cached_mean = neurons[0].clone(), means[0].clone()
        for step in (1, 2):
            chosen = (means[step] - cached_mean).abs().topk(count).indices
            mask = torch.zeros_like(cached_mean, dtype=torch.bool).scatter(-1, chosen, True)
            cached_mean = torch.where(mask, means[step], cached_mean)
            cached = torch.where(mask[:, :, None], neurons[step], cached)
        torch.testing.assert_close(output, (cached @ down.T).flatten(1, 2), rtol=1e-6, atol=1e-6)


def test_a_sample_is_spread_over_all_rows():
    tensor = torch.arange(N, dtype=torch.float32)[None, :, None]
    sample = SampledRows(STARTS, R)
    rows = sample.of(tensor)
    assert rows[0, :, 0].tolist() == [*range(16, 32), *range(44, 60)]
    spread = sample.spread(rows, tensor)
    assert spread.shape == tensor.shape
    assert spread[0, :, 0].tolist() == [*rows[0, :, 0].tolist(), *rows[0, :28, 0].tolist()]
