"""What each action of self-attention computes and records, against float64 formulas."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from chipsparse.config import AttentionConfig, ConfigError, SparsityConfig
from chipsparse.kernels.dispatch import Backend, Choice
from chipsparse.kernels.mask_packing import unpack_mask
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.sparse.cache.tensors import AttentionCache, Kept
from chipsparse.sparse.layers import attention, full_attention
from chipsparse.sparse.layers.attention import dense_step, refresh_step, sparse_step
from chipsparse.sparse.layers.column_budget import AttentionBudget, static_columns
from chipsparse.sparse.layers.column_source import ChosenHere, OfBranch, OfProcess
from chipsparse.sparse.layers.full_attention import AttentionInputs
from tests.kernels import formulas

ROWS = 16
TOKENS = 75
KEEP = 23
BUDGET = AttentionBudget(KEEP, None)
RULES = ["difference", "block_means"]
CPU = torch.device("cpu")


def inputs(seed=0, *, dim=32, tokens=TOKENS):
    options = {"dtype": torch.float32, "device": "cpu", "strided": True, "seed": seed}
    return formulas.attention_inputs(2, 3, tokens, tokens, dim, **options)


def given(seed=0, **sizes):
    return AttentionInputs(*inputs(seed, **sizes))


CHANGED = [a + 0.1 * b for a, b in zip(inputs(), inputs(9), strict=True)]


def mean_of_blocks(rows):
    """The mean of every 128 rows ``[B, H, M, D]``, and of those that are left."""
    return torch.stack([part.mean(2) for part in rows.double().split(128, 2)], 2)


def kept_attention(tensors, mask, rule):
    """By the formulas, over kept columns; with means also over those of every 128 columns."""
    if rule == "difference":
        return formulas.masked_attention(*tensors, mask, ROWS)
    means = [mean_of_blocks(rows) for rows in tensors[1:]]
    return formulas.attention_with_means(tensors, mask, ROWS, means, 40)


def mask_of(cache):
    return unpack_mask(cache.columns, TOKENS)


def refreshed(rule="block_means", *, budget=BUDGET, in_fp8=False, tensors=None, **config):
    """The cache, the config and the output of a refresh after a dense step."""
    cache = AttentionCache(in_fp8=in_fp8)
    tensors = tensors or given()
    attention = AttentionConfig(delta_rule=rule, **config)
    settings = SparsityConfig(attention=attention, block_size=ROWS)
    dense_step(cache, tensors, in_fp8=attention.in_fp8)
    output = refresh_step(cache, tensors, config=settings, source=ChosenHere(budget))
    return cache, settings, output


def close(result, expected, tolerance=1e-5):
    torch.testing.assert_close(result.double(), expected.double(), atol=tolerance, rtol=tolerance)


def watch(monkeypatch, name, look):
    """Notes what `look` sees in the arguments of each call of an op by `layers.attention`."""
    seen = []
    op = getattr(attention, name)

    def watched(*args, **kwargs):
        seen.append(look(args, kwargs))
        return op(*args, **kwargs)

    monkeypatch.setattr(attention, name, watched)
    return seen


class OtherProcesses:
    """Notes what is asked of it; ``columns`` is what the first process sends."""

    def __init__(self, order, columns):
        self.order = order
        self.columns = columns

    def take(self, shape, device):
        assert (shape, device) == (tuple(self.columns.shape), self.columns.device)
        self.order.append("asked")
        return self.columns

    def give(self, columns):
        assert columns.shape == self.columns.shape
        self.order.append("given")


def test_columns_of_another_process_are_asked_for_after_attention_and_given_before_a_residual(
    monkeypatch,
):
    order = []
    for name in ("dense_step", "dense_attention_column_sums", "packed_to_indices"):
        watch(monkeypatch, name, lambda *_, name=name: order.append(name))
    first, config, _ = refreshed()
    other = AttentionCache()
    tensors = given(5)
    dense_step(other, tensors)
    order.clear()
    others = OtherProcesses(order, first.columns)
    source = OfProcess(BUDGET, others, tuple(first.columns.shape), CPU)
    refresh_step(other, tensors, config=config, source=source)
    assert order == ["dense_step", "asked", "packed_to_indices"]
    assert torch.equal(other.columns, first.columns)
    order.clear()
    refresh_step(other, tensors, config=config, source=ChosenHere(BUDGET, others))
    assert order == ["dense_attention_column_sums", "given", "packed_to_indices"]


def test_columns_of_another_branch_are_kept_as_they_are():
    first, config, _ = refreshed()
    other, _, own = refreshed(tensors=given(5))
    assert not torch.equal(other.columns, first.columns)
    columns = first.columns.clone()
    output = refresh_step(other, given(5), config=config, source=OfBranch(BUDGET, columns))
    close(output, own)
    assert other.columns is columns
    assert torch.equal(mask_of(other), mask_of(first))
    close(sparse_step(other.refreshed(), given(5), config=config), output)


def test_steps_without_what_they_read_say_what_is_missing():
    cache = AttentionCache()
    with pytest.raises(RuntimeError, match="follows no dense step"):
        refresh_step(cache, given(), config=SparsityConfig(), source=ChosenHere(BUDGET))
    with pytest.raises(RuntimeError, match="follows no refresh"):
        cache.refreshed()
    with pytest.raises(RuntimeError, match="before a refresh selected them"):
        cache.selected()


def test_dense_steps_and_refreshes_compute_full_attention():
    cache = AttentionCache()
    expected, lse = formulas.full_attention(*inputs())
    close(dense_step(cache, given()), expected)
    close(cache.lse, lse)
    for rule in RULES:
        cache, config, output = refreshed(rule)
        close(output, expected)
        # Where nothing has changed, a sparse step gives it back.
        close(sparse_step(cache, given(), config=config), output)
        cache, config, _ = refreshed(rule, budget=replace(BUDGET, keep_count=TOKENS))
        changed, _ = formulas.full_attention(*CHANGED)
        close(sparse_step(cache, AttentionInputs(*CHANGED), config=config), changed)


@pytest.mark.parametrize("rule", RULES)
def test_sparse_follows_the_formulas_when_something_changed(rule):
    cache, config, _ = refreshed(rule)
    dense, _ = formulas.full_attention(*inputs())
    kept, new = (kept_attention(tensors, mask_of(cache), rule) for tensors in (inputs(), CHANGED))
    close(sparse_step(cache, AttentionInputs(*CHANGED), config=config), dense - kept + new)


@pytest.mark.parametrize("rule", RULES)
def test_a_residual_in_fp8_changes_a_sparse_step_by_its_rounding_alone(rule):
    (full, config, output) = refreshed(rule)
    (rounded, _, same) = refreshed(rule, in_fp8=True)
    assert torch.equal(same, output)
    assert (full.residual_scale, rounded.residual.dtype) == (None, torch.float8_e4m3fn)
    assert rounded.residual.stride() == full.residual.stride()
    meant = rounded.residual.float() * rounded.residual_scale.unsqueeze(-1)
    changed = AttentionInputs(*CHANGED)
    expected, result = (sparse_step(cache, changed, config=config) for cache in (full, rounded))
    full.residual = meant
    close(sparse_step(full, changed, config=config), result)
    assert 0 < (result - expected).norm() < 0.03 * output.norm()


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_means_of_blocks_are_summed_in_float32_at_least(tokens, dtype):
    generator = torch.Generator().manual_seed(tokens)
    rows = torch.randn(2, tokens, 3, 8, generator=generator).to(dtype).transpose(1, 2)
    means = attention.block_means(rows)
    expected = mean_of_blocks(rows)
    assert means.dtype == dtype
    close(means, expected.to(dtype), 1e-12 if dtype == torch.float64 else 8e-3)


@pytest.mark.parametrize("limit", [2 << 30, 1])
@pytest.mark.parametrize("branches", [1, 2])
def test_refresh_keeps_the_columns_with_the_most_mass(branches, limit, monkeypatch):
    """Guidance branches in one batch keep those with the most mass together."""
    monkeypatch.setattr(attention, "COLUMN_SUMS_BYTES", limit)
    cache, _, _ = refreshed(budget=replace(BUDGET, branches=branches))
    query, key, _ = inputs()
    _, lse = formulas.full_attention(*inputs())
    sums = formulas.column_sums_of(query, key, lse, ROWS)
    mask = mask_of(cache)
    if branches == 2:
        sums = sums.sum(0, keepdim=True).expand_as(sums)
        assert torch.equal(*mask)
    assert mask.gather(-1, sums.topk(KEEP, dim=-1).indices).all()
    assert (mask.sum(-1) == KEEP).all()


def with_text(tokens, *, first=False):
    """The layout of a call with so many text tokens among all."""
    kinds = (LayerKind("block", 1, 8),)
    grids = ((1, 1, TOKENS - tokens),)
    return ModelLayout(kinds, 2, 8, 1, grids, text_tokens=tokens, text_first=first)


def test_static_columns_are_those_of_the_text_and_of_the_user_and_always_kept():
    assert static_columns(with_text(0), None, CPU) is None
    always = torch.zeros(TOKENS, dtype=torch.bool)
    always[[3, 60]] = True
    for first, text in ((True, range(5)), (False, range(70, 75))):
        for user, more in ((None, ()), (always, (3, 60))):
            static = static_columns(with_text(5, first=first), user, CPU)
            assert static.tolist() == [n in (*text, *more) for n in range(TOKENS)]
    mask = mask_of(refreshed(budget=AttentionBudget(KEEP, static))[0])
    assert mask[..., static].all()
    assert (mask.sum(-1) == KEEP).all()


@pytest.mark.parametrize(("keep", "text"), [(4, 0), (4, 8), (20, 8)])
def test_lists_exceed_their_budget_only_for_nan(keep, text):
    static = static_columns(with_text(text), None, CPU)
    budget = AttentionBudget(keep, static, static_count=text)
    cache, config, _ = refreshed(budget=budget)
    assert cache.capacity <= budget.most_columns < TOKENS
    cache.lse[0, 1, 20] = torch.nan
    refresh_step(cache, given(), config=config, source=ChosenHere(budget))
    assert cache.capacity == TOKENS > budget.most_columns


def test_sparse_steps_know_the_lists_and_small_ones_are_kept_until_the_next_refresh(monkeypatch):
    cache, config, _ = refreshed()
    kept = sparse_step(cache, given(2), config=config)
    before = cache.lists
    assert before.indices.shape[-1] == cache.capacity
    refresh_step(cache, given(5), config=config, source=ChosenHere(BUDGET))
    assert not torch.equal(cache.lists[0], before[0])
    monkeypatch.setattr(Kept.LISTS, "most_bytes", 0)
    cache, config, _ = refreshed()
    assert cache.lists is None
    assert cache.capacity == int(mask_of(cache).sum(-1).max()) == KEEP
    asked = watch(monkeypatch, "packed_to_indices", lambda _, kwargs: kwargs["capacity"])
    assert torch.equal(sparse_step(cache, given(2), config=config), kept)
    refresh_step(cache, given(), config=config, source=ChosenHere(BUDGET))
    assert asked == [KEEP, None]  # only a new choice of columns makes the host wait


HEAD_BYTES = 2 * 5 * TOKENS * 4  # batch, groups, columns, fp32


@pytest.mark.parametrize("precision", ["model", "fp8"])
@pytest.mark.parametrize("limit", [1, 2 * HEAD_BYTES, 3 * HEAD_BYTES])
def test_column_sums_of_a_few_heads_at_a_time(limit, precision, monkeypatch):
    budget = AttentionBudget(KEEP, torch.arange(TOKENS) % 9 == 0)
    expected, _, output = refreshed(budget=budget, precision=precision)
    held = watch(monkeypatch, "column_selection", lambda args, _: args[0].nbytes)
    monkeypatch.setattr(attention, "COLUMN_SUMS_BYTES", limit)
    cache, _, in_chunks = refreshed(budget=budget, precision=precision)
    assert sum(held) == 3 * HEAD_BYTES
    assert max(held) <= max(limit, HEAD_BYTES)  # one head is the least
    assert torch.equal(in_chunks, output)
    assert (in_chunks.stride(), cache.residual.stride()) == (output.stride(), inputs()[0].stride())
    for name in ("lse", "columns", "residual", "capacity"):
        one = getattr(cache, name)
        other = getattr(expected, name)
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other)), name


class InParts:
    """Heads that come in two chunks."""

    def receive(self):
        raise AssertionError("a sparse step need not wait for all heads")

    def attend(self, compute):
        return torch.cat([compute(slice(0, 1)), compute(slice(1, None))], 1)


@pytest.mark.parametrize(("rule", "in_fp8"), [("difference", False), ("block_means", True)])
def test_heads_in_chunks_give_what_all_of_them_give(rule, in_fp8):
    cache, config, _ = refreshed(rule, in_fp8=in_fp8)
    expected = sparse_step(cache, given(9), config=config)
    in_chunks = replace(given(9), chunks=InParts())
    close(sparse_step(cache, in_chunks, config=config), expected, 1e-6)


@pytest.mark.parametrize("dim", [32, 24])  # one that can be rotated, and one that cannot
def test_full_attention_in_fp8_is_rounded_and_its_lse_hardly(dim):
    tensors = given(dim=dim)
    (expected, lse) = formulas.full_attention(*inputs(dim=dim))
    dense = AttentionCache()
    output = dense_step(dense, tensors, in_fp8=True)
    assert (dense.lse - lse).pow(2).mean().sqrt() < 3e-3
    exact, _, _ = refreshed(tensors=tensors)
    cache, config, again = refreshed(tensors=tensors, precision="fp8")
    for result in (output, again):
        error = (result.double() - expected).norm() / expected.norm()
        assert 1e-2 < error < 5e-2  # of random values, whose mean is near zero
    assert (mask_of(cache) == mask_of(exact)).double().mean() > 0.99
    close(sparse_step(cache, tensors, config=config), again)  # where nothing changed


def test_a_gpu_without_fp8_is_refused(monkeypatch):
    reference = Choice(Backend("reference", lambda: None), (("triton", "capability 8.0 has none"),))
    operation = SimpleNamespace(choose=lambda *_, **__: reference)
    monkeypatch.setattr(full_attention, "fp8_quantization", operation)
    monkeypatch.setattr(full_attention, "fp8_dense_attention", operation)
    on_gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    tensors = AttentionInputs(on_gpu, on_gpu, on_gpu)
    sentence = r"^attention.precision fp8 cannot run here: capability 8.0 has none$"
    with pytest.raises(ConfigError, match=sentence):
        full_attention.fp8_choices(tensors, block_size_q=128)
    assert full_attention.fp8_choices(replace(tensors, backend="reference"), block_size_q=128)
