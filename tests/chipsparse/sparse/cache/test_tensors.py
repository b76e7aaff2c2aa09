"""The table of the tensors that layers keep, against the caches that hold them."""

from dataclasses import fields, replace

import pytest
import torch

from chipsparse.config import PARTS, Action
from chipsparse.sparse.cache.tensors import (
    CAPACITY_MULTIPLE,
    AttentionCache,
    Kept,
    MLPCache,
    Numbers,
    kept_bytes,
    placed_tensors,
    read_and_written,
    with_caches,
)
from chipsparse.sparse.plan import SparsityPlan
from tests.chipsparse.sparse.sessions import CONFIG, TOTAL, generate, layout_of, session_with

CACHES = {"attention": AttentionCache(), "mlp": MLPCache()}
ITEM_BYTES = {
    torch.float32: {Numbers.FLOAT32, Numbers.MODEL, Numbers.CACHE},
    torch.uint8: {Numbers.UINT8},
    torch.int32: {Numbers.INT32},
    torch.float8_e4m3fn: {Numbers.CACHE},
}


def test_every_tensor_has_a_field_in_the_cache_of_its_part():
    assert len({kept.field for kept in Kept}) == len(Kept)
    for part, cache in CACHES.items():
        own = [kept.field for kept in Kept if kept.part == part]
        others = {"in_fp8", "refreshed_at", "capacity", "kept_fraction"}
        assert {field.name for field in fields(cache)} - others == set(own)
        assert cache.recorded() == {}


def test_what_is_recorded_can_be_put_and_cleared():
    cache = AttentionCache()
    tensors = {Kept.COLUMNS: torch.zeros(2), Kept.LSE: torch.ones(3)}
    cache.put(tensors)
    assert [*cache.recorded()] == [Kept.LSE, Kept.COLUMNS]  # in the table's order
    assert cache.columns is tensors[Kept.COLUMNS]
    cache.clear({Kept.LSE: cache.lse})
    assert [*cache.recorded()] == [Kept.COLUMNS]
    assert cache.lse is None


ROUNDED = {Kept.TOKEN_SCALE, Kept.RESIDUAL_SCALE}
OF_MLP = {Kept.MEAN, Kept.OUTPUT, Kept.ACTIVATION, Kept.TOKEN_SCALE}
OF_REFRESH = {Kept.COLUMNS, Kept.RESIDUAL, Kept.RESIDUAL_SCALE, Kept.LISTS}


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize(
    ("part", "action", "reads", "writes"),
    [
        ("attention", Action.DENSE, set(), {Kept.LSE}),
        ("attention", Action.REFRESH, {Kept.LSE}, {Kept.LSE, *OF_REFRESH}),
        ("attention", Action.SPARSE, OF_REFRESH, set()),
        ("attention", Action.SKIP, set(), set()),
        ("mlp", Action.DENSE, set(), OF_MLP),
        ("mlp", Action.REFRESH, set(), OF_MLP),
        ("mlp", Action.SPARSE, OF_MLP, OF_MLP - {Kept.TOKEN_SCALE}),
        ("mlp", Action.SKIP, set(), set()),
    ],
)
def test_who_reads_and_writes_what(part, action, reads, writes, in_fp8):
    config = with_caches(CONFIG, in_fp8=in_fp8)
    read, written = read_and_written(config, part, action)
    absent = set() if in_fp8 else ROUNDED
    assert (read, written) == (reads - absent, writes - absent)
    # Where the memory decides, both precisions are possible.
    assert read_and_written(CONFIG, part, action) == (reads, writes)


def test_lists_are_placed_nowhere_and_scales_only_in_fp8():
    for in_fp8 in (False, True):
        config = with_caches(CONFIG, in_fp8=in_fp8)
        placed = {kept for part in PARTS for kept in placed_tensors(config, part)}
        assert placed == set(Kept) - {Kept.LISTS} - (set() if in_fp8 else ROUNDED)


@pytest.mark.parametrize("precision", ["model", "fp8"])
def test_the_table_has_the_dtype_and_the_bytes_of_what_is_kept(precision):
    session = session_with({"memory.cache_precision": precision})
    generate(session, steps=4, branches=("cond",))
    plan = SparsityPlan(session.config, layout_of(), TOTAL)
    seen = set()
    for branch, layer in session._caches:
        for kept in Kept:
            tensor = getattr(session._caches.part(branch, layer, kept.part), kept.field)
            if tensor is None:
                continue
            planned = kept_bytes(kept, layer, plan=plan, dtype=torch.float32)
            if kept is Kept.LISTS:
                tensor, counts = tensor
                assert counts.dtype == torch.int32
                rows = counts.numel() * 4
                assert planned - CAPACITY_MULTIPLE * rows <= tensor.nbytes <= planned
            elif kept is Kept.ACTIVATION:  # planned with its rows padded to 8
                assert planned * 7 // 8 <= tensor.nbytes <= planned
            else:
                assert tensor.nbytes == planned, kept
            assert kept.declared.numbers in ITEM_BYTES[tensor.dtype], kept
            seen.add(kept)
    assert seen == set(Kept) - (ROUNDED if precision == "model" else set())


def test_bytes_follow_the_sizes_of_a_call():
    layout = layout_of(grid=(1, 8, 10), text_tokens=0)
    plan = SparsityPlan(with_caches(CONFIG, in_fp8=False), layout, TOTAL)

    def size(kept, **changes):
        changed = replace(plan, layout=replace(layout, **changes))
        return kept_bytes(kept, 0, plan=changed, dtype=torch.bfloat16)

    assert size(Kept.LSE) == 2 * 80 * 4
    assert size(Kept.LSE, batch=3) == 3 * 2 * 80 * 4
    assert size(Kept.RESIDUAL) == 2 * 80 * 8 * 2
    assert size(Kept.COLUMNS) == 2 * 5 * 10  # blocks of 16 rows, 80 bits
    assert size(Kept.LISTS) == 2 * 5 * (16 + CAPACITY_MULTIPLE) * 4  # a fifth of 80 columns
    assert size(Kept.OUTPUT) == 80 * 16 * 2
    assert size(Kept.ACTIVATION) == 80 * 24 * 2
    assert size(Kept.MEAN) == 5 * 24 * 4
