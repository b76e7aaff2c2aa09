"""What a generation will keep where: budgets, capacities, numbers in words."""

import pytest
import torch

from chipsparse import MemoryConfig, SparsityConfig
from chipsparse.cache import memory_plan
from chipsparse.cache.host_memory import HostMemory
from chipsparse.cache.memory_plan import (
    UNLIMITED,
    BudgetError,
    Capacity,
    MemoryDemand,
    available,
    cache_needs,
    plan_memory,
    working_bytes,
)
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.plan import SparsityPlan

GIB = 1 << 30
HALF = MemoryDemand(torch.bfloat16)
CPU, GPU = torch.device("cpu"), torch.device("cuda")
WAN_14B = ModelLayout((LayerKind("block", 40, 13_824),), 40, 128, 1, ((21, 45, 80),))


def plan_of(layout=WAN_14B, **overrides):
    values = {"memory.cache_precision": "full"}
    values |= {name.replace("__", "."): value for name, value in overrides.items()}
    return SparsityPlan(SparsityConfig().override(values), layout, 50)


def planned(device, host, *, branches=1, **overrides):
    capacity = Capacity(int(device * GIB), int(host * GIB))
    return plan_memory(plan_of(**overrides), capacity, MemoryDemand(torch.bfloat16, branches))


# What is kept.


def test_needs_are_those_of_the_sparse_layers():
    layers = {(need.layer, need.part) for need in cache_needs(plan_of(), dtype=torch.bfloat16)}
    assert layers == {(layer, part) for layer in range(40) for part in ("attention", "mlp")}
    some = plan_of(schedule__first_dense_layers=30, mlp__density="dense")
    needs = cache_needs(some, dtype=torch.bfloat16)
    assert [(need.layer, need.part) for need in needs] == [(n, "attention") for n in range(30, 40)]
    dense = {(layer, "attention") for layer in range(39)}
    (last,) = cache_needs(some, dtype=torch.bfloat16, dense=dense)
    assert last.layer == 39


def test_the_caches_of_wan_14b_are_as_large_as_their_shapes_say():
    (need, *_) = cache_needs(plan_of(mlp__density="dense"), dtype=torch.bfloat16)
    assert dict(need.sizes) == {
        "columns": 40 * 591 * 9450,
        "residual": 75_600 * 5120 * 2,
        "lse": 40 * 75_600 * 4,
        "lse_dense": 40 * 75_600 * 4,
        "kept_mass": 40 * 75_600 * 4,
    }


def test_attention_is_placed_before_the_mlp_of_a_long_video():
    """A layer's attention saves forty times as much work per byte."""
    placement = planned(45, 0).placement
    assert {layer for layer, kind in placement.device if kind == "residual"} == set(range(40))
    assert {layer for layer, kind in placement.device if kind == "activation"} == {38, 39}
    assert placement.recomputed == {(layer, "mlp") for layer in range(38)}


def test_a_residual_in_fp8_takes_half_of_the_bytes_and_a_scale_for_each_row():
    rounded = {"mlp__density": "dense", "memory__cache_precision": "fp8"}
    (need, *_) = cache_needs(plan_of(**rounded), dtype=torch.bfloat16)
    (full, *_) = cache_needs(plan_of(mlp__density="dense"), dtype=torch.bfloat16)
    changed = {"residual": 75_600 * 5120, "residual_scale": 40 * 75_600 * 4}
    assert dict(need.sizes) == {**full.sizes, **changed}


ATTENTION = {
    "mlp__density": "dense",
    "memory__cache_precision": "auto",
}  # of Wan 14B: 41.1 GiB, 28.1 in FP8


@pytest.mark.parametrize(
    ("device", "host", "precision"),
    [
        (42, 0, "full"),
        (42, 99, "full"),
        (30, 0, "fp8"),  # or layers would run dense
        (30, 99, "fp8"),  # or they would go to the host
        (20, 99, "full"),  # some go to the host in either precision
        (20, 13, "fp8"),  # and more of them find room
        (20, 0, "fp8"),  # likewise
    ],
)
def test_caches_are_rounded_where_that_saves_something(device, host, precision):
    memory = planned(device, host, **ATTENTION)
    assert memory.in_fp8 == (precision == "fp8")
    rounded, full = (
        planned(device, host, **ATTENTION | {"memory__cache_precision": other})
        for other in ("fp8", "full")
    )
    assert memory == (rounded if precision == "fp8" else full)
    saves = len(rounded.placement.recomputed) < len(full.placement.recomputed)
    saves |= bool(full.placement.host) and not rounded.placement.host
    assert saves == (precision == "fp8")


def test_what_prefers_the_host_is_rounded_only_where_it_is_full():
    always = ATTENTION | {"memory__offload": "always"}
    assert not planned(30, 99, **always).in_fp8
    assert planned(4, 30, **always).in_fp8


def test_activations_in_fp8_take_half_of_the_bytes_and_a_scale_for_each_token():
    full, rounded = (
        cache_needs(plan_of(memory__cache_precision=precision), dtype=torch.bfloat16)[1].sizes
        for precision in ("full", "fp8")
    )
    assert full["activation"] == 13_824 * 75_600 * 2
    changed = {"activation": 13_824 * 75_600, "token_scale": 75_600 * 4}
    assert dict(rounded) == {**full, **changed}


def layer_of(channels, tokens, width):
    kinds = (LayerKind("block", 2, width),)
    return ModelLayout(kinds, channels // 128, 128, 1, ((1, 1, tokens),))


@pytest.mark.parametrize(
    ("layout", "movable"),
    [
        (layer_of(3072, 119_056, 12_288), {"attention"}),  # HunyuanVideo: the MLP's are 3.7 GB
        (WAN_14B, {"attention", "mlp"}),  # twice the channels: there is more time to hide in
        (layer_of(1536, 32_760, 8960), {"attention"}),  # Wan 1.3B at 480p
    ],
)
def test_only_what_is_faster_than_dense_goes_to_the_host(layout, movable):
    needs = cache_needs(plan_of(layout), dtype=torch.bfloat16)
    assert {need.part for need in needs if need.movable} == movable


def test_a_part_that_is_slow_to_move_says_so():
    hunyuan = layer_of(3072, 119_056, 12_288)
    plan = plan_memory(plan_of(hunyuan), Capacity(6 * GIB, 99 * GIB), HALF)
    assert plan.fallbacks(2) == [
        "MLP runs dense in 1 of 2 layers (first: layer 0): its caches do not fit on the device, "
        "and to move them is estimated to take longer than to compute it"
    ]


def test_both_branches_have_caches_and_share_the_slots():
    one, two = planned(12, 200), planned(12, 200, branches=2)
    assert two.wanted == 2 * one.wanted
    assert two.host_bytes > one.host_bytes
    assert two.device_bytes <= 12 * GIB
    assert two.placement.slot_bytes <= 12 * GIB


def test_it_says_what_runs_dense():
    assert planned(45, 0).fallbacks(40) == [
        "MLP runs dense in 38 of 40 layers (first: layer 0): its caches do not fit into the memory "
        "budgets"
    ]
    assert planned(500, 0).fallbacks(40) == []


def test_nothing_fits():
    with pytest.raises(BudgetError) as raised:
        planned(0.25, 0.5).check()
    assert str(raised.value).startswith("not one layer's caches fit: all of them need ")
    assert "256.0 MiB on the device and 512.0 MiB of host memory" in str(raised.value)
    planned(45, 0).check()
    planned(0, 0, attention__density="dense", mlp__density="dense").check()


@pytest.mark.parametrize("offload", ["auto", "always", "never"])
def test_offloading_as_the_config_asks(offload):
    placement = planned(500, 500, memory__offload=offload).placement
    assert bool(placement.host) == (offload == "always")
    assert not placement.recomputed


def test_working_memory_grows_with_the_picture_and_is_bounded(monkeypatch):
    small = ModelLayout(WAN_14B.kinds, 40, 128, 1, ((11, 45, 80),))
    wide = working_bytes(plan_of(), dtype=torch.bfloat16)
    assert working_bytes(plan_of(small), dtype=torch.bfloat16) < wide
    hidden = 75_600 * 5120 * 2
    assert 8 * hidden < wide < 16 * hidden
    monkeypatch.setattr(memory_plan, "COLUMN_SUMS_BYTES", 1)
    assert 8 * hidden < working_bytes(plan_of(), dtype=torch.bfloat16) < wide


def test_a_gated_layer_holds_one_more_tensor_of_neurons():
    """Where the feed-forward layer is what takes most."""
    sizes = []
    for linears in (2, 3):
        kind = LayerKind("block", 2, 1 << 16, mlp_linears=linears)
        layout = ModelLayout((kind,), 4, 16, 1, ((1, 8, 8),))
        sizes.append(working_bytes(plan_of(layout), dtype=torch.bfloat16))
    assert sizes[1] - sizes[0] == 64 * (1 << 16) * 2


def test_weights_in_fp8_are_read_into_memory_of_their_own():
    """Those of one layer at a time, the largest of them."""
    kinds = LayerKind("a", 2, 1 << 16), LayerKind("b", 2, 1 << 15, mlp_linears=3)
    plan = plan_of(ModelLayout(kinds, 4, 16, 1, ((1, 8, 8),)))
    without, second, both = (
        working_bytes(plan, dtype=torch.bfloat16, fp8_mlps=layers)
        for layers in ((), (2, 3), (1, 3))
    )
    assert second - without == 3 * (1 << 15) * 64 * 2
    assert both - without == 2 * (1 << 16) * 64 * 2


@pytest.mark.parametrize(
    ("kinds", "heads", "grid", "measured"),
    [
        ((LayerKind("block", 2, 8960),), 12, (21, 30, 52), 1.06),
        ((LayerKind("block", 2, 13824),), 40, (21, 45, 80), 8.01),
        (
            (LayerKind("double", 2, 12288), LayerKind("single", 2, 12288)),
            24,
            (1, 48, 80),
            0.36,
        ),
    ],
)
def test_working_memory_covers_what_uncompiled_blocks_took_on_a_gpu(kinds, heads, grid, measured):
    """GiB above weights and caches on one NVIDIA H200; benchmarks/notes/memory.md."""
    layout = ModelLayout(kinds, heads, 128, 1, (grid,), text_tokens=512 * (heads == 24))
    config = SparsityConfig().override({"attention.density": 0.15})
    estimate = working_bytes(SparsityPlan(config, layout, 5), dtype=torch.bfloat16) / GIB
    assert measured < estimate < 1.7 * measured


# What there is.


@pytest.fixture
def machine(monkeypatch):
    """A GPU with 20 GiB free, of which this process has taken 4, and 40 GiB of host memory."""
    monkeypatch.setattr(memory_plan, "device_free_bytes", lambda _: 20 * GIB)
    monkeypatch.setattr(memory_plan, "host_free_bytes", lambda: 40 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 4 * GIB)


def there_is(device=GPU, **options):
    config = MemoryConfig(**{k: options.pop(k) for k in ("vram", "ram", "offload") if k in options})
    found = available(config, device, **{"working": 0, "reserve": 0.0, **options})
    return found.device / GIB, found.host / GIB


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("variable", "text", "share"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "", 0.06),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", 0.06),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True", 0.03),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", 0.03),
    ],
)
def test_segments_that_grow_leave_fewer_gaps(variable, text, share, monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, text)
    device, _ = there_is(reserve=None)
    assert device == pytest.approx(20 * (1 - share))


@pytest.mark.usefixtures("machine")
def test_without_budgets_caches_may_take_what_is_free():
    assert there_is() == (20, 36)
    assert there_is(working=3 * GIB, pending=2 * GIB) == (15, 36)
    assert there_is(promised=5 * GIB) == (15, 36)


@pytest.mark.usefixtures("machine")
def test_a_little_is_left_to_others_unless_a_budget_says_so():
    assert there_is(reserve=0.1) == (18, 36)
    assert there_is(reserve=0.1, vram="12G") == (8, 36)


class Blocks(HostMemory):
    """10 GiB that nobody uses now, 4 pinned and 2 others in use."""

    nbytes, lent_bytes, untouched_bytes = 16 * GIB, 6 * GIB, 2 * GIB


@pytest.mark.usefixtures("machine")
def test_host_memory_that_is_ours_already():
    assert there_is(memory=Blocks()) == (20, pytest.approx(0.9 * (40 + 14) - 6))
    assert there_is(memory=Blocks(), ram="8G") == (20, 2)


def test_host_memory_that_was_used_before_is_as_much_as_the_first_time(monkeypatch):
    free = 40 * GIB
    monkeypatch.setattr(memory_plan, "device_free_bytes", lambda _: 20 * GIB)
    monkeypatch.setattr(memory_plan, "host_free_bytes", lambda: free)

    class Pinned(HostMemory):
        nbytes = lent_bytes = untouched_bytes = 0

    memory, rooms = Pinned(), []
    for _ in range(3):
        room = available(MemoryConfig(), GPU, working=0, memory=memory).host
        rooms.append(room)
        free += memory.nbytes - room
        memory.nbytes = room
    assert rooms == [rooms[0]] * 3


@pytest.mark.usefixtures("machine")
def test_budgets_count_what_is_taken_already():
    assert there_is(vram="12G") == (8, 36)
    assert there_is(vram="100G") == (20, 36)
    assert there_is(ram="8G") == (20, 8)
    assert there_is(ram="100G") == (20, 36)
    assert there_is(vram="3G") == (-1, 36)


@pytest.mark.usefixtures("machine")
def test_nothing_goes_to_the_host_where_offloading_is_off():
    assert there_is(offload="never") == (20, 0)


@pytest.mark.usefixtures("machine")
def test_a_cpu_has_one_memory_for_all():
    assert there_is(CPU) == (36, 0)
    assert there_is(CPU, working=2 * GIB, pending=8 * GIB) == (pytest.approx(0.9 * 30), 0)
    assert there_is(CPU, ram="8G", working=2 * GIB) == (8, 0)  # a budget for caches alone
    assert there_is(CPU, ram="8G", held=3 * GIB, promised=GIB) == (4, 0)
    assert there_is(CPU, offload="always") == (36, 36)


@pytest.mark.usefixtures("machine")
def test_what_goes_to_the_host_is_not_there_twice_on_a_cpu():
    """With all caches beside the device: caches and slots together take what there is once."""
    plan = plan_of(memory__offload="always")
    assert available(plan.config.memory, CPU, working=0).one_memory
    for branches in (1, 2):
        demand = MemoryDemand(torch.bfloat16, branches)
        wanted = plan_memory(plan, Capacity(999 * GIB, 999 * GIB), demand)
        for share in (1.0, 0.7, 0.3):
            budget = round(share * wanted.host_bytes)
            capacity = Capacity(budget, budget, one_memory=True)
            memory = plan_memory(plan, capacity, demand)
            assert memory.placement.host
            assert memory.placement.recomputed  # there is no room for all of it and for the slots
            assert memory.device_bytes + memory.host_bytes <= budget
            assert memory.fits(capacity)
            assert not wanted.fits(capacity)


def test_a_memory_of_one_kind_is_named_once():
    capacity = Capacity(GIB, GIB, one_memory=True)
    demand = MemoryDemand(torch.bfloat16)
    with pytest.raises(BudgetError, match=r"there are 1\.00 GiB of memory for them"):
        plan_memory(plan_of(memory__offload="always"), capacity, demand).check()


def test_each_guidance_branch_has_a_recorded_call_of_its_own():
    none, one, two = (
        working_bytes(plan_of(), dtype=torch.bfloat16, captured=count) for count in range(3)
    )
    assert one > none
    assert two - one == one - none


def test_a_system_that_tells_nothing_has_no_limit(monkeypatch):
    monkeypatch.setattr(memory_plan, "host_free_bytes", lambda: None)
    assert available(MemoryConfig(), CPU, working=0).device == UNLIMITED


# Budgets in words.


@pytest.mark.parametrize(("given", "count"), [("24G", 24 * GIB), (5, 5), (None, None), ("0", 0)])
def test_budgets_are_read(given, count):
    assert MemoryConfig(vram=given).vram == count
    assert SparsityConfig().override({"memory.ram": given}).memory.ram == count


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"memory.vram": "24 cards"}, "memory.vram: expected an amount of memory such as 24G"),
        ({"memory.ram": -1}, "memory.ram: expected a number at least 0, got -1"),
        ({"memory.ram": 1.5}, "memory.ram: expected a whole number, got 1.5"),
        ({"memory.offload": "maybe"}, "memory.offload: expected one of auto, always, never"),
    ],
)
def test_bad_budgets_are_refused(values, said):
    with pytest.raises(ValueError, match=said):
        SparsityConfig().override(values)
