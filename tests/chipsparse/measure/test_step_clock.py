"""Steps are measured once a kind and shape, on a sample that stands for the whole, or estimated."""

import math
from dataclasses import replace

import pytest
import torch

from chipsparse import SparsityConfig
from chipsparse.experiments.timing import time_in_turn
from chipsparse.layout import LayerKind, ModelLayout, Share
from chipsparse.measure import step_clock
from chipsparse.measure.known_times import KnownTimes
from chipsparse.measure.random_layers import RandomAttention, RandomMLP
from chipsparse.measure.step_clock import StepClock, sample_of
from chipsparse.measure.step_seconds import estimated_seconds
from chipsparse.plan import SparsityPlan

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FP32, BF16 = torch.float32, torch.bfloat16
PARTS = ["attention", "mlp"]
OPTIONS = {
    "attention.block_size_q": 16,
    "mlp.block_size": 16,
}


def plan_of(*, layers=4, tokens=96, text=0, batch=1, heads=2, head_dim=16, **options):
    overrides = {name.replace("__", "."): value for name, value in options.items()}
    kind = LayerKind("block", layers, 64)
    layout = ModelLayout((kind,), heads, head_dim, batch, ((1, 1, tokens),), text)
    return SparsityPlan(SparsityConfig().override(OPTIONS | overrides), layout, 10)


WAN_14B = SparsityPlan(
    SparsityConfig(),
    ModelLayout((LayerKind("block", 40, 13_824),), 40, 128, 1, ((21, 45, 80),)),
    50,
)
HUNYUAN = SparsityPlan(
    SparsityConfig(),
    ModelLayout((LayerKind("x", 60, 12_288),), 24, 128, 1, ((33, 45, 80),), 256),
    50,
)


class FakeTimes:
    """Measures nothing: the n-th pair of calls takes n ms sparse and 10 n dense."""

    def __init__(self, device_type="cpu", **options):
        self.measured = []
        self.notes = []
        self.clock = StepClock(
            note=self.notes.append, measure=self.measure, device_type=device_type, **options
        )

    def measure(self, calls, device, captured):
        assert not torch.is_autocast_enabled(device.type)
        self.measured.append((device, captured, [call() for call in calls]))
        return [1.0 * len(self.measured), 10.0 * len(self.measured)]

    def seconds(self, plan, part, layers=None, *, device=CPU, dtype=FP32, captured=True):
        layers = range(plan.layout.layers) if layers is None else layers
        return self.clock.seconds(plan, part, layers, device=device, dtype=dtype, captured=captured)


@pytest.mark.parametrize("part", PARTS)
def test_a_kind_and_shape_is_measured_once(part):
    fake = FakeTimes()
    found = fake.seconds(plan_of(), part)
    assert len(fake.measured) == 1
    assert found.keys() == {0, 1, 2, 3}
    assert {(each.sparse, each.dense, each.measured) for each in found.values()} == {
        (1e-3, 1e-2, True)
    }
    # Steps of other numbers, prompts of nearly one length and other layers of the kind: the same.
    for other in (plan_of(seed=3), plan_of(layers=7), plan_of(text=0, tokens=88)):
        assert fake.seconds(other, part)[1] == found[1]
    assert len(fake.measured) == 1
    fake.seconds(plan_of(tokens=200), part)
    launched = fake.seconds(plan_of(), part, captured=False)[0]
    assert launched.sparse == pytest.approx(3e-3 + step_clock.HOST_SECONDS)
    fake.seconds(plan_of(), part, dtype=torch.float64)
    assert len(fake.measured) == 4
    assert [captured for _, captured, _ in fake.measured] == [True, True, False, True]


@pytest.mark.parametrize("part", PARTS)
def test_what_runs_is_a_sparse_and_a_dense_step(part):
    fake = FakeTimes()
    with torch.autocast("cpu", torch.bfloat16):
        fake.seconds(plan_of(), part)
    ((_, _, (sparse, dense)),) = fake.measured
    make = RandomAttention if part == "attention" else RandomMLP
    sample = sample_of(plan_of(), 0, part, dtype=FP32)
    assert sample.scale == 1
    with torch.inference_mode():
        layer = make(sample.plan, 0, device=CPU, dtype=FP32)
        torch.testing.assert_close(sparse, layer.sparse())
        torch.testing.assert_close(dense, layer.unpatched())
        # Right after a refresh attention gives the same; a feed-forward layer goes part of the way.
        assert (sparse - dense).norm() < 0.2 * dense.norm()


def test_layers_that_keep_differently_lie_between_the_least_and_the_most():
    densities = {0: 0.2, 1: 0.6, 2: 0.3, 3: 0.4}
    layers = [{"layers": n, "mlp": share} for n, share in densities.items()]
    fake = FakeTimes()
    config = SparsityConfig().override(OPTIONS | {"layers": layers})
    plan = replace(plan_of(), config=config)
    found = fake.seconds(plan, "mlp")
    assert len(fake.measured) == 2
    assert {n: round(1e3 * each.sparse, 6) for n, each in found.items()} == {
        0: 1.0,
        2: 1.25,
        3: 1.5,
        1: 2.0,
    }


def test_what_was_measured_is_known_to_later_processes(tmp_path, monkeypatch):
    first = FakeTimes(known=KnownTimes(tmp_path))
    found = first.seconds(plan_of(), "mlp")
    later = FakeTimes(known=KnownTimes(tmp_path))
    assert later.seconds(plan_of(), "mlp") == found
    assert later.measured == []
    monkeypatch.setattr(step_clock, "device_name", lambda _: "another GPU")
    other = FakeTimes(known=KnownTimes(tmp_path))
    other.seconds(plan_of(), "mlp")
    monkeypatch.setattr(step_clock, "package_version", lambda _: "another version")
    newer = FakeTimes(known=KnownTimes(tmp_path))
    newer.seconds(plan_of(), "mlp")
    assert len(other.measured) == len(newer.measured) == 1
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("part", PARTS)
def test_without_memory_times_are_estimated_and_a_note_says_so(part):
    def measure(calls, device, captured):
        raise torch.OutOfMemoryError("CUDA out of memory")

    notes = []
    clock = StepClock(note=notes.append, measure=measure, device_type="cpu")
    for _ in range(2):
        found = clock.seconds(plan_of(), part, range(4), device=CPU, dtype=FP32, captured=False)
        assert found[3] == estimated_seconds(plan_of(), 3, part, dtype=FP32)
    name = "MLPs" if part == "mlp" else "attention"
    assert notes == [f"whether sparse {name} pay was estimated: there was no memory to measure it"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is measured")
def test_a_gpu_that_is_not_here_is_estimated():
    fake = FakeTimes("cuda")
    found = fake.seconds(WAN_14B, "attention", device=GPU, dtype=BF16)
    assert found[39] == estimated_seconds(WAN_14B, 39, "attention", dtype=BF16)
    assert (fake.measured, found[0].measured) == ([], False)


@pytest.mark.parametrize("plan", [WAN_14B, HUNYUAN], ids=["wan", "hunyuan"])
@pytest.mark.parametrize("part", PARTS)
def test_a_sample_of_a_large_layer_takes_a_known_share_of_its_time(plan, part):
    sample = sample_of(plan, 0, part, dtype=BF16)
    whole = estimated_seconds(plan, 0, part, dtype=BF16)
    small = estimated_seconds(sample.plan, 0, part, dtype=BF16)
    assert sample.scale > 2
    assert small.dense < 15e-3
    assert sample.scale * small.dense == pytest.approx(whole.dense, rel=0.07)
    assert sample.scale * small.sparse == pytest.approx(whole.sparse, rel=0.15)
    taken = sample.plan.layout  # no tensor of it takes a gigabyte
    assert 2 * taken.tokens * max(taken.width, taken.kinds[0].intermediate_size) < 1 << 30


def test_a_sample_has_the_rows_and_columns_of_the_layer():
    plan = plan_of(tokens=4096, text=100, heads=4)
    exact = replace(plan, layout=replace(plan.layout, exact_text=True, text_first=True))
    sample = sample_of(exact, 0, "attention", dtype=BF16).plan
    assert len(sample.layout.query_rows) == 4096
    assert sample.layout.tokens == 4352  # 4196, rounded up
    kept = sample.attention_keep_count(0)
    assert kept == math.ceil(420 / 16) * 16  # a tenth of 4196
    share = Share(2, 0, first_row=0, rows=4196, most_rows=4196, tokens=1049, grid_tokens=1024)
    shared = replace(plan, layout=replace(plan.layout, share=share))
    sample = sample_of(shared, 0, "attention", dtype=BF16)
    assert sample.plan.layout.heads == 2
    half = replace(plan, layout=replace(plan.layout, share=replace(share, rows=1, most_rows=2098)))
    assert sample_of(half, 0, "attention", dtype=BF16).scale == sample.scale / 2
    assert sample_of(shared, 0, "mlp", dtype=BF16).plan.layout.tokens == 1088  # 1049, rounded up


def test_calls_take_turns():
    order = []
    calls = [lambda n=n: order.append(n) for n in range(3)]
    times = time_in_turn(calls, CPU, captured=True)
    assert order == [0, 1, 2] * (len(order) // 3)
    assert len(order) > 6
    assert len(times) == 3
    assert min(times) >= 0
