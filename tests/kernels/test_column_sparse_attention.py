from dataclasses import replace
from importlib import import_module

import pytest
import torch

from chipsparse.kernels.column_sparse_attention import (
    ColumnSparseAttention,
    column_sparse_attention,
)
from tests.kernels import formulas
from tests.kernels.formulas import attention_inputs, backend_names, masked_attention, random_mask

FP8 = torch.float8_e4m3fn
SHAPES = [(1, 1, 1, 1, 64), (2, 3, 7, 9, 64), (1, 2, 131, 333, 128), (2, 2, 1337, 131, 64)]


def attend(inputs, mask, block_size_q=128, **options):
    lists = formulas.index_lists(mask)
    return column_sparse_attention(*inputs, *lists, block_size_q=block_size_q, **options)


def refreshed(inputs, mask, block_size_q, dtype):
    """Output and residual of a refresh by the formulas, laid out like the query."""
    output, _ = formulas.full_attention(*inputs)
    kept = masked_attention(*inputs, mask, block_size_q)
    return [torch.empty_like(inputs[0], dtype=dtype).copy_(a) for a in (output, output - kept)]


def given(residual, form):
    """A residual as arguments, in FP8 where the form says so, and what they stand for."""
    if form != "fp8":
        return {"residual": residual}, residual.double()
    scale = residual.abs().amax(-1).float().clamp(min=1e-30) / 448
    rounded = (residual / scale[..., None]).to(FP8)
    rounded[0, 0, 0, 0] = 0.0
    rounded[0, 0, 0, 1] = -(2**-9)  # its smallest number
    meant = rounded.double() * scale.double()[..., None]
    return {"residual": rounded, "residual_scale": scale}, meant


@backend_names(column_sparse_attention)
@pytest.mark.parametrize("dtype", [*formulas.DTYPES, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strided", [False, True])
def test_matches_masked_attention(backend, shape, dtype, strided, device):
    inputs = attention_inputs(*shape, dtype=dtype, device=device, strided=strided)
    mask = random_mask(*shape[:4], 128, device=device)
    output = attend(inputs, mask, backend=backend)
    assert output.dtype == dtype
    formulas.assert_close(output, masked_attention(*inputs, mask, 128), dtype)


@backend_names(column_sparse_attention)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("block_size_q", "rows"),
    [(1, 5), (13, 40), (33, 70), (64, 131), (128, 300), (192, 300), (256, 300), (500, 333)],
)
def test_any_block_size_and_equal_counts(backend, block_size_q, rows, dtype, device):
    inputs = attention_inputs(2, 1, rows, 131, 64, dtype=dtype, device=device)
    scores = torch.rand(2, 1, formulas.blocks_of(rows, block_size_q), 131, device=device)
    mask = scores >= scores.topk(67).values[..., -1:]
    found = attend(inputs, mask, block_size_q, backend=backend)
    formulas.assert_close(found, masked_attention(*inputs, mask, block_size_q), dtype)


@backend_names(column_sparse_attention)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
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
    lists = wide.int().to(device)[..., : count + 1], counts
    found = column_sparse_attention(*inputs, *lists, block_size_q=16, backend=backend)
    formulas.assert_close(found, masked_attention(*inputs, mask.to(device), 16), dtype)


@backend_names(column_sparse_attention)
@pytest.mark.parametrize(("adds", "block_size_q"), [(False, 128), (True, 64), (True, 192)])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf], ids=str)
def test_nan_and_infinity_come_out_where_they_went_in(backend, poison, adds, block_size_q, device):
    """In the rows that they enter, and nowhere else; nothing listed is still the cache alone."""
    shape = (1, 2, 3 * block_size_q - 5, 200, 64)
    inputs = attention_inputs(*shape, dtype=torch.bfloat16, device=device)
    mask = torch.zeros(1, 2, 3, 200, dtype=torch.bool, device=device)
    mask[:, 0, 1, 7:20] = True
    mask[:, 0, 2, 40:170] = True  # two tiles and a part
    mask[:, 1, :2, 1] = True
    _, residual = refreshed(inputs, mask, block_size_q, torch.bfloat16)
    options = {"residual": residual if adds else None}
    options |= {"block_size_q": block_size_q, "backend": backend}
    clean = attend(inputs, mask, **options)
    assert clean.isfinite().all()
    nothing = attend(inputs, torch.zeros_like(mask), **options)
    assert torch.equal(nothing, residual if adds else torch.zeros_like(clean))
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
        found = attend(operands, mask, **options)
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
    expected, residual = refreshed(inputs, mask, 256, torch.float32)
    lists = formulas.index_lists(mask)
    strided = residual.mT.contiguous().mT
    call = ColumnSparseAttention(*inputs, *lists, block_size_q=256, residual=strided)
    for config in kernel.CONFIGS:
        output = kernel.column_sparse_attention(call, config=config)
        formulas.assert_close(output, expected, torch.bfloat16)


@backend_names(column_sparse_attention)
def test_output_of_a_kernel_is_laid_out_like_the_query(backend, device):
    inputs = attention_inputs(2, 3, 20, 30, 64, dtype=torch.float16, device=device, strided=True)
    mask = random_mask(2, 3, 20, 30, 128, device=device)
    for scale in (-0.2, 0.0):
        found = attend(inputs, mask, scale=scale, backend=backend)
        expected = masked_attention(*inputs, mask, 128, scale)
        formulas.assert_close(found, expected, torch.float16)
    if backend != "reference":
        assert found.stride() == inputs[0].stride()


@pytest.mark.gpu
@formulas.kernel_names(column_sparse_attention)
def test_rows_beyond_32_bit_offsets(backend):
    """Keys of two heads in 4.3 GB, NaN (see conftest.py) but for the first and last rows."""
    columns = 2**24 + 100
    storage = torch.empty(1, columns, 2, 64, dtype=torch.bfloat16, device="cuda")
    used = torch.cat([torch.arange(100), torch.arange(columns - 100, columns)]).cuda()
    query, few, _ = attention_inputs(1, 2, 300, 200, 64, dtype=torch.bfloat16, device="cuda")
    storage[:, used] = few.transpose(1, 2)
    far = storage.transpose(1, 2)
    mask = random_mask(1, 2, 300, 200, 128, device="cuda")
    indices, counts = formulas.index_lists(mask)
    lists = used[indices.long()].int(), counts
    output = column_sparse_attention(query, far, far, *lists, backend=backend)
    expected = masked_attention(query, few, few, mask, 128)
    formulas.assert_close(output, expected, torch.bfloat16)


@pytest.mark.gpu
@formulas.kernel_names(column_sparse_attention)
def test_lists_beyond_32_bit_offsets(backend):
    """2,060 lists of 2^20 entries are 8.6 GB."""
    blocks = 2060
    inputs = attention_inputs(1, 1, blocks, 200, 64, dtype=torch.bfloat16, device="cuda")
    mask = torch.rand(1, 1, blocks, 200, device="cuda") < 0.5
    few, counts = formulas.index_lists(mask)
    indices = torch.zeros(1, 1, blocks, 2**20, dtype=torch.int32, device="cuda")
    indices[..., : few.shape[-1]] = few
    output = column_sparse_attention(*inputs, indices, counts, block_size_q=1, backend=backend)
    expected = masked_attention(*inputs, mask, 1)
    formulas.assert_close(output, expected, torch.bfloat16)


@backend_names(column_sparse_attention)
@pytest.mark.parametrize("dtype", [*formulas.DTYPES, torch.float64])
@pytest.mark.parametrize(
    ("shape", "block_size_q", "count"),
    [
        ((2, 2, 333, 131, 64), 128, 130),
        ((1, 2, 200, 60, 128), 64, 1),
        ((1, 1, 390, 80, 64), 192, 64),
    ],
)
@pytest.mark.parametrize(("form", "scale"), [(None, -0.2), ("fp8", None)])
def test_means_are_columns_that_count_several_times(
    backend,
    form,
    scale,
    shape,
    block_size_q,
    count,
    dtype,
    device,
):
    """For every block, also the first one, which keeps no column."""
    options = {"dtype": dtype, "device": device, "strided": True}
    inputs = attention_inputs(*shape, **options)
    mask = random_mask(*shape[:4], block_size_q, device=device)
    _, *means = attention_inputs(*shape[:3], count, shape[4], **options, seed=1)
    _, residual = refreshed(inputs, mask, block_size_q, torch.float32)
    options, meant = given(residual, form)
    options |= {"mean_key": means[0], "mean_value": means[1], "mean_weight": 5.0, "scale": scale}
    output = attend(inputs, mask, block_size_q, **options, backend=backend)
    kept = formulas.attention_with_means(inputs, mask, block_size_q, means, 5.0, scale)
    formulas.assert_close(output, kept + meant, dtype)


@backend_names(column_sparse_attention)
@pytest.mark.parametrize("block_size_q", [64, 192])
def test_nan_in_a_mean_fills_its_head_and_in_dropped_columns_nothing(backend, block_size_q, device):
    options = {"dtype": torch.bfloat16, "device": device}
    inputs = attention_inputs(1, 2, 3 * block_size_q, 200, 64, **options)
    mask = torch.zeros(1, 2, 3, 200, dtype=torch.bool, device=device)
    mask[:, :, 1, 7:150] = True
    _, mean_key, mean_value = attention_inputs(1, 2, 1, 90, 64, **options)
    means = {"mean_key": mean_key, "mean_value": mean_value}
    call = {"block_size_q": block_size_q, "mean_weight": 2.0, "backend": backend}
    clean = attend(inputs, mask, **means, **call)
    assert clean.isfinite().all()
    for tensor in inputs[1:]:
        tensor.masked_fill_(~mask.any(2)[..., None], torch.nan)
    assert torch.equal(attend(inputs, mask, **means, **call), clean)
    for name, place in (("mean_key", 0), ("mean_value", 89)):
        poisoned = means | {name: means[name].clone()}
        poisoned[name][0, 1, place] = torch.nan
        output = attend(inputs, mask, **poisoned, **call)
        assert torch.equal(output[:, 0], clean[:, 0])
        assert output[:, 1].isnan().all()


@backend_names(column_sparse_attention)
def test_large_scores_do_not_overflow(backend, device):
    query, key, value = attention_inputs(1, 1, 140, 40, 64, dtype=torch.float32, device=device)
    mask = random_mask(1, 1, 140, 40, 70, device=device)
    inputs = (query * 1000, key, value)
    output = attend(inputs, mask, 70, backend=backend)
    formulas.assert_close(output, masked_attention(*inputs, mask, 70), 1e-3)


@backend_names(column_sparse_attention)
@pytest.mark.parametrize("dtype", formulas.DTYPES)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("form", "head_dim"), [("unchanged", 64), (None, 64), ("fp8", 128)])
def test_a_residual_is_added_to_the_kept_columns(backend, form, head_dim, dtype, strided, device):
    """Where nothing changed, that gives the cached output back."""
    shape = (2, 2, 333, 131, head_dim)
    changed = form != "unchanged"
    before, inputs = (
        attention_inputs(*shape, dtype=dtype, device=device, strided=strided, seed=seed)
        for seed in (0, int(changed))
    )
    mask = random_mask(*shape[:4], 32, device=device)
    if changed:
        mask[:, :, -1, ::3] = False
    cached, residual = refreshed(before, mask, 32, torch.float32 if changed else dtype)
    options, meant = given(residual, form)
    output = attend(inputs, mask, 32, **options, backend=backend)
    kept = masked_attention(*inputs, mask, 32)
    assert output.dtype == dtype
    formulas.assert_close(output, kept + meant if changed else cached, dtype)
    if not changed:  # nothing is kept in the first block: the cached output itself
        assert torch.equal(output[:, :, :32], cached[:, :, :32])


@backend_names(column_sparse_attention)
@pytest.mark.parametrize("form", [None, "fp8"])
@pytest.mark.parametrize("batch", [1, 2])
def test_heads_in_turn_beside_an_exchange_are_those_of_one_launch(backend, form, batch, device):
    """Bit for bit: a block's rows do not depend on which program has them, nor on other heads."""
    if backend == "reference" and device.type == "cuda":
        pytest.skip("cuBLAS takes other ways for other numbers of heads")
    shape = (batch, 3, 300, 131, 64)
    inputs = attention_inputs(*shape, dtype=torch.bfloat16, device=device, strided=True)
    mask = random_mask(*shape[:4], 128, device=device)
    options, _ = given(refreshed(inputs, mask, 128, torch.bfloat16)[1], form)
    lists = formulas.index_lists(mask)
    call = ColumnSparseAttention(*inputs, *lists, **options, shares_device=True, backend=backend)
    whole = column_sparse_attention.run(replace(call, shares_device=False))
    for heads in (slice(0, 2), slice(2, 3)):
        assert torch.equal(column_sparse_attention.run(call.of_heads(heads)), whole[:, heads])
