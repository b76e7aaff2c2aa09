import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from chipsparse.kernels.column_sparse_attention import (
    ColumnSparseAttention,
    column_sparse_attention,
    reference,
)
from chipsparse.kernels.column_sparse_attention.reference import apply_merge, merge_rounding
from tests.kernels.formulas import (
    DTYPES,
    LSE_TOLERANCE,
    TOLERANCE,
    LargestResult,
    assert_attention,
    assert_close,
    attention_inputs,
    backend_names,
    blocks_of,
    full_attention,
    index_lists,
    kernel_names,
    masked_attention,
    random_mask,
    scores_of,
)

FP8 = torch.float8_e4m3fn
HALF = [torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1, 1, 64), (2, 3, 7, 9, 64), (1, 2, 131, 333, 128), (2, 2, 1337, 131, 64)]


def attend(inputs, mask, block_size_q=128, **options):
    return column_sparse_attention(
        *inputs, *index_lists(mask), block_size_q=block_size_q, **options
    )


def recorded(cache, rule):
    """The part of the cache that a rule reads."""
    of_merge = {name: cache[name] for name in ("lse_dense", "kept_mass")}
    return {"delta_rule": rule, "residual": cache[rule], **of_merge}


def refreshed(inputs, mask, block_size_q, dtype):
    """The record of a refresh by the formulas: output, residuals of both rules, lse, mass."""
    output, lse = full_attention(*inputs)
    kept, kept_lse = masked_attention(*inputs, mask, block_size_q)
    mass = torch.exp(kept_lse - lse)
    return {
        "output": output.to(dtype),
        "difference": (output - kept).to(dtype),
        "merge": (output - mass[..., None] * kept).to(dtype),
        "lse_dense": lse.float(),
        "kept_mass": mass.float(),
    }


@backend_names(column_sparse_attention)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strided", [False, True])
def test_matches_masked_attention(backend, shape, dtype, strided, device):
    inputs = attention_inputs(*shape, dtype=dtype, device=device, strided=strided)
    mask = random_mask(*shape[:4], 128, device=device)
    output, lse = attend(inputs, mask, backend=backend)
    assert output.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_attention((output, lse), masked_attention(*inputs, mask, 128), dtype)


@backend_names(column_sparse_attention)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("block_size_q", "rows"),
    [(1, 5), (13, 40), (33, 70), (64, 131), (128, 300), (192, 300), (256, 300), (500, 333)],
)
def test_any_block_size_and_equal_counts(backend, block_size_q, rows, dtype, device):
    inputs = attention_inputs(2, 1, rows, 131, 64, dtype=dtype, device=device)
    scores = torch.rand(2, 1, blocks_of(rows, block_size_q), 131, device=device)
    mask = scores >= scores.topk(67).values[..., -1:]
    found = attend(inputs, mask, block_size_q, backend=backend)
    assert_attention(found, masked_attention(*inputs, mask, block_size_q), dtype)


@backend_names(column_sparse_attention)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 65, 128, 129, 199])
def test_any_count_in_shuffled_lists(backend, count, dtype, device):
    """Counts around the edges of tiles, lists in any order, read from a wider tensor."""
    inputs = attention_inputs(1, 1, 20, 200, 64, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(count)
    last = torch.tensor([199])  # the last row of all comes first
    lists = [torch.cat([last, torch.randperm(199, generator=generator)]) for _ in range(2)]
    wide = torch.stack(lists).view(1, 1, 2, 200)
    mask = torch.zeros(1, 1, 2, 200, dtype=torch.bool).scatter_(-1, wide[..., :count], True)
    counts = torch.full((1, 1, 2), count, dtype=torch.int32, device=device)
    wide = wide.int().to(device)
    found = column_sparse_attention(
        *inputs, wide[..., : count + 1], counts, block_size_q=16, backend=backend
    )
    assert_attention(found, masked_attention(*inputs, mask.to(device), 16), dtype)


@backend_names(column_sparse_attention)
@pytest.mark.parametrize("dtype", HALF)
def test_only_listed_rows_are_used(backend, dtype, device):
    """NaN in all other rows, row 0 among them, does not reach the result; nothing listed is 0."""
    query, key, value = attention_inputs(1, 2, 300, 200, 64, dtype=dtype, device=device)
    mask = torch.zeros(1, 2, 3, 200, dtype=torch.bool, device=device)
    mask[:, 0, 1, 7:20] = True
    mask[:, 0, 2, 40:170] = True
    mask[:, 1, :2, 1] = True
    expected, expected_lse = masked_attention(query, key, value, mask, 128)
    for tensor in (key, value):
        tensor.masked_fill_(~mask.any(2)[..., None], torch.nan)
    output, lse = attend((query, key, value), mask, backend=backend)
    assert_attention((output, lse), (expected, expected_lse), dtype)
    assert (output[:, 0, :128] == 0).all()
    assert (lse[:, 0, :128] == -torch.inf).all()


@backend_names(column_sparse_attention)
@pytest.mark.parametrize(
    ("rule", "block_size_q"), [(None, 128), ("difference", 64), ("merge", 128), ("merge", 192)]
)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf], ids=str)
def test_nan_and_infinity_come_out_where_they_went_in(backend, poison, rule, block_size_q, device):
    """In the rows that they enter, and nowhere else; nothing listed is still the cache alone."""
    shape = (1, 2, 3 * block_size_q - 5, 200, 64)
    inputs = attention_inputs(*shape, dtype=torch.bfloat16, device=device)
    mask = torch.zeros(1, 2, 3, 200, dtype=torch.bool, device=device)
    mask[:, 0, 1, 7:20] = True
    mask[:, 0, 2, 40:170] = True  # two tiles and a part
    mask[:, 1, :2, 1] = True
    cache = refreshed(inputs, mask, block_size_q, torch.float32)
    options = {"block_size_q": block_size_q, "backend": backend}
    if rule is not None:
        options |= recorded(cache, rule) | {"residual": cache[rule].bfloat16()}
    clean, _ = attend(inputs, mask, **options)
    assert clean.isfinite().all()
    lists = mask.repeat_interleave(block_size_q, 2)[:, :, : shape[2]]
    places = {
        # Rows: of a block that lists nothing, of one with a part of a tile, of one with several.
        0: [(0, 0, 5), (0, 0, block_size_q + 5), (0, 0, 2 * block_size_q + 5)],
        # Columns: of no list, of a part of a tile, of several tiles, alone in its lists.
        1: [(0, 0, 0), (0, 0, 12), (0, 0, 169), (0, 1, 1)],
        2: [(0, 0, 0), (0, 0, 12), (0, 0, 45), (0, 1, 1)],
    }
    for operand, poisoned_places in places.items():
        operands = [tensor.clone() for tensor in inputs]
        affected = torch.zeros_like(clean[..., 0], dtype=torch.bool)
        for b, h, n in poisoned_places:
            operands[operand][b, h, n, 3] = poison
            if operand == 0:
                affected[b, h, n] = lists[b, h, n].any()
            else:
                affected[b, h] |= lists[b, h, :, n]
        found, _ = attend(operands, mask, **options)
        assert torch.equal(found[~affected], clean[~affected])
        if operand == 2:
            assert not found[..., 3][affected].isfinite().any()
            continue
        if operand == 1 and poison is torch.inf:
            affected[:, 0] &= inputs[0][:, 0, :, 3] > 0  # a score of -inf is a weight of 0
        assert found[affected].isnan().all()


@backend_names(column_sparse_attention, left_out=("gluon", "reference"))
@pytest.mark.parametrize("head_dim", [64, 128])
def test_all_configs_of_triton(backend, head_dim, device):
    kernel = import_module("chipsparse.kernels.column_sparse_attention.triton_kernel")
    inputs = attention_inputs(1, 1, 300, 300, head_dim, dtype=torch.bfloat16, device=device)
    column_sparse_attention.choose(*inputs, 256, backend=backend)
    mask = random_mask(1, 1, 300, 300, 256, device=device)
    cache = refreshed(inputs, mask, 256, torch.float32)
    call = ColumnSparseAttention(
        *inputs,
        *index_lists(mask),
        block_size_q=256,
        delta_rule="merge",
        residual=cache["merge"].mT.contiguous().mT,  # any strides
        lse_dense=cache["lse_dense"],
        kept_mass=cache["kept_mass"],
    )
    for config in kernel.CONFIGS:
        output, _ = kernel.column_sparse_attention(call, config=config)
        assert_close(output, cache["output"], TOLERANCE[torch.bfloat16])


@backend_names(column_sparse_attention)
def test_output_of_a_kernel_is_laid_out_like_the_query(backend, device):
    inputs = attention_inputs(2, 3, 20, 30, 64, dtype=torch.float16, device=device, strided=True)
    mask = random_mask(2, 3, 20, 30, 128, device=device)
    for scale in (-0.2, 0.0):
        found = attend(inputs, mask, scale=scale, backend=backend)
        assert_attention(found, masked_attention(*inputs, mask, 128, scale), torch.float16)
    if backend != "reference":
        assert found[0].stride() == inputs[0].stride()


@pytest.mark.gpu
@kernel_names(column_sparse_attention)
def test_rows_beyond_32_bit_offsets(backend):
    """Keys of two heads in 4.3 GB, NaN (see conftest.py) but for the first and last rows."""
    columns = 2**24 + 100
    storage = torch.empty(1, columns, 2, 64, dtype=torch.bfloat16, device="cuda")
    used = torch.cat([torch.arange(100), torch.arange(columns - 100, columns)]).cuda()
    query, few, _ = attention_inputs(1, 2, 300, 200, 64, dtype=torch.bfloat16, device="cuda")
    storage[:, used] = few.transpose(1, 2)
    far = storage.transpose(1, 2)
    mask = random_mask(1, 2, 300, 200, 128, device="cuda")
    indices, counts = index_lists(mask)
    output, _ = column_sparse_attention(
        query, far, far, used[indices.long()].int(), counts, backend=backend
    )
    expected, _ = masked_attention(query, few, few, mask, 128)
    assert_close(output, expected, TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@kernel_names(column_sparse_attention)
def test_lists_beyond_32_bit_offsets(backend):
    """2,060 lists of 2^20 entries are 8.6 GB."""
    blocks = 2060
    inputs = attention_inputs(1, 1, blocks, 200, 64, dtype=torch.bfloat16, device="cuda")
    mask = torch.rand(1, 1, blocks, 200, device="cuda") < 0.5
    few, counts = index_lists(mask)
    indices = torch.zeros(1, 1, blocks, 2**20, dtype=torch.int32, device="cuda")
    indices[..., : few.shape[-1]] = few
    output, _ = column_sparse_attention(*inputs, indices, counts, block_size_q=1, backend=backend)
    expected, _ = masked_attention(*inputs, mask, 1)
    assert_close(output, expected, TOLERANCE[torch.bfloat16])


def attention_with_means(inputs, mask, block_size_q, means, weight, scale):
    """One softmax over the kept columns and the means, in float64."""
    query, key, value = inputs
    scores = scores_of(query, key, scale)
    kept = mask.repeat_interleave(block_size_q, dim=2)[:, :, : query.shape[2]]
    of_means = scores_of(query, means[0], scale) + math.log(weight)
    scores = torch.cat([scores.masked_fill(~kept, -torch.inf), of_means], -1)
    return scores.softmax(-1) @ torch.cat([value, means[1]], 2).double(), scores.logsumexp(-1)


@backend_names(column_sparse_attention)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(
    ("shape", "block_size_q", "count"),
    [
        ((2, 2, 333, 131, 64), 128, 130),
        ((1, 2, 200, 60, 128), 64, 1),
        ((1, 1, 390, 80, 64), 192, 64),
    ],
)
@pytest.mark.parametrize(("rule", "scale"), [(None, -0.2), ("difference", None), ("merge", None)])
def test_means_are_columns_that_count_several_times(
    backend, rule, scale, shape, block_size_q, count, dtype, device
):
    """For every block, also the first one, which keeps no column."""
    options = {"dtype": dtype, "device": device, "strided": True}
    inputs = attention_inputs(*shape, **options)
    mask = random_mask(*shape[:4], block_size_q, device=device)
    _, *means = attention_inputs(*shape[:3], count, shape[4], **options, seed=1)
    cache = refreshed(inputs, mask, block_size_q, torch.float32)
    output, lse = attend(
        *(inputs, mask, block_size_q),
        mean_key=means[0],
        mean_value=means[1],
        mean_weight=5.0,
        scale=scale,
        **({} if rule is None else recorded(cache, rule)),
        backend=backend,
    )
    kept, kept_lse = attention_with_means(inputs, mask, block_size_q, means, 5.0, scale)
    residual = 0 if rule is None else cache[rule]
    expected = kept if rule is None else joined(rule, kept, kept_lse, residual, cache)
    assert_close(lse, kept_lse, LSE_TOLERANCE[dtype])
    tolerance = TOLERANCE[dtype] if rule is None else max(TOLERANCE[dtype], 1e-6)
    assert_close(output, expected, tolerance)


@backend_names(column_sparse_attention)
@pytest.mark.parametrize("block_size_q", [64, 192])
def test_nan_in_a_mean_reaches_its_whole_head_and_in_a_dropped_column_nothing(
    backend, block_size_q, device
):
    options = {"dtype": torch.bfloat16, "device": device}
    inputs = attention_inputs(1, 2, 3 * block_size_q, 200, 64, **options)
    mask = torch.zeros(1, 2, 3, 200, dtype=torch.bool, device=device)
    mask[:, :, 1, 7:150] = True
    _, mean_key, mean_value = attention_inputs(1, 2, 1, 90, 64, **options)
    means = {"mean_key": mean_key, "mean_value": mean_value}
    call = {"block_size_q": block_size_q, "mean_weight": 2.0, "backend": backend}
    clean, _ = attend(inputs, mask, **means, **call)
    assert clean.isfinite().all()
    for tensor in inputs[1:]:
        tensor.masked_fill_(~mask.any(2)[..., None], torch.nan)
    assert torch.equal(attend(inputs, mask, **means, **call)[0], clean)
    for name, place in (("mean_key", 0), ("mean_value", 89)):
        poisoned = means | {name: means[name].clone()}
        poisoned[name][0, 1, place] = torch.nan
        output, _ = attend(inputs, mask, **poisoned, **call)
        assert torch.equal(output[:, 0], clean[:, 0])
        assert output[:, 1].isnan().all()


@backend_names(column_sparse_attention)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nothing_kept_is_zero(backend, dtype, device):
    inputs = attention_inputs(1, 2, 150, 40, 64, dtype=dtype, device=device)
    counts = torch.zeros(1, 2, 2, dtype=torch.int32, device=device)
    for capacity in (0, 5):
        indices = torch.zeros(1, 2, 2, capacity, dtype=torch.int32, device=device)
        output, lse = column_sparse_attention(*inputs, indices, counts, backend=backend)
        assert (output == 0).all()
        assert (lse == -torch.inf).all()


@backend_names(column_sparse_attention)
def test_large_scores_do_not_overflow(backend, device):
    query, key, value = attention_inputs(1, 1, 140, 40, 64, dtype=torch.float32, device=device)
    mask = random_mask(1, 1, 140, 40, 70, device=device)
    inputs = (query * 1000, key, value)
    output, lse = attend(inputs, mask, 70, backend=backend)
    expected, expected_lse = masked_attention(*inputs, mask, 70)
    assert_close(output, expected, 1e-3)
    assert_close(lse, expected_lse, 1e-5)


def joined(rule, kept, kept_lse, residual, cache, rounding=0.0):
    """The formulas of both rules in float64; within the rounding nothing was dropped."""
    if rule == "difference":
        return kept + residual.double()
    now = torch.exp(kept_lse - cache["lse_dense"].double())[..., None]
    dropped = 1 - cache["kept_mass"].double()[..., None]
    merged = (now * kept + residual.double()) / (now + dropped)
    return torch.where(dropped <= rounding, kept, merged)


@backend_names(column_sparse_attention)
@pytest.mark.parametrize("rule", ["merge", "difference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("changed", [False, True])
def test_rules_match_their_formulas(backend, changed, rule, dtype, strided, device):
    """Where nothing changed, they give the cached output back."""
    shape = (2, 2, 333, 131, 64)
    before, inputs = (
        attention_inputs(*shape, dtype=dtype, device=device, strided=strided, seed=seed)
        for seed in (0, int(changed))
    )
    mask = random_mask(*shape[:4], 32, device=device)
    if changed:
        mask[:, :, -1, ::3] = False
    cache = refreshed(before, mask, 32, torch.float32 if changed else dtype)
    output, lse = attend(inputs, mask, 32, **recorded(cache, rule), backend=backend)
    kept, kept_lse = masked_attention(*inputs, mask, 32)
    assert output.dtype == dtype
    assert_close(lse, kept_lse, LSE_TOLERANCE[dtype])
    if changed:
        assert_close(output, joined(rule, kept, kept_lse, cache[rule], cache), TOLERANCE[dtype])
    else:
        assert_close(output, cache["output"], TOLERANCE[dtype])
        # Nothing is kept in the first block: the cached output itself.
        assert torch.equal(output[:, :, :32], cache["output"][:, :, :32])


@backend_names(column_sparse_attention)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [-1e5, -300.0, -90.0, 90.0, 300.0, 1e5])
def test_merge_under_huge_shifts(backend, shift, dtype, device):
    """Kept columns that take over leave A, those that vanish leave the dropped columns' output."""
    inputs = attention_inputs(1, 2, 100, 90, 64, dtype=dtype, device=device)
    mask = torch.zeros(1, 2, 2, 90, dtype=torch.bool, device=device)
    mask[:, :, 0, ::2] = True
    mask[:, :, 1] = True
    cache = refreshed(inputs, mask, 64, dtype)
    kept, kept_lse = masked_attention(*inputs, mask, 64)
    shifted = recorded(cache, "merge") | {"lse_dense": (kept_lse - shift).float()}
    output, _ = attend(inputs, mask, 64, **shifted, backend=backend)
    dropped, _ = masked_attention(*inputs, ~mask, 64)
    expected = kept if shift > 0 else dropped
    assert_close(output[:, :, :64], expected[:, :, :64], 4 * TOLERANCE[dtype])
    assert_close(output[:, :, 64:], kept[:, :, 64:], TOLERANCE[dtype])  # nothing was dropped there


@backend_names(column_sparse_attention)
@pytest.mark.parametrize("rule", ["merge", "difference"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("strided", [False, True])
def test_a_residual_in_fp8_counts_as_what_it_stands_for(backend, rule, head_dim, strided, device):
    shape = (2, 2, 300, 131, head_dim)
    inputs = attention_inputs(*shape, dtype=torch.bfloat16, device=device, strided=strided)
    mask = random_mask(*shape[:4], 128, device=device)
    other = attention_inputs(*shape, dtype=torch.bfloat16, device=device, strided=strided, seed=1)
    cache = refreshed(other, mask, 128, torch.float32)
    scale = cache[rule].abs().amax(-1).clamp(min=1e-30) / 448
    rounded = torch.empty_like(inputs[0], dtype=torch.float8_e4m3fn)
    rounded.copy_(cache[rule] / scale[..., None])
    rounded[0, 0, 0, 0], rounded[0, 0, 0, 1] = 0.0, -(2**-9)  # its smallest number
    meant = rounded.double() * scale.double()[..., None]
    rounded_cache = recorded(cache, rule) | {"residual": rounded, "residual_scale": scale}
    output, _ = attend(inputs, mask, **rounded_cache, backend=backend)
    kept, kept_lse = masked_attention(*inputs, mask, 128)
    # Within the rounding of the outputs nothing was dropped, whatever that of e4m3 is.
    rounding = torch.finfo(torch.bfloat16).eps
    dropped = 1 - cache["kept_mass"]
    assert (dropped <= rounding).any()
    assert (dropped[dropped > rounding] < torch.finfo(FP8).eps).any()
    expected = joined(rule, kept, kept_lse, meant, cache, rounding)
    assert_close(output, expected, TOLERANCE[torch.bfloat16])


@backend_names(column_sparse_attention)
@pytest.mark.parametrize("residuals", ["bf16", "fp8"])
@pytest.mark.parametrize("batch", [1, 2])
def test_heads_in_turn_beside_an_exchange_are_those_of_one_launch(
    backend, residuals, batch, device
):
    """Bit for bit: a block's rows do not depend on which program has them, nor on other heads."""
    if backend == "reference" and device.type == "cuda":
        pytest.skip("cuBLAS takes other ways for other numbers of heads")
    shape = (batch, 3, 300, 131, 64)
    inputs = attention_inputs(*shape, dtype=torch.bfloat16, device=device, strided=True)
    mask = random_mask(*shape[:4], 128, device=device)
    cache = refreshed(inputs, mask, 128, torch.bfloat16)
    residual, scale = cache["merge"], None
    if residuals == "fp8":
        residual, scale = residual.to(FP8), torch.rand(shape[:3], device=device) + 0.5
    call = ColumnSparseAttention(
        *inputs,
        *index_lists(mask),
        delta_rule="merge",
        residual=residual,
        residual_scale=scale,
        lse_dense=cache["lse_dense"],
        kept_mass=cache["kept_mass"],
        shares_device=True,
        backend=backend,
    )
    whole, lse = column_sparse_attention.run(replace(call, shares_device=False))
    for heads in (slice(0, 2), slice(2, 3)):
        part, part_lse = column_sparse_attention.run(call.of_heads(heads))
        assert torch.equal(part, whole[:, heads])
        assert torch.equal(part_lse, lse[:, heads])


def test_merge_formula_at_its_edges():
    kept = torch.tensor([[1.0, 2.0]] * 6)
    residual = torch.tensor([[0.3, -0.4]] * 6)
    inf = torch.inf
    kept_lse = torch.tensor([2.0, -inf, 5.0, 2.0, 1e4, 0.0])
    lse_dense = torch.tensor([2.5, 1.0, 5.0, 2.0, 0.0, 1e4])
    kept_mass = torch.tensor([0.4, 0.0, 1 - 60 * 2**-23, 1.0000002, 1.0, 1 - 60 * 2**-23])
    rounding = merge_rounding(torch.float32, torch.float32)
    result = apply_merge(kept, kept_lse, residual, lse_dense, kept_mass, rounding=rounding)
    a = torch.exp(torch.tensor(-0.5))
    assert_close(result[0], (a * kept[0] + residual[0]) / (a + 0.6), 1e-6)
    assert torch.equal(result[1], residual[1])
    # All mass was kept, if rounding says more or less than all: A, no ratio of rounding errors.
    assert torch.equal(result[2:], kept[2:])


@backend_names(column_sparse_attention)
@pytest.mark.parametrize("dtype", DTYPES)
def test_repeats_bit_for_bit_and_spares_its_inputs(backend, dtype, device):
    inputs = attention_inputs(2, 2, 333, 131, 64, dtype=dtype, device=device)
    mask = random_mask(2, 2, 333, 131, 128, device=device)
    cache = refreshed(inputs, mask, 128, dtype)
    tensors = (*inputs, *cache.values())
    copies = [tensor.clone() for tensor in tensors]
    first, second = (
        attend(inputs, mask, **recorded(cache, "merge"), backend=backend) for _ in range(2)
    )
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, tensors, copies))


@pytest.mark.parametrize("blocks_at_once", [1, 3])
def test_transient_memory_stays_within_the_limit(blocks_at_once, monkeypatch):
    inputs = attention_inputs(1, 1, 640, 2000, 16, dtype=torch.float32, device="cpu")
    mask = torch.rand(1, 1, 10, 2000) < 0.5
    indices, counts = index_lists(mask)
    limit = blocks_at_once * 2 * (64 + 16) * indices.shape[-1] * 4
    options = {"block_size_q": 64, "backend": "reference"}
    large = column_sparse_attention(*inputs, indices, counts, **options)
    monkeypatch.setattr(reference, "tile_bytes", lambda _: limit)
    with LargestResult() as largest:
        small = column_sparse_attention(*inputs, indices, counts, **options)
    assert 0 < largest.nbytes <= blocks_at_once * 64 * indices.shape[-1] * 4  # the scores
    for a, b in zip(small, large, strict=True):
        assert_close(a, b, 1e-5)
