"""The benchmark of whole transformers: dry runs at tiny size, on values that can be checked."""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from benchmarks import breakdown_figure, full_size, step_breakdown
from benchmarks.__main__ import main, parse
from benchmarks.family_models import FAMILIES
from benchmarks.full_models import (
    EARLY,
    MODELS,
    STEPS,
    FullModel,
    last_blocks_only,
    without_useless_masks,
)
from benchmarks.records import read
from chipsparse.cache.memory_plan import Capacity, MemoryDemand, plan_memory
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.plan import SparsityPlan
from chipsparse.profiles.qualities import QUALITIES
from tests.variants import slow_unless

CPU = torch.device("cpu")


@pytest.fixture
def uncompiled(monkeypatch):
    @contextmanager
    def not_compiled(_transformer):
        yield {"graphs": 0, "graph_breaks": 0}

    monkeypatch.setattr(full_size, "compiled_blocks", not_compiled)


def measured_of(case, qualities=QUALITIES):
    model = (MODELS | FAMILIES)[case]
    configs = model.qualities() | model.early()
    chosen = {name: configs[name] for name in qualities}
    return full_size.Measured(model, chosen, 0.1, CPU, torch.float32, small=True)


def measure(case, *, qualities=QUALITIES, **options):
    measured = measured_of(case, qualities)
    return measured, measured.records(**{"whole": False, "all_dense": False, **options})


@pytest.mark.parametrize("case", slow_unless(("flux_1280x768",), MODELS))
def test_records_of_a_small_model(case, uncompiled):
    measured, records = measure(case)
    assert [record["schedule"] for record in records] == list(QUALITIES)
    by_name = {record["schedule"]: record for record in records}
    image = case.startswith("flux")  # made for fewer steps
    full = dict(
        zip(("faithful", "balanced", "fast"), (25, 18, 12) if image else (20, 12, 8), strict=True)
    )
    nothing_sparse = list(full) if image else ["faithful"]
    for name, count in full.items():
        actions = by_name[name]["actions"]
        if name in nothing_sparse:
            assert actions == {"dense": count, "skip": STEPS - count}
            continue
        assert actions["dense"] + actions["refresh"] == count
        assert 0 < actions["sparse"] < actions["skip"]
    assert "skip" not in by_name["published"]["actions"]
    balanced, same_steps = by_name["balanced"], by_name["faithful" if image else "fast"]
    assert balanced["dense_ms"] == same_steps["dense_ms"]  # measured once
    for record in map(by_name.__getitem__, nothing_sparse):
        for name in ("refresh_ms", "sparse_ms", "step_speedup", "breakdown_ms", "attention_kept"):
            assert record[name] is None
        assert (record["cache_bytes"], record["host_bytes"], record["pinned_bytes"]) == (0, 0, 0)
    assert by_name["published"]["density"] < balanced["density"]
    layers = sum(MODELS[case].layers)
    for record in records:
        assert sum(record["actions"].values()) == STEPS
        assert record["measured"] == "summed from measured steps"
        assert record["branches"] == len(MODELS[case].branches)
        expected = sum(record[f"{name}_ms"] * count for name, count in record["actions"].items())
        json.dumps(record)
        assert record["latency_ms"] == pytest.approx(expected)
        assert record["baseline_ms"] == pytest.approx(STEPS * record["baseline_step_ms"])
        assert record["speedup"] == pytest.approx(record["baseline_ms"] / record["latency_ms"])
        assert (record["layers"], record["fallbacks"]) == (layers, [])
        assert record["measured_layers"] == sum(MODELS[case].layers_of(0.1)) < layers
        assert record["all_dense_ratio"] is None
        assert record["rel_error"] <= measured.rel_error < 1e-5
        if "sparse" not in record["actions"]:
            continue
        assert 0 < record["attention_kept"] < 1
        assert 0 < record["mlp_kept"] < 1
        assert 0 < record["sparse_error"] < 0.5
        assert record["skip_ms"] < record["sparse_ms"]
        assert record["cache_bytes"] > 0


@pytest.mark.parametrize("case", slow_unless(("z_image", "wan_vace", "cosmos3"), FAMILIES))
def test_further_families_run_dense_as_stock_and_sparse(case, uncompiled):
    assert case not in MODELS
    measured, (record,) = measure(case, qualities=["published"])
    assert measured.rel_error < 1e-5
    assert record["actions"]["sparse"] > STEPS / 2
    assert record["fallbacks"] == []
    for name in ("attention_kept", "mlp_kept", "sparse_error"):
        assert 0 < record[name] < 1


def chosen(case, *options):
    args = parse(["--op", "full_size", *options])
    return full_size.chosen(MODELS[case], args)


def test_some_qualities_and_the_schedules_of_the_first_measurements():
    assert list(chosen("h3_5s")) == list(QUALITIES)
    assert list(chosen("h3_5s", "--schedules", "published,fast")) == ["published", "fast"]
    early = ["sparse", "sparse, half of the steps skipped"]
    assert list(chosen("h3_5s", "--schedules", "fast", "--early")) == ["fast", *early]
    assert list(chosen("h3_5s", "--schedules", "", "--early")) == early
    with pytest.raises(ValueError, match="--schedules sparse: there are faithful, balanced"):
        chosen("h3_5s", "--schedules", "fast,sparse")
    with pytest.raises(ValueError, match="nothing to measure without --early"):
        chosen("h3_5s", "--schedules", "")


@pytest.mark.parametrize("case", MODELS)
def test_the_first_measurements_took_the_steps_of_published_but_for_one_model(case):
    found = chosen(case, "--schedules", "published", "--early")
    steps = {full_size.of_steps(config) for config in found.values()}
    first = case == "hunyuan_720p"
    assert len(steps) == (2 if first else 1)
    if first:
        assert [each.attention.density for each in found.values()] == [0.1, 0.07, 0.07]


def test_the_schedules_of_the_first_measurements_are_summed_from_the_same_steps(uncompiled):
    names = ["published", *EARLY]
    _, records = measure("wan1b_480p", qualities=names)
    assert [record["schedule"] for record in records] == names
    assert [record["actions"] for record in records[1:]] == [
        {"dense": 1, "refresh": 5, "sparse": 44},
        {"dense": 1, "refresh": 5, "sparse": 19, "skip": 25},
    ]
    times = [[record[f"{action}_ms"] for action in full_size.RUNS] for record in records]
    assert times[0] == times[1] == times[2]


@pytest.mark.parametrize("case", slow_unless(("flux_1280x768",), MODELS))
def test_full_steps_in_8_bits(case, uncompiled, tmp_path):
    """The dense step is off by the rounding, and not by more."""
    found = tmp_path / "records.json"
    options = ["--device", "cpu", "--dtype", "float32", "--small", "--depth", "0.1"]
    options += ["--case", case, "--schedules", "balanced,fast", "--precision", "fp8"]
    assert main(["--op", "full_size", *options, "--json", str(found)]) == 0
    records = read(found)
    assert [record["schedule"] for record in records] == ["balanced", "fast"]
    for record in records:
        assert record["precision"] == record["config"]["attention"]["precision"] == "fp8"
        assert record["backends"]["fp8_dense_attention"] == "reference"
        assert 1e-5 < record["rel_error"] < full_size.FP8_LIMIT / 2


def test_times_and_caches_of_a_few_blocks_are_those_of_all_with_the_dense_ones_among_them():
    measured = measured_of("wan1b_480p")
    found = {"dense_ms": 10.0, "refresh_ms": 12.0, "sparse_ms": 4.0, "breakdown_ms": {"all": 3.0}}
    found |= {"cache_bytes": 900, "host_bytes": 300, "pinned_bytes": 0, "peak_gpu_bytes": 10**6}
    scaled = measured._of_all_blocks(found, 1 / 3)
    assert measured._share == 3 / 30
    expected = {"dense_ms": 100.0, "refresh_ms": 340 / 3, "sparse_ms": 60.0}
    assert {name: scaled[name] for name in expected} == pytest.approx(expected)
    assert scaled["breakdown_ms"]["all"] == pytest.approx(30.0)
    assert [scaled[name] for name in full_size.CACHES] == [6000, 2000, 0]
    assert scaled["peak_gpu_bytes"] is None


def test_what_is_outside_of_the_blocks_counts_once():
    measured = measured_of("wan1b_480p")  # a tenth of them, two calls a step
    measured._outside = {"all": 2.0, "elementwise": 1.0}
    parts = {"all": 3.0, "elementwise": 1.5, "MLP": 0.5}
    found = {"dense_ms": 10.0, "refresh_ms": 12.0, "sparse_ms": 4.0, "breakdown_ms": parts}
    found |= dict.fromkeys((*full_size.CACHES, "peak_gpu_bytes"), 0)
    scaled = measured._of_all_blocks(found, 0.0)
    assert [scaled[f"{action}_ms"] for action in ("dense", "refresh", "sparse")] == [82, 102, 22]
    assert scaled["breakdown_ms"] == {"all": 21.0, "elementwise": 10.5, "MLP": 5.0}


@pytest.mark.parametrize("case", slow_unless(("wan_animate", "hunyuan_720p"), [*MODELS, *FAMILIES]))
def test_a_step_without_blocks(case):
    measured = measured_of(case, ["published"])
    with torch.no_grad():
        parts = measured._outside_of_blocks()
    assert 0 < parts["all"] < 5e3
    assert parts["attention"] >= 0
    assert parts["other GEMM"] > 0
    assert sum(parts.get(part, 0.0) for part in full_size.PARTS) == pytest.approx(parts["all"])
    assert "idle" not in parts
    assert all(len(getattr(measured.transformer, name)) for name in measured.model.blocks)


@pytest.mark.slow
def test_all_steps_of_every_quality_and_an_all_dense_plan(uncompiled, monkeypatch):
    monkeypatch.setattr(full_size, "STEPS", len(full_size.ACTIONS) + 2)
    monkeypatch.setattr(FullModel, "layers_of", lambda self, _: self.layers)
    model = replace(MODELS["flux_1280x768"], layers=(2, 2))
    monkeypatch.setitem(MODELS, "flux_1280x768", model)
    _, records = measure("flux_1280x768", qualities=["fast"], whole=True, all_dense=True)
    for record in records:
        assert record["measured"] == "all steps run"
        assert record["measured_layers"] == record["layers"] == 4
        assert record["speedup"] == pytest.approx(record["baseline_ms"] / record["latency_ms"])
        found = record["all_dense"]
        stock = (record["baseline_step_ms"] + found["stock_again_ms"]) / 2
        assert record["all_dense_ratio"] == pytest.approx(found["ms"] / stock)


def test_a_wrong_model_is_found_by_its_dense_step(uncompiled, monkeypatch):
    stock = full_size.Measured._stock

    def another_model(self, whole):
        found = stock(self, whole)
        self._expected = {step: output + 1 for step, output in self._expected.items()}
        return found

    monkeypatch.setattr(full_size.Measured, "_stock", another_model)
    measured, _ = measure("flux_1280x768", qualities=["fast"])
    assert measured.rel_error > full_size.DENSE_LIMIT[torch.float32]


def test_blocks_and_hooks_are_put_back():
    model = MODELS["hunyuan_720p"]
    transformer = model.make((3, 3), True, CPU, torch.float32)
    lists = [getattr(transformer, name) for name in model.blocks]
    with last_blocks_only(model, transformer), without_useless_masks(model, transformer):
        assert [len(getattr(transformer, name)) for name in model.blocks] == [2, 2]
        assert transformer.transformer_blocks[1] is lists[0][2]
        assert transformer.transformer_blocks[1].attn._forward_pre_hooks
    assert [getattr(transformer, name) for name in model.blocks] == lists
    assert not any(block.attn._forward_pre_hooks for block in transformer.transformer_blocks)


def test_an_unknown_case_names_the_known_ones(capsys):
    assert main(["--op", "full_size", "--case", "sora", "--device", "cpu", "--small"]) == 1
    said = "".join(capsys.readouterr())
    assert "no model for the case 'sora'" in said
    assert "wan14b_720p" in said


# Where the time goes.


@pytest.mark.parametrize(
    ("kernel", "op", "part"),
    [
        ("_sparse_mlp_up_kernel", "chipsparse::feed_forward", "MLP"),
        ("nvjet_tst_192x192", "chipsparse::parallel_feed_forward", "MLP"),
        ("_round_rows_kernel", "chipsparse::fp8_parallel_feed_forward", "MLP"),
        ("_top_kernel", "chipsparse::feed_forward", "index work"),
        ("_column_sparse_attention_kernel", "chipsparse::self_attention", "attention"),
        ("_pack_kernel", "chipsparse::self_attention", "index work"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", None, "attention"),
        ("nvjet_tst_192x192", None, "other GEMM"),
        ("triton_poi_fused_cat", None, "elementwise"),
        ("Memcpy HtoD (Pinned -> Device)", None, "transfers"),
        ("Memcpy DtoH (Device -> Pinned)", "chipsparse::self_attention", "transfers"),
        ("Memcpy DtoD (Device -> Device)", None, "elementwise"),
    ],
)
def test_parts_of_kernels(kernel, op, part):
    assert step_breakdown.part_of(kernel, op) == part


def test_all_ops_of_the_bridge_are_known():
    from chipsparse.pipelines import bridge

    assert set(step_breakdown.OPS) == bridge._library._op_defs


def test_the_parts_of_a_call_add_up():
    weight = torch.randn(64, 64)
    found, kernels = step_breakdown.breakdown(lambda: (weight @ weight).relu(), CPU)
    assert found["other GEMM"] > 0
    assert found["elementwise"] > 0
    assert sum(found[part] for part in step_breakdown.PARTS) >= found["all"] * 0.99
    assert {"other GEMM", "elementwise"} <= {part for part, *_ in kernels}


def test_the_figure_has_a_bar_for_each_case():
    parts = dict.fromkeys(step_breakdown.PARTS, 10.0) | {"all": 60.0}
    known = {"device": "a GPU", "torch": "2.11", "dtype": "bfloat16", "step_speedup": 2.0}
    records = [
        {"case": case, "schedule": schedule, "breakdown_ms": parts, **known}
        for case in ("one", "two")
        for schedule in ("sparse", "skipped")
    ]
    (axes,) = breakdown_figure.draw([*records, {"case": "three", "breakdown_ms": None}]).axes
    labels = [each.get_text() for each in axes.get_yticklabels()]
    assert labels == ["one\n60 ms, 2.0x stock", "two\n60 ms, 2.0x stock"]
    bars = [[(bar.get_x(), bar.get_width()) for bar in part] for part in axes.containers]
    count = len(step_breakdown.PARTS)
    assert bars == [
        [pytest.approx((part / count, 1 / count))] * len(labels) for part in range(count)
    ]


def test_bars_of_one_model_stand_together_to_scale():
    known = {"device": "a GPU", "torch": "2.11", "dtype": "bfloat16", "step_speedup": 2.0}
    records = [
        {"case": case, "when": when, "breakdown_ms": dict.fromkeys(step_breakdown.PARTS, ms)}
        | known
        for when, ms in (("before", 10.0), ("now", 5.0))
        for case in ("one", "two")
    ]
    for record in records:
        record["breakdown_ms"]["all"] = sum(record["breakdown_ms"].values())
    (axes,) = breakdown_figure.draw(records).axes
    names = [each.get_text().partition("\n")[0] for each in axes.get_yticklabels()]
    assert names == ["one, before", "one, now", "two, before", "two, now"]
    ends = [bar.get_x() + bar.get_width() for bar in axes.containers[-1]]
    assert ends == [pytest.approx(1.0), pytest.approx(0.5)] * 2
    assert {text.get_text() for text in axes.texts} == {"17%"}  # of a bar's own step


GIB = 2**30


# Tokens, heads, neurons, blocks, branches, and GiB that all blocks leave on the GPU and the host.
@pytest.mark.parametrize(
    ("tokens", "heads", "width", "blocks", "branches", "room", "recomputed"),
    [
        pytest.param(118_800, 24, 12_288, 60, 1, (102, 100), False, id="HunyuanVideo 720p"),
        pytest.param(75_600, 40, 13_824, 40, 2, (100, 100), False, id="Wan 14B 720p"),
        pytest.param(103_000, 56, 14_336, 50, 1, (58, 108), True, id="MiniMax-H3, 15 s"),
        pytest.param(38_000, 56, 14_336, 50, 1, (68, 108), False, id="MiniMax-H3, 5 s"),
    ],
)
def test_caches_of_some_blocks_live_where_those_of_all_do(
    tokens, heads, width, blocks, branches, room, recomputed
):
    kind = LayerKind("block", blocks, width, True, 2, 4)
    layout = ModelLayout((kind,), heads, 128, 1, ((1, 1, tokens),))
    made = replace(layout, kinds=(replace(kind, layers=blocks // 5),))
    config = MODELS["hunyuan_720p"].early()["sparse"]
    plan = SparsityPlan(config.override({"schedule.first_dense_layers": 0}), made, STEPS)
    of_all = full_size.of_all_blocks(plan, 0.2)
    assert of_all.layout == layout
    demand = MemoryDemand(torch.bfloat16, branches, captures=False)
    whole = plan_memory(of_all, Capacity(*(each * GIB for each in room)), demand)
    assert bool(whole.placement.recomputed) == recomputed

    taken = 7 * GIB
    budgets = full_size.in_share(plan.config, whole, share=0.2, taken=taken)
    capacity = Capacity(budgets.memory.vram - taken, budgets.memory.ram)
    found = plan_memory(replace(plan, config=budgets), capacity, demand)
    assert found.in_fp8 == whole.in_fp8
    slots = whole.placement.slot_bytes
    assert found.placement.slot_bytes == pytest.approx(slots, rel=0.1)
    assert 5 * found.placement.device_bytes == pytest.approx(whole.placement.device_bytes, rel=0.1)
    assert 5 * found.host_bytes == pytest.approx(whole.host_bytes, rel=0.1)
    assert 5 * len(found.placement.recomputed) == pytest.approx(
        len(whole.placement.recomputed), abs=5
    )


def test_weights_in_fp8_count_as_they_are_stored():
    linear = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
    assert full_size.bytes_of(linear) == 2 * (64 * 32 + 32)
    halves = (half.clone() for half in linear.weight.detach().chunk(2))
    linear.weight = torch.nn.Parameter(TwoTensor(*halves), requires_grad=False)
    assert full_size.bytes_of(linear) == 2 * (2 * 16 * 64 + 32)
