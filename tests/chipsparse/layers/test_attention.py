"""What each action of self-attention computes and records, against float64 formulas."""

from dataclasses import replace

import pytest
import torch

from chipsparse.cache.tensors import AttentionCache
from chipsparse.config import AttentionConfig
from chipsparse.kernels.attention_residual import reference as residual_reference
from chipsparse.kernels.mask_packing import unpack_mask
from chipsparse.layers import attention
from chipsparse.layers.attention import (
    backend_choices,
    dense_step,
    refresh_step,
    sparse_step,
)
from chipsparse.layers.attention_inputs import AttentionInputs
from chipsparse.layers.column_budget import AttentionBudget, static_columns

ROWS, TOKENS, KEEP, RANDOM = 16, 75, 20, 3
BUDGET = AttentionBudget(KEEP, RANDOM, None, seed=5)
CPU = torch.device("cpu")


def inputs(seed=0, *, batch=2, heads=3, dim=32):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, TOKENS, heads, dim, generator=generator).transpose(1, 2)
        for _ in range(3)
    ]


def given(seed=0, **sizes):
    return AttentionInputs(*inputs(seed, **sizes))


def softmax_parts(query, key, value, mask=None):
    """Output and log-sum-exp over the columns of a mask ``[B, H, N, N]``, in float64."""
    scores = query.double() @ key.double().transpose(-1, -2) * query.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ value.double(), lse


def row_mask(cache):
    mask = unpack_mask(cache.columns, TOKENS)
    return mask.repeat_interleave(ROWS, dim=2)[:, :, :TOKENS]


def refreshed(rule, *, budget=BUDGET, seed=0, in_fp8=False, **config):
    cache = AttentionCache(residual_in_fp8=in_fp8)
    settings = AttentionConfig(delta_rule=rule, **{"block_size_q": ROWS, **config})
    dense_step(cache, given(seed))
    output = refresh_step(
        cache,
        given(seed),
        config=settings,
        budget=budget,
    )
    return cache, settings, output


def test_dense_records_the_lse():
    cache = AttentionCache()
    output = dense_step(cache, given())
    expected, lse = softmax_parts(*inputs())
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache.lse.double(), lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rule", ["merge", "difference"])
def test_refresh_returns_full_attention(rule):
    _, _, output = refreshed(rule)
    torch.testing.assert_close(output.double(), softmax_parts(*inputs())[0], atol=1e-5, rtol=1e-5)


def test_refresh_keeps_the_columns_with_the_most_mass():
    cache, _, _ = refreshed("merge", budget=AttentionBudget(KEEP, 0, None, seed=5))
    query, key, _ = inputs()
    scores = query.double() @ key.double().transpose(-1, -2) * query.shape[-1] ** -0.5
    mass = scores.softmax(-1)
    groups = torch.nn.functional.pad(mass, (0, 0, 0, -TOKENS % ROWS))
    sums = groups.unflatten(2, (-1, ROWS)).sum(3)
    mask = unpack_mask(cache.columns, TOKENS)
    assert torch.equal(mask.sum(-1), torch.full(mask.shape[:-1], KEEP))
    worst_kept = sums.masked_fill(~mask, float("inf")).amin(-1)
    best_dropped = sums.masked_fill(mask, 0).amax(-1)
    assert (worst_kept >= best_dropped - 1e-6).all()


@pytest.mark.parametrize("limit", [None, 1])
def test_guidance_branches_in_a_batch_keep_what_has_the_most_mass_together(limit, monkeypatch):
    if limit is not None:
        monkeypatch.setattr(attention, "COLUMN_SUMS_BYTES", limit)
    budget = AttentionBudget(KEEP, RANDOM, None, seed=5, branches=2)
    cache, _, _ = refreshed("merge", budget=budget)
    query, key, _ = inputs()
    scores = query.double() @ key.double().transpose(-1, -2) * query.shape[-1] ** -0.5
    groups = torch.nn.functional.pad(scores.softmax(-1), (0, 0, 0, -TOKENS % ROWS))
    first, second = groups.unflatten(2, (-1, ROWS)).sum(3)
    mask, other = unpack_mask(cache.columns, TOKENS)
    assert torch.equal(mask, other)
    most = (first + second).topk(KEEP, dim=-1).indices
    assert mask.gather(-1, most).all()
    assert torch.equal(mask.sum(-1), torch.full(mask.shape[:-1], KEEP + RANDOM))


@pytest.mark.parametrize("rule", ["merge", "difference"])
def test_nothing_changed_gives_back_the_dense_output(rule):
    cache, config, output = refreshed(rule)
    found = sparse_step(cache, given(), config=config)
    torch.testing.assert_close(found, output, atol=1e-5, rtol=1e-5)


def test_sparse_follows_the_formulas_when_something_changed():
    changed = [a + 0.1 * b for a, b in zip(inputs(), inputs(9), strict=True)]
    for rule in ("merge", "difference"):
        cache, config, _ = refreshed(rule)
        found = sparse_step(cache, AttentionInputs(*changed), config=config).double()
        mask = row_mask(cache)
        dense, lse = softmax_parts(*inputs())
        kept, kept_lse = softmax_parts(*inputs(), mask)
        new, new_lse = softmax_parts(*changed, mask)
        if rule == "difference":
            expected = dense - kept + new
        else:
            # Dropped columns keep the numerator and denominator that they had at the refresh.
            share, new_share = (kept_lse - lse).exp(), (new_lse - lse).exp()
            dropped = dense - share.unsqueeze(-1) * kept
            total = (new_share + 1 - share).unsqueeze(-1)
            expected = (new_share.unsqueeze(-1) * new + dropped) / total
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_merge_is_exact_while_only_the_kept_columns_change():
    """The rule's own claim: it follows mass that moves between kept and dropped columns."""
    query, key, value = inputs()
    cache, config, _ = refreshed("merge", block_size_q=TOKENS)
    kept_by_all = unpack_mask(cache.columns, TOKENS)[:, :, 0]
    moved = torch.where(kept_by_all.unsqueeze(-1), key + 0.5 * inputs(3)[1], key)
    found = sparse_step(cache, AttentionInputs(query, moved, value), config=config)
    expected, _ = softmax_parts(query, moved, value)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_random_columns_are_seeded_and_counted():
    masks = [
        unpack_mask(
            refreshed("merge", budget=AttentionBudget(KEEP, RANDOM, None, s))[0].columns, TOKENS
        )
        for s in (1, 1, 2)
    ]
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
    assert (masks[0].sum(-1) == KEEP + RANDOM).all()


def test_static_columns_are_those_of_the_text_and_of_the_user():
    assert static_columns(75, text_tokens=0, device=CPU) is None
    always = torch.zeros(75, dtype=torch.bool)
    always[[3, 60]] = True
    for first, text in ((True, range(5)), (False, range(70, 75))):
        found = static_columns(75, text_tokens=5, text_first=first, device=CPU)
        assert found.tolist() == [[column in text for column in range(75)]]
        found = static_columns(75, text_tokens=5, text_first=first, always=always, device=CPU)
        assert found.tolist() == [[column in (*text, 3, 60) for column in range(75)]]


def test_static_columns_are_always_kept():
    static = static_columns(TOKENS, text_tokens=2, device=CPU)
    cache, _, _ = refreshed("merge", budget=AttentionBudget(KEEP, 0, static, seed=1))
    mask = unpack_mask(cache.columns, TOKENS)
    assert mask[..., static[0]].all()
    assert (mask.sum(-1) == KEEP).all()


@pytest.mark.parametrize("rule", ["merge", "difference"])
def test_sparse_steps_know_the_length_of_the_lists(rule, monkeypatch):
    monkeypatch.setattr(attention, "LISTS_BYTES", 0)
    cache, config, _ = refreshed(rule)
    assert cache.capacity == int(unpack_mask(cache.columns, TOKENS).sum(-1).max()) == KEEP + RANDOM
    asked = watch(monkeypatch, "packed_to_indices", lambda _, kwargs: kwargs["capacity"])
    sparse_step(cache, given(), config=config)
    refresh_step(cache, given(), config=config, budget=BUDGET)
    # Only a new choice of columns makes the host wait.
    assert asked == [KEEP + RANDOM, None]


@pytest.mark.parametrize("rule", ["merge", "difference"])
def test_small_lists_are_kept_until_the_next_refresh(rule, monkeypatch):
    cache, config, _ = refreshed(rule)
    kept = sparse_step(cache, given(2), config=config)
    before = cache.lists
    refresh_step(cache, given(5), config=config, budget=BUDGET)
    assert not torch.equal(cache.lists[0], before[0])
    monkeypatch.setattr(attention, "LISTS_BYTES", 0)
    cache, config, _ = refreshed(rule)
    assert cache.lists is None
    assert torch.equal(sparse_step(cache, given(2), config=config), kept)


HEAD_BYTES = 2 * 5 * TOKENS * 4  # batch, groups, columns, fp32


@pytest.mark.parametrize("limit", [1, HEAD_BYTES, 2 * HEAD_BYTES, 3 * HEAD_BYTES])
def test_column_sums_of_a_few_heads_at_a_time(limit, monkeypatch):
    budget = AttentionBudget(KEEP, 0, torch.eye(5, TOKENS, dtype=torch.bool), seed=5)
    expected, _, output = refreshed("merge", budget=budget)
    held = watch(
        monkeypatch, "column_selection", lambda args, _: args[0].numel() * args[0].itemsize
    )
    monkeypatch.setattr(attention, "COLUMN_SUMS_BYTES", limit)
    found, _, found_output = refreshed("merge", budget=budget)
    assert sum(held) == 3 * HEAD_BYTES
    assert max(held) <= max(limit, HEAD_BYTES)  # one head is the least
    assert torch.equal(found_output, output)
    assert found_output.stride() == output.stride()
    for name in ("lse", "columns", "residual", "lse_dense", "kept_mass", "capacity"):
        one, other = getattr(found, name), getattr(expected, name)
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other)), name


def test_the_residual_of_a_few_heads_at_a_time(monkeypatch):
    expected, _, _ = refreshed("merge")
    assert expected.residual.stride() == inputs(0)[0].stride()
    monkeypatch.setattr(residual_reference, "TRANSIENT_BYTES", 1)
    found, _, _ = refreshed("merge")
    assert torch.equal(found.residual, expected.residual)
    assert found.residual.stride() == expected.residual.stride()


@pytest.mark.parametrize("rule", ["merge", "difference"])
def test_a_residual_in_fp8_changes_a_sparse_step_by_its_rounding_alone(rule):
    changed = [a + 0.1 * b for a, b in zip(inputs(), inputs(9), strict=True)]
    (full, config, output), (rounded, _, same) = (
        refreshed(rule, in_fp8=in_fp8) for in_fp8 in (False, True)
    )
    assert torch.equal(same, output)
    assert (full.residual_scale, rounded.residual.dtype) == (None, torch.float8_e4m3fn)
    assert rounded.residual.stride() == full.residual.stride()
    meant = rounded.residual.float() * rounded.residual_scale.unsqueeze(-1)
    expected, found = (
        sparse_step(cache, AttentionInputs(*changed), config=config) for cache in (full, rounded)
    )
    full.residual = meant
    torch.testing.assert_close(sparse_step(full, AttentionInputs(*changed), config=config), found)
    assert 0 < (found - expected).norm() < 0.03 * output.norm()


class InParts:
    """Heads that come in two turns."""

    def arrive(self):
        raise AssertionError("a sparse step need not wait for all heads")

    def each(self, compute):
        return torch.cat([compute(slice(0, 1)), compute(slice(1, None))], 1)


@pytest.mark.parametrize(
    ("rule", "in_fp8"), [("merge", False), ("merge", True), ("difference", True)]
)
def test_heads_in_turns_give_what_all_of_them_give(rule, in_fp8):
    cache, config, _ = refreshed(rule, in_fp8=in_fp8)
    expected = sparse_step(cache, given(9), config=config)
    found = sparse_step(cache, given(9), config=config, turns=InParts())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_random_columns_of_heads_in_chunks(monkeypatch):
    """They do not depend on the chunks, no two heads share them, and all are counted."""
    masks = []
    for limit in (2 << 30, 1, 1):
        monkeypatch.setattr(attention, "COLUMN_SUMS_BYTES", limit)
        masks.append(unpack_mask(refreshed("merge")[0].columns, TOKENS))
    assert (masks[1].sum(-1) == KEEP + RANDOM).all()
    assert torch.equal(masks[1], masks[2])
    assert torch.equal(masks[0], masks[1])
    budget = AttentionBudget(0, RANDOM, None, seed=5)
    alone = unpack_mask(refreshed("merge", budget=budget)[0].columns, TOKENS)
    assert len({tuple(row) for row in alone[0].flatten(1).int().tolist()}) == 3


@pytest.mark.parametrize("keep", [4, 20])
@pytest.mark.parametrize("text", [0, 8])
def test_lists_exceed_their_budget_only_for_nan(keep, text):
    config = AttentionConfig(block_size_q=ROWS)
    static = static_columns(TOKENS, text_tokens=text, device=CPU)
    budget = AttentionBudget(keep, RANDOM, static, seed=1, static_count=text)
    cache = AttentionCache()
    dense_step(cache, given())
    refresh_step(cache, given(), config=config, budget=budget)
    assert cache.capacity <= budget.most_columns < TOKENS
    cache.lse[0, 1, 20] = torch.nan
    refresh_step(cache, given(), config=config, budget=budget)
    assert cache.capacity == TOKENS > budget.most_columns


def test_backends_are_chosen_for_the_group_size():
    query = torch.zeros(1, 1, 8, 64)
    choices = backend_choices(AttentionInputs(query, query, query), block_size_q=100)
    assert {op: choice.backend.name for op, choice in choices.items()} == {
        "dense_attention": "library",
        "dense_attention_column_sums": "reference",
        "column_selection": "reference",
        "packed_to_indices": "reference",
        "column_sparse_attention": "reference",
    }
    assert [name for name, _ in choices["column_sparse_attention"].rejected] == ["gluon", "triton"]
    forced = backend_choices(
        AttentionInputs(query, query, query, backend="reference"), block_size_q=100
    )
    assert {choice.backend.name for choice in forced.values()} == {"reference"}


def watch(monkeypatch, name, look):
    """Notes what `look` sees in the arguments of each call of an op by `layers.attention`."""
    seen, op = [], getattr(attention, name)

    def watched(*args, **kwargs):
        seen.append(look(args, kwargs))
        return op(*args, **kwargs)

    monkeypatch.setattr(attention, name, watched)
    return seen


@pytest.mark.parametrize(("head", "block"), [(1, 0), (0, 2)])
def test_the_random_columns_of_some_heads_and_rows_are_those_of_all(head, block):
    """As of a process that has the last two heads alone, or the last three query blocks."""
    config, found = AttentionConfig(block_size_q=ROWS), []
    for first_head, first_block in ((0, 0), (head, block)):
        cache, own = AttentionCache(), given(0).of_heads(slice(first_head, None))
        own = replace(own, query=own.query[:, :, ROWS * first_block :])
        budget = AttentionBudget(
            0, RANDOM, None, seed=5, first_head=first_head, first_block=first_block
        )
        dense_step(cache, own)
        refresh_step(cache, own, config=config, budget=budget)
        found.append(unpack_mask(cache.columns, TOKENS))
    assert torch.equal(found[0][:, head:, block:], found[1])
