from functools import partial

import pytest
import torch

from chipsparse.kernels import column_sparse_attention, dense_attention_column_sums
from chipsparse.kernels.checks import block_chunks, ranges, tile_bytes
from tests.kernels import formulas


@pytest.mark.parametrize("count", [0, 1, 7, 100])
@pytest.mark.parametrize("limit", [0, 10, 35, 1000])
def test_ranges_cover_everything_once_within_the_limit(count, limit):
    parts = list(ranges(count, 10, limit))
    assert [i for first, last in parts for i in range(first, last)] == list(range(count))
    assert all(0 < last - first <= max(1, limit // 10) for first, last in parts)


@pytest.mark.parametrize("rows", [1, 4, 7, 8, 41])
@pytest.mark.parametrize("limit", [1, 25, 1000])
def test_block_chunks_cover_all_rows_in_whole_blocks(rows, limit):
    chunks = list(block_chunks(rows, 4, 10, limit))
    assert [row for c in chunks for row in range(c.rows.start, c.rows.stop)] == list(range(rows))
    numbers = [block for c in chunks for block in range(c.blocks.start, c.blocks.stop)]
    assert numbers == list(range((rows + 3) // 4))
    for chunk in chunks:
        assert chunk.rows.start == chunk.blocks.start * 4
        assert chunk.shape[0] == chunk.blocks.stop - chunk.blocks.start
        assert chunk.shape[0] * chunk.shape[1] == chunk.rows.stop - chunk.rows.start
        assert chunk.shape[0] <= max(1, limit // 10)


def test_tiles_on_a_cpu_fit_its_caches():
    assert tile_bytes(torch.device("cpu")) < tile_bytes(torch.device("cuda"))


@pytest.mark.parametrize("blocks_at_once", [1, 3])
@pytest.mark.parametrize("package", [column_sparse_attention, dense_attention_column_sums])
def test_references_of_attention_make_no_larger_tensors(package, blocks_at_once, monkeypatch):
    inputs = formulas.attention_inputs(1, 1, 640, 2000, 16, dtype=torch.float32, device="cpu")
    name = package.__name__.rpartition(".")[2]
    is_sparse = package is column_sparse_attention
    if is_sparse:
        others = formulas.index_lists(formulas.random_mask(1, 1, 640, 2000, 64, device="cpu"))
    else:
        others = (formulas.full_attention(*inputs)[1].float(),)
    columns = others[0].shape[-1] if is_sparse else 2000
    scores = blocks_at_once * 64 * columns * 4
    limit = 2 * (scores + is_sparse * blocks_at_once * 16 * columns * 4)  # and gathered columns
    operation = partial(getattr(package, name), *inputs, *others, block_size_q=64)
    large = operation(backend="reference")
    monkeypatch.setattr(package.reference, "tile_bytes", lambda _: limit)
    with formulas.LargestResult() as largest:
        small = operation(backend="reference")
    assert 0 < largest.nbytes <= scores
    for one, other in zip(small, large, strict=True):
        formulas.assert_close(one, other, 1e-5)
