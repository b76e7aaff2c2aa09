"""The rule without a cache: means of columns stand for those that are dropped."""

import torch

from chipsparse import SparsityConfig
from chipsparse.cache.kinds import kept_kinds
from chipsparse.config import AttentionConfig
from chipsparse.layers.attention import refresh_step, sparse_step
from chipsparse.layers.attention_inputs import AttentionInputs
from chipsparse.layers.column_budget import AttentionBudget
from chipsparse.layers.pooled_columns import POOLED, means, pooled_attention
from tests.chipsparse.layers.test_attention import (
    RANDOM,
    ROWS,
    TOKENS,
    given,
    inputs,
    refreshed,
    row_mask,
    softmax_parts,
)


def test_means_are_those_of_consecutive_columns():
    rows = torch.arange(2 * 3 * 150.0).view(1, 2, 150, 3)
    parts = rows.split([50, 50, 50], 2)
    expected = torch.stack([part.mean(2) for part in parts], 2)
    torch.testing.assert_close(means(rows), expected)
    parts = rows[:, :, :129].split([43, 43, 43], 2)
    torch.testing.assert_close(means(rows[:, :, :129])[:, :, 1], parts[1].mean(2))
    parts = rows[:, :, :131].split([44, 44, 43], 2)
    expected = torch.stack([part.mean(2) for part in parts], 2)
    torch.testing.assert_close(means(rows[:, :, :131]), expected)
    torch.testing.assert_close(means(rows[:, :, :10]), rows[:, :, :10].mean(2, keepdim=True))


def test_equal_columns_are_as_their_mean():
    query, key, value = (tensor.double() for tensor in inputs())
    key, value = (tensor[:, :, :3].repeat_interleave(POOLED, 2) for tensor in (key, value))
    output, lse = pooled_attention(AttentionInputs(query, key, value))
    expected, expected_lse = softmax_parts(query, key, value)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_a_sparse_step_is_one_softmax_over_kept_columns_and_means():
    cache, config, output = refreshed("pooled")
    torch.testing.assert_close(output.double(), softmax_parts(*inputs())[0], atol=1e-5, rtol=1e-5)
    assert cache.residual is cache.residual_scale is cache.kept_mass is cache.lse_dense is None
    changed = [a + 0.1 * b for a, b in zip(inputs(), inputs(9), strict=True)]
    found = sparse_step(cache, AttentionInputs(*changed), config=config)
    query, key, value = (tensor.double() for tensor in changed)
    factor = query.shape[-1] ** -0.5
    kept = (query @ key.mT * factor).masked_fill(~row_mask(cache), -torch.inf).exp()
    heavy = TOKENS / 2 * (query @ means(key).mT * factor).exp()
    total = kept.sum(-1, keepdim=True) + heavy.sum(-1, keepdim=True)
    expected = (kept @ value + heavy @ means(value)) / total
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_where_nothing_is_kept_the_means_are_all():
    cache, config, _ = refreshed("pooled", budget=AttentionBudget(0, 0, None, seed=5))
    found = sparse_step(cache, given(), config=config)
    torch.testing.assert_close(found, pooled_attention(given())[0])


def test_only_the_lse_and_the_columns_are_kept_between_steps():
    for residuals in ("auto", "full", "fp8"):
        rule = {"attention.delta_rule": "pooled", "memory.residuals": residuals}
        config = SparsityConfig().override(rule)
        assert kept_kinds(config, "attention") == {"lse", "columns"}


def test_columns_are_chosen_as_by_the_other_rules():
    pooled, _, _ = refreshed("pooled")
    merged, _, _ = refreshed("merge")
    assert torch.equal(pooled.columns, merged.columns)
    assert float(pooled.kept_fraction) == float(merged.kept_fraction)


def test_a_later_refresh_takes_no_cache_either():
    cache, config, _ = refreshed("pooled")
    budget = AttentionBudget(30, RANDOM, None, seed=5)
    settings = AttentionConfig(delta_rule="pooled", block_size_q=ROWS)
    refresh_step(cache, given(3), config=settings, budget=budget)
    assert row_mask(cache).sum(-1).max() == 30 + RANDOM < TOKENS
    assert sparse_step(cache, given(3), config=config).isfinite().all()
