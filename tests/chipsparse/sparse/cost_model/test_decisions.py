"""The decisions by the rates of a GPU: what runs dense, and when steps are captured."""

import dataclasses
from pathlib import Path

import pytest
import torch

from benchmarks.records import read
from chipsparse import SparsityConfig
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.sparse.cost_model import layer_times
from chipsparse.sparse.cost_model.layer_times import (
    PartSeconds,
    Rates,
    captures,
    part_seconds,
    part_times,
)
from chipsparse.sparse.plan import SparsityPlan
from tests.variants import slow

RESULTS = Path(__file__).parents[4] / "benchmarks/results"
CPU = torch.device("cpu")
H200 = Rates()
EVERYTHING = {(layer, part) for layer in (0, 1) for part in ("attention", "mlp")}
BF16 = torch.bfloat16
BOTH = "weights and inputs"


def recorded(file, *operations):
    return [case for case in read(RESULTS / file) if case["op"] in operations]


ATTENTION = [
    *recorded("attention_curve_h200.json", "attention_curve"),
    *recorded("attention_kernels_h200.json", "column_sparse_attention"),
]
MLPS = recorded("sparse_mlp_h200.json", "sparse_mlp")


def name_of(case):
    rows = case["block_size"]
    kept = case["density"]
    return f"{case['case']}-{case['backend']}-{rows}-{kept:.2f}"


def plan_of(tokens, heads, head_dim, width, *, batch=1, layers=2, steps=50, **overrides):
    values = {name.replace("__", "."): value for name, value in overrides.items()}
    values = {"attention.delta_rule": "difference", "mlp.density": 0.3, **values}
    kind = LayerKind("block", layers, width)
    layout = ModelLayout((kind,), heads, head_dim, batch, ((1, 1, tokens),))
    return SparsityPlan(SparsityConfig().override(values), layout, steps)


def with_config(plan, changes):
    return dataclasses.replace(plan, config=plan.config.override(changes))


SMALL = plan_of(17_408, 4, 64, 1024, mlp__density=0.3)


@pytest.mark.parametrize("case", [*ATTENTION, *MLPS], ids=name_of)
def test_recorded_layers_stay_sparse(case):
    if case in ATTENTION:
        part = "attention"
        sizes = (case["tokens"], case["heads"], case["head_dim"], 1024)
        changes = {"attention__density": case["density"], "block_size": case["block_size"]}
        # Heads of 64 channels and Triton's kernels are slower than the rates say.
        dense = (0.65, 1.1)
        sparse = (0.5, 1.7)
    else:
        part = "mlp"
        sizes = (case["mlp_tokens"], case["channels"] // 128, 128, case["mlp_width"])
        changes = {"mlp__density": case["density"]}
        dense = (0.75, 1.25)
        sparse = (0.7, 1.3)
    plan = plan_of(*sizes, batch=case["batch"] if case in ATTENTION else 1, **changes)
    times = part_seconds(plan, 0, part, rates=H200, dtype=BF16, captured=False)
    assert case["latency_ms"] < case["baseline_ms"]
    assert times.pays
    assert dense[0] < 1e3 * times.dense / case["baseline_ms"] < dense[1]
    assert sparse[0] < 1e3 * times.sparse / case["latency_ms"] < sparse[1]


def slower(plan, *, captured=True, **given):
    times = part_times(plan, rates=H200, dtype=BF16, captured=captured, **given)
    return layer_times.slower_parts(times, H200)


def test_a_narrow_mlp_runs_dense_and_its_attention_sparse():
    """Measured on an H200: 0.27 ms sparse, 0.06 dense."""
    reasons = slower(SMALL)
    assert reasons.keys() == {(0, "mlp"), (1, "mlp")}
    assert set(reasons.values()) == {
        "by the rates of one NVIDIA H200 a sparse step of it may take up to 0.17 ms, and a "
        "dense one takes 0.026 ms",
    }
    assert slower(SMALL, dense={(1, "mlp")}).keys() == {(0, "mlp")}
    assert slower(with_config(SMALL, {"mlp.density": "dense"})) == {}


def test_few_tokens_run_dense_unless_a_backend_is_forced_or_nothing_is_sparse():
    plan = plan_of(256, 24, 128, 12_288)
    assert slower(plan).keys() == EVERYTHING
    for changes in ({"backend": "reference"}, {"schedule.spread.full": 1.0}):
        assert slower(with_config(plan, changes)) == {}


@pytest.mark.parametrize(("tokens", "both"), [(4_352, True), (3_072, False)])
def test_what_the_host_launches_takes_its_time(tokens, both):
    """Attention of 3,072 tokens: 0.19 ms dense, and 0.25 to launch a sparse step."""
    plan = plan_of(tokens, 24, 128, 12_288)
    assert slower(plan) == {}
    expected = set() if both else {(0, "attention"), (1, "attention")}
    assert slower(plan, captured=False).keys() == expected


def test_too_few_query_blocks_for_the_processors_take_longer():
    """One head of 17,000 rows is 133 blocks of 128, which 132 processors compute in two turns."""
    plan = plan_of(17_000, 1, 128, 64, attention__density=0.6, mlp__density="dense")
    times = part_seconds(plan, 0, "attention", rates=H200, dtype=BF16, captured=True)
    assert times.sparse < 0.95 * times.dense < times.most
    assert times.most == pytest.approx((1.15 * times.sparse + 60e-6) * 2 * 132 / 133)


def test_rates_are_known_of_two_gpus_in_16_bits(monkeypatch):
    gpu = torch.device("cuda")
    names = iter(("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A40"))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: next(names))
    known_rates = layer_times.known_rates
    first, second, third = (known_rates(gpu, BF16) for _ in range(3))
    assert first == H200
    assert (second.attention, second.device) == (H200.attention, "NVIDIA H100 80GB HBM3")
    assert second.memory < H200.memory
    assert third is known_rates(gpu, torch.float32) is known_rates(CPU, BF16) is None


@pytest.mark.parametrize(
    ("tokens", "fp8", "pays"),
    [(4_352, "weights", True), (3_072, BOTH, False), (32_760, BOTH, True)],
)
def test_fp8_linears_are_what_sparse_steps_are_compared_with(tokens, fp8, pays):
    """An MLP of FLUX's size; a sparse step reads its weights once more."""
    plan = plan_of(tokens, 24, 128, 12_288, attention__density="dense")
    times = part_times(plan, rates=H200, dtype=BF16, captured=True, fp8_mlps={1: fp8})
    plain = times[0, "mlp"]
    rounded = times[1, "mlp"]
    read = 2 * 3072 * 12_288 * 3 / 4.26e12
    assert rounded.sparse - plain.sparse == pytest.approx(read + 10e-6, rel=1e-3)
    if fp8 == "weights":
        assert rounded.dense - plain.dense == pytest.approx(read, rel=1e-3)
    else:
        rounding = tokens * (3072 + 12_288) * 5 / 4.26e12
        assert rounded.dense == pytest.approx(plain.dense / 1.6 + rounding, rel=1e-3)
    assert plain.pays
    assert rounded.pays is pays


def test_what_may_save_next_to_nothing_runs_dense_and_times_have_two_digits():
    assert PartSeconds(sparse=0.5e-3, most=0.94e-3, dense=1e-3).pays
    assert not PartSeconds(sparse=0.5e-3, most=0.96e-3, dense=1e-3).pays
    texts = map(layer_times.milliseconds_text, (6.13e-6, 0.354e-3, 12.4e-3, 0.3))
    assert [*texts] == ["0.0061 ms", "0.35 ms", "12 ms", "300 ms"]


def flux_of(tokens=4352, heads=24, layers=57, width=12_288, steps=50, **overrides):
    """By default FLUX.1 at 1280x768."""
    return plan_of(tokens, heads, 128, width, layers=layers, steps=steps, **overrides)


@pytest.mark.parametrize(
    ("tokens", "heads", "layers", "width", "expected"),
    [
        (4352, 24, 57, 12_288, True),  # 72 ms of kernels, launched in 85
        slow(17_408, 2, 10, 1024, True),
        slow(32_760, 12, 30, 8960, False),  # 4 % of a sparse step were idle
        slow(119_056, 24, 60, 12_288, False),
    ],
)
def test_steps_that_wait_for_the_host_are_captured(tokens, heads, layers, width, expected):
    plan = flux_of(tokens, heads, layers, width)
    assert captures(plan, BF16) is expected
    # A device that takes no time waits for any host, one that takes very long for none.
    assert captures(plan, BF16, Rates(host_seconds=1e3))
    assert not captures(plan, BF16, Rates(host_seconds=1e-9))


@pytest.mark.parametrize(
    ("tokens", "layers", "few"),
    [(4352, 57, "always"), (119_056, 60, "never")],
)
def test_what_a_user_asks_for_is_not_weighed_and_a_few_steps_run_as_many_would(tokens, layers, few):
    assert captures(flux_of(tokens, layers=layers, cuda_graphs="always"), BF16)
    plan = flux_of(tokens, layers=layers, cuda_graphs="never")
    assert not captures(plan, BF16)
    auto = with_config(plan, {"cuda_graphs": "auto"})
    assert layer_times.as_of_many(SparsityConfig(), auto, BF16).cuda_graphs == few


@pytest.mark.parametrize(
    ("tokens", "sparse", "expected"),
    # FLUX.1 saves 11 ms a call and pays 128 once; a small model saves nearly all of 15 for 22.
    [(4352, 12, False), (4352, 16, True), (256, 2, False), (256, 3, True)],
)
def test_enough_sparse_steps_must_come(tokens, sparse, expected):
    actions = ("dense", "refresh", *["sparse"] * sparse)
    plan = flux_of(tokens, steps=len(actions), schedule__actions=actions)
    assert plan.sparse_steps == sparse
    assert captures(plan, BF16) is expected
