"""What a generation will keep where: budgets, capacities, numbers in words."""

import pytest
import torch

from chipsparse import MemoryConfig, SparsityConfig
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.sparse.cache import memory_plan
from chipsparse.sparse.cache.host_memory import HostMemory
from chipsparse.sparse.cache.placement import NO_ROOM, TOO_SLOW_TO_MOVE, Capacity
from chipsparse.sparse.plan import SparsityPlan

GIB = 1 << 30
HALF = torch.bfloat16
CPU = torch.device("cpu")
GPU = torch.device("cuda")
WAN_14B = ModelLayout((LayerKind("block", 40, 13_824),), 40, 128, 1, ((21, 45, 80),))


def layer_of(channels, tokens, width):
    kinds = (LayerKind("block", 2, width),)
    return ModelLayout(kinds, channels // 128, 128, 1, ((1, 1, tokens),))


HUNYUAN = layer_of(3072, 119_056, 12_288)


def plan_of(layout=WAN_14B, **overrides):
    values = {"memory.cache_precision": "model", "mlp.density": 0.3}
    values |= {name.replace("__", "."): value for name, value in overrides.items()}
    return SparsityPlan(SparsityConfig().override(values), layout, 50)


def planned(device, host, *, branches=1, layout=WAN_14B, **overrides):
    capacity = Capacity(int(device * GIB), int(host * GIB))
    demand = memory_plan.MemoryDemand(HALF, branches)
    return memory_plan.plan_memory(plan_of(layout, **overrides), capacity, demand)


def test_needs_are_those_of_the_sparse_layers():
    layers = {(need.layer, need.part) for need in memory_plan.cache_needs(plan_of(), dtype=HALF)}
    assert layers == {(layer, part) for layer in range(40) for part in ("attention", "mlp")}
    some = plan_of(layers=[{"index": "0-29", "attention": "dense"}], mlp__density="dense")
    needs = memory_plan.cache_needs(some, dtype=HALF)
    assert [(need.layer, need.part) for need in needs] == [(n, "attention") for n in range(30, 40)]
    dense = {(layer, "attention") for layer in range(39)}
    (last,) = memory_plan.cache_needs(some, dtype=HALF, dense=dense)
    assert last.layer == 39


ATTENTION = {"mlp__density": "dense"}  # of Wan 14B: 41.1 GiB, 28.1 in FP8


@pytest.mark.parametrize(
    ("device", "host", "offload", "in_fp8"),
    [
        (42, 0, "auto", False),
        (42, 99, "auto", False),
        (30, 0, "auto", True),  # or layers would run dense
        (30, 99, "auto", True),  # or they would go to the host
        (20, 99, "auto", False),  # some go to the host in either precision
        (20, 13, "auto", True),  # and more of them find room
        (20, 0, "auto", True),
        (30, 99, "always", False),
        (4, 30, "always", True),  # only where the host is full
    ],
)
def test_caches_are_rounded_where_that_saves_something(device, host, offload, in_fp8):
    options = {**ATTENTION, "memory__offload": offload}
    auto, rounded, full = (
        planned(device, host, **options, memory__cache_precision=precision)
        for precision in ("auto", "fp8", "model")
    )
    assert auto == (rounded if in_fp8 else full)
    assert auto.in_fp8 == in_fp8
    assert offload == "auto" or auto.placement.host


@pytest.mark.parametrize(
    ("layout", "movable"),
    [
        (HUNYUAN, {"attention"}),  # the MLP's are 3.7 GB
        (WAN_14B, {"attention", "mlp"}),  # twice the channels: there is more time to hide in
        (layer_of(1536, 32_760, 8960), {"attention"}),  # Wan 1.3B at 480p
    ],
)
def test_only_what_is_faster_than_dense_goes_to_the_host(layout, movable):
    needs = memory_plan.cache_needs(plan_of(layout), dtype=HALF)
    assert {need.part for need in needs if need.movable} == movable


def test_attention_is_placed_first_and_what_runs_dense_is_said():
    """A layer's attention saves forty times as much work per byte as the MLP of a long video."""
    memory = planned(45, 0)
    device = memory.placement.device
    assert {layer for layer, part in device if part == "attention"} == set(range(40))
    assert {layer for layer, part in device if part == "mlp"} == {38, 39}
    assert memory.placement.dense == {(layer, "mlp"): NO_ROOM for layer in range(38)}
    assert planned(500, 0).placement.dense == {}
    assert planned(45, 0, branches=2).wanted == 2 * memory.wanted
    assert planned(6, 99, layout=HUNYUAN).placement.dense == {(0, "mlp"): TOO_SLOW_TO_MOVE}


def test_nothing_fits():
    with pytest.raises(memory_plan.BudgetError) as raised:
        planned(0.25, 0.5).check()
    assert str(raised.value).startswith("not one layer's caches fit: all of them need ")
    assert "256.0 MiB on the device and 512.0 MiB of host memory" in str(raised.value)
    planned(45, 0).check()
    planned(0, 0, attention__density="dense", mlp__density="dense").check()


def working(layout, **options):
    return memory_plan.working_bytes(plan_of(layout), dtype=HALF, **options)


def test_working_memory_of_gates_of_weights_in_fp8_and_of_recorded_calls():
    """Where the feed-forward layer is what takes most; of one layer at a time, the largest."""
    wide = LayerKind("a", 2, 1 << 16)
    gated = LayerKind("b", 2, 1 << 15, mlp_linears=3)

    def of(*kinds, **options):
        return working(ModelLayout(kinds, 4, 16, 1, ((1, 8, 8),)), **options)

    three = LayerKind("a", 2, 1 << 16, mlp_linears=3)
    assert of(three) - of(wide) == 64 * (1 << 16) * 2  # one more tensor of neurons
    assert of(wide, gated, fp8_mlps=(2, 3)) - of(wide, gated) == 3 * (1 << 15) * 64 * 2
    assert of(wide, gated, fp8_mlps=(1, 3)) - of(wide, gated) == 2 * (1 << 16) * 64 * 2
    none, one, two = (of(wide, captured=count) for count in range(3))
    assert two - one == one - none > 0


@pytest.mark.parametrize(
    ("kinds", "heads", "grid", "measured"),
    [
        ((LayerKind("block", 2, 8960),), 12, (21, 30, 52), 1.06),
        ((LayerKind("block", 2, 13824),), 40, (21, 45, 80), 8.01),
        ((LayerKind("double", 2, 12288), LayerKind("single", 2, 12288)), 24, (1, 48, 80), 0.36),
    ],
)
def test_working_memory_covers_what_uncompiled_blocks_took_on_a_gpu(kinds, heads, grid, measured):
    """GiB above weights and caches on one NVIDIA H200; benchmarks/notes/memory.md."""
    text_tokens = 512 if heads == 24 else 0
    layout = ModelLayout(kinds, heads, 128, 1, (grid,), text_tokens=text_tokens)
    config = SparsityConfig().override({"attention.density": 0.15})
    estimate = memory_plan.working_bytes(SparsityPlan(config, layout, 5), dtype=HALF) / GIB
    assert measured < estimate < 1.7 * measured


@pytest.fixture
def _machine(monkeypatch):
    """A GPU with 20 GiB free, of which this process has taken 4, and 40 GiB of host memory."""
    monkeypatch.setattr(memory_plan, "device_free_bytes", lambda _: 20 * GIB)
    monkeypatch.setattr(memory_plan, "host_free_bytes", lambda: 40 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 4 * GIB)


pytestmark = pytest.mark.usefixtures("_machine")


class Blocks(HostMemory):
    """10 GiB that nobody uses now, 4 pinned and 2 others in use."""

    nbytes = 16 * GIB
    lent_bytes = 6 * GIB
    untouched_bytes = 2 * GIB


@pytest.mark.parametrize(
    ("device", "budgets", "options", "expected"),
    [
        (GPU, {}, {}, (20, 36)),
        (GPU, {}, {"working": 3 * GIB, "pending": 2 * GIB}, (15, 36)),
        # A little is left to others unless a budget says so.
        (GPU, {}, {"reserve": 0.1}, (18, 36)),
        (GPU, {"vram": "12G"}, {"reserve": 0.1}, (8, 36)),
        # Budgets count what is taken already.
        (GPU, {"vram": "100G", "ram": "8G"}, {}, (20, 8)),
        (GPU, {"vram": "3G", "ram": "100G"}, {}, (-1, 36)),
        (GPU, {"offload": "never"}, {}, (20, 0)),
        (GPU, {}, {"memory": Blocks()}, (20, 0.9 * (40 + 14) - 6)),
        # A CPU has one memory for all; a budget is for caches alone.
        (CPU, {}, {}, (36, 0)),
        (CPU, {}, {"working": 2 * GIB, "pending": 8 * GIB}, (0.9 * 30, 0)),
        (CPU, {"ram": "8G"}, {"held": 3 * GIB, "reserved": GIB}, (4, 0)),
        (CPU, {"offload": "always"}, {}, (18, 18)),
    ],
)
def test_what_is_available(device, budgets, options, expected):
    options = {"working": 0, "reserve": 0.0, **options}
    capacity = memory_plan.available(MemoryConfig(**budgets), device, **options)
    assert (capacity.device / GIB, capacity.host / GIB) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("budgets", "capacity"),
    [
        ({}, Capacity(memory_plan.UNLIMITED, 36 * GIB)),
        ({"vram": 1000, "ram": 99 * GIB}, Capacity(1000 - 10 - 200, 99 * GIB)),  # of another one
        ({"vram": 1000, "offload": "never"}, Capacity(790, 0)),
    ],
)
def test_what_budgets_leave_on_a_gpu_that_is_not_here(budgets, capacity):
    assert memory_plan.declared(MemoryConfig(**budgets), working=10, pending=200) == capacity


@pytest.mark.parametrize(
    ("old", "new", "share"),
    [
        ("expandable_segments:False", "", 0.06),
        ("max_split_size_mb:64, expandable_segments: True", "", 0.03),
        ("", "expandable_segments:True", 0.03),
    ],
)
def test_segments_that_grow_leave_fewer_gaps(old, new, share, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", old)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", new)
    left = memory_plan.available(MemoryConfig(), GPU, working=0).device
    assert left == pytest.approx(20 * GIB * (1 - share))


def test_memory_is_unlimited_where_nobody_tells(monkeypatch):
    monkeypatch.setattr(memory_plan, "host_free_bytes", lambda: None)
    assert memory_plan.available(MemoryConfig(), CPU, working=0).device == memory_plan.UNLIMITED
