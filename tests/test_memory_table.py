"""The table of cache memory: its numbers against sums by hand."""

import math

import pytest

from benchmarks.models import MODELS
from docs.tables import memory

GIGABYTE = 10**9


def test_caches_of_attention_are_a_sum_over_layers():
    """HunyuanVideo at 720p at `balanced`: the first of 60 layers is dense, MLPs have no caches."""
    model = MODELS["hunyuan_720p"]
    layout = model.layout()
    (grid,) = layout.grids
    tokens = math.prod(grid) + 256
    blocks = math.ceil(tokens / 128)
    heads = 24
    channels = 24 * 128
    residual = tokens * channels * 2
    lse = heads * tokens * 4
    columns = heads * blocks * math.ceil(tokens / 8)
    expected = (layout.layers - 1) * (residual + lse + columns)
    found = memory.cache_bytes(model, model.decided(model.qualities()["balanced"]), 256)
    assert found == pytest.approx(expected, rel=0.01)


def test_nothing_is_cached_where_nothing_is_sparse():
    model = MODELS["wan14b_480p"]
    assert memory.cache_bytes(model, model.decided(model.qualities()["balanced"]), 0) == 0
    assert "none" in next(row for row in memory.memory().splitlines() if "Wan 14B 480p" in row)


def test_weights_take_two_bytes_a_parameter():
    assert memory.weight_bytes(MODELS["wan14b_720p"]) == pytest.approx(28.6e9, rel=0.01)


def test_the_smallest_gpu_that_holds_it():
    assert memory.smallest_gpu(20 * GIGABYTE).startswith("24 GB")
    assert memory.smallest_gpu(23 * GIGABYTE).startswith("32 GB")
    assert memory.smallest_gpu(132 * GIGABYTE).startswith("141 GB")
    assert memory.smallest_gpu(133 * GIGABYTE) == "none: a part in host memory"
