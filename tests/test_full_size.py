"""The benchmark of whole transformers: dry runs at tiny size, on values that can be checked."""

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from PIL import Image

from benchmarks import breakdown_figure, full_size, step_breakdown
from benchmarks.full_models import MODELS, STEPS, last_blocks_only, without_useless_masks

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


@pytest.fixture
def uncompiled(monkeypatch):
    @contextmanager
    def not_compiled(_transformer):
        yield {"graphs": 0, "graph_breaks": 0}

    monkeypatch.setattr(full_size, "compiled_blocks", not_compiled)


def measure(case, **options):
    measured = full_size.Measured(MODELS[case], 2, CPU, torch.float32, small=True)
    return measured, measured.records(**{"whole": False, "all_dense": False, **options})


@pytest.mark.parametrize("case", MODELS)
def test_records_of_a_small_model(case, uncompiled):
    measured, (sparse, skipped) = measure(case)
    assert measured.rel_error == sparse["rel_error"] < 1e-5
    # One step of warm-up for the softmax constants, a refresh every ten steps.
    assert sparse["actions"] == {"dense": 1, "refresh": 5, "sparse": 44}
    assert skipped["actions"] == {"dense": 1, "refresh": 5, "sparse": 19, "skip": 25}
    assert skipped["skipped"] == list(full_size.SKIPPED)
    for record in (sparse, skipped):
        assert record["measured"] == "summed from measured steps"
        assert record["branches"] == len(MODELS[case].branches)
        expected = sum(record[f"{name}_ms"] * count for name, count in record["actions"].items())
        assert record["latency_ms"] == pytest.approx(expected)
        assert record["baseline_ms"] == pytest.approx(STEPS * record["baseline_step_ms"])
        assert record["speedup"] == pytest.approx(record["baseline_ms"] / record["latency_ms"])
        assert record["fallbacks"] == []
        assert 0 < record["attention_kept"] < 1
        assert 0 < record["mlp_kept"] < 1
        assert record["all_dense_ratio"] is None
        json.dumps(record)
    assert 0 < sparse["sparse_error"] < 0.5
    assert skipped["skip_ms"] < sparse["sparse_ms"]


def test_all_steps_of_both_schedules_and_an_all_dense_plan(uncompiled, monkeypatch):
    monkeypatch.setattr(full_size, "STEPS", len(full_size.ACTIONS) + 2)
    _, records = measure("flux_1280x768", whole=True, all_dense=True)
    for record in records:
        assert record["measured"] == "all steps run"
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
    measured, _ = measure("flux_1280x768")
    assert measured.rel_error > full_size.DENSE_LIMIT[torch.float32]


def test_blocks_and_hooks_are_put_back():
    model = MODELS["hunyuan_720p"]
    transformer = model.make(3, True, CPU, torch.float32)
    lists = [getattr(transformer, name) for name in model.blocks]
    with last_blocks_only(model, transformer), without_useless_masks(model, transformer):
        assert [len(getattr(transformer, name)) for name in model.blocks] == [2, 2]
        assert transformer.transformer_blocks[1] is lists[0][2]
        assert transformer.transformer_blocks[1].attn._forward_pre_hooks
    assert [getattr(transformer, name) for name in model.blocks] == lists
    assert not any(block.attn._forward_pre_hooks for block in transformer.transformer_blocks)


def test_an_unknown_case_names_the_known_ones(tmp_path):
    command = ["--op", "full_size", "--case", "sora", "--device", "cpu", "--small"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "no model for the case 'sora'" in done.stdout + done.stderr
    assert "wan14b_720p" in done.stdout + done.stderr


# Where the time goes.


@pytest.mark.parametrize(
    ("kernel", "op", "part"),
    [
        ("_sparse_mlp_up_kernel", "chipsparse::feed_forward", "MLP"),
        ("nvjet_tst_192x192", "chipsparse::parallel_feed_forward", "MLP"),
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

    ops = ("self_attention", "feed_forward", "parallel_feed_forward")
    assert all(callable(getattr(bridge, op)) for op in ops)
    assert set(step_breakdown.OPS) == {f"chipsparse::{op}" for op in ops}


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
    both = breakdown_figure.draw([*records, {"case": "three", "breakdown_ms": None}])
    one = breakdown_figure.draw(records[:2])
    assert both.height - one.height == breakdown_figure.BAR
    attention = Image.new("RGB", (1, 1), breakdown_figure.COLOURS[0]).getpixel((0, 0))
    for row in range(2):
        middle = breakdown_figure.TOP + breakdown_figure.BAR * row + breakdown_figure.BAR // 2
        assert both.getpixel((breakdown_figure.LEFT + 4, middle + 16)) == attention
