"""The benchmarks: kernel cases, whole steps, records and figures, on tiny shapes."""

import contextlib
import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path

import pytest
import torch
from PIL import Image

import chipsparse.kernels
from benchmarks import kernels, step_timing, steps
from benchmarks.__main__ import main
from benchmarks.cases import CASES, WrongResultError
from benchmarks.kernel_cases import KERNELS, Inputs, Settings, check_selection
from benchmarks.models import MODELS, STEPS, without_useless_masks
from benchmarks.records import Run, read, table, write
from chipsparse import SparsityConfig
from chipsparse.kernels.dispatch import Backend
from chipsparse.pipelines import ops
from chipsparse.profiles.profile import QUALITIES
from docs.tables import figures
from tests.variants import slow_unless

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]
near = partial(pytest.approx, rel=1e-4)  # files have six digits, differences of them five


def dry_run(tmp_path, *arguments):
    path = tmp_path / "records.json"
    path.unlink(missing_ok=True)
    code = main([*arguments, "--tiny", "--device", "cpu", "--json", str(path)])
    return code, read(path) if path.exists() else []


def test_files_hold_the_records_that_were_written(tmp_path):
    made = [
        {"case": f"case {number % 7}", "one": 1, "number": number / 7, "rare": [number // 40]}
        for number in range(90)
    ]
    for record in made[::3]:
        del record["rare"]
    write(made, tmp_path / "many.json")
    write([{"a": float("inf")}], tmp_path / "one.json")
    for record in made:
        record["number"] = pytest.approx(record["number"], rel=1e-5)
    assert read(tmp_path / "many.json", tmp_path / "one.json") == [*made, {"a": None}]


def test_a_run_saves_after_each_record_and_survives_failures(tmp_path, capsys):
    run = Run(tmp_path / "records.json")
    with run.attempt("first"):
        run.add({"case": "a", "psnr": float("inf")})
        raise ValueError("no more")
    with pytest.raises(TypeError):
        run.add({"case": object()})
    assert read(tmp_path / "records.json") == [{"case": "a", "psnr": None}]
    assert [item.name for item in tmp_path.iterdir()] == ["records.json"]
    assert run.failed == ["first"]
    assert "FAILED first: ValueError: no more" in capsys.readouterr().out
    text = table([{"a": 31.26}, {"a": None}], {"a": ".1f"})
    assert text.splitlines()[2:] == ["| 31.3 |", "|  |"]


def test_every_operation_has_a_case():
    """But for those whose time is part of another's, and copies between processes."""
    others = {"piece_copies", "fp8_quantization", "fp8_rows", "fp8_dequantization"}
    folders = resources.files(chipsparse.kernels).iterdir()
    operations = {each.name for each in folders if (each / "reference.py").is_file()}
    combined = {"dense_attention", "fp8_dense_attention_column_sums", "sparse_mlp"}
    assert KERNELS.keys() == (operations - others) | combined


@pytest.mark.parametrize("op", KERNELS)
def test_each_kernel_is_checked_and_measured(op, tmp_path, capsys):
    blocks = op not in kernels.WITHOUT_BLOCKS
    code, made = dry_run(tmp_path, "kernels", "--op", op, "--case", "odd", "--block-size", "64,128")
    assert code == 0
    assert [record.get("block_size") for record in made] == ([64, 128] if blocks else [None])
    assert capsys.readouterr().out.count(f"| {op} |") == len(made)
    case = CASES["odd"].scaled(tokens=300, heads=2)
    for record in made:
        assert (record["op"], record["case"]) == (op, case.name)
        assert record["backend"] == ("library" if op == "dense_attention" else "reference")
        assert record["latency_ms"] > 0
        assert record["rel_error"] < (8e-2 if op.startswith("fp8") else 1e-2)
        assert {"device", "torch", "triton", "commit"} <= record.keys()
        if op == "mask_packing":
            assert (record["baseline"], record["speedup"]) == (None, None)
        else:
            assert record["speedup"] == near(record["baseline_ms"] / record["latency_ms"])
        if op == "column_sparse_attention":
            kept = round(300 * case.density)
            assert (record["density"], record["ideal"]) == (kept / 300, 300 / kept)
            flops = 4 * case.batch * 2 * case.head_dim * 300 * kept
            assert record["tflops"] == near(flops / record["latency_ms"] / 1e9)


def last_row_off(result):
    """A result of an operation with the last row of each head, or of all, changed."""
    row = (result[0] if isinstance(result, tuple) else result)[..., -1, :]
    if row.is_floating_point():
        row *= -3
    elif row.dtype == torch.uint8:  # bits, or numbers in 8 bits
        row ^= 0x7F
    else:
        row -= 7
    return result


@pytest.mark.parametrize("op", KERNELS)
def test_a_wrong_result_is_not_timed(op, monkeypatch):
    inputs = Inputs(CASES["odd"].scaled(tokens=300, heads=2), CPU, torch.bfloat16)
    kernel = KERNELS[op](inputs, Settings())
    wrong = replace(kernel, call=lambda name: last_row_off(kernel.call(name)))
    monkeypatch.setattr(kernels, "time_call", lambda *_: pytest.fail("timed"))
    backend = "library" if op == "dense_attention" else "reference"
    with pytest.raises(WrongResultError, match="not timed"):
        kernels.measure(op, wrong, inputs, backend)


def test_one_wrong_backend_leaves_the_others(tmp_path, monkeypatch, capsys):
    from chipsparse.kernels.column_sparse_attention import column_sparse_attention

    right = column_sparse_attention.backends

    def launch(call):
        return last_row_off(right[-1].launch(call))

    backends = Backend("bad", lambda: launch), *right
    monkeypatch.setattr(column_sparse_attention, "backends", backends)
    ops = "column_sparse_attention,mask_packing"
    code, made = dry_run(tmp_path, "kernels", "--op", ops, "--case", "odd,nowhere,odd_d64")
    assert code == 1
    assert [record["op"] for record in made] == ["mask_packing"] * 2
    output = capsys.readouterr().out
    assert "column_sparse_attention, odd N300 H2, block size 128, bad: WrongResultError" in output
    assert "unknown case 'nowhere'" in output
    code, made = dry_run(tmp_path, "kernels", "--op", ops, "--case", "odd", "--backend", "nothing")
    assert (code, made) == (1, [])
    assert "unknown backend 'nothing'" in capsys.readouterr().out


def test_delta_rules_are_measured(tmp_path):
    options = ("--op", "column_sparse_attention", "--case", "odd", "--delta-rule", "means")
    code, (record,) = dry_run(tmp_path, "kernels", *options)
    assert (code, record["delta_rule"], record["density"]) == (0, "means", 0.25)


def test_a_selection_is_judged_by_value_and_count():
    sums = torch.tensor([[5.0, 4, 3, 3, 3, 1, 1, 1]])
    ties = torch.tensor([[True, True, False, True, False, False, False, False]])
    assert check_selection(ties, sums, 3, "here") == {"rel_error": 0, "count_error": 0}
    low = torch.tensor([[True, True, False, False, False, True, False, False]])
    with pytest.raises(WrongResultError, match="missed share"):
        check_selection(low, sums, 3, "here")
    with pytest.raises(WrongResultError, match="count error"):
        check_selection(torch.ones_like(low), sums, 3, "here")


@pytest.fixture
def uncompiled(monkeypatch):
    facts = {"graphs": 0, "graph_breaks": 0}
    monkeypatch.setattr(steps, "compiled_blocks", lambda _: contextlib.nullcontext(facts))


@pytest.mark.parametrize(
    "case",
    slow_unless(("flux_1280x768", "wan14b_720p", "z_image", "wan_vace", "cosmos3"), MODELS),
)
def test_steps_of_a_small_model(case, uncompiled, tmp_path):
    every = case in ("flux_1280x768", "wan14b_720p")
    names = [*QUALITIES, "sparse"] if every else ["chipmunk"]
    options = ("--dtype", "float32", "--case", case, "--schedules", ",".join(names))
    code, made = dry_run(tmp_path, "steps", *options)
    by_name = {record["schedule"]: record for record in made}
    assert (code, [*by_name]) == (0, names)
    for record in made:
        actions = record["actions"]
        assert sum(actions.values()) == STEPS
        expected = sum(record[f"{name}_ms"] * count for name, count in actions.items())
        assert record["latency_ms"] == near(expected)
        assert record["speedup"] == near(record["baseline_ms"] / record["latency_ms"])
        assert record["baseline_ms"] == near(STEPS * record["baseline_step_ms"])
        assert record["fallbacks"] == []
        assert record["rel_error"] < 1e-5
        # Sparse steps are measured whether or not the quality takes any at this size.
        assert record["step_speedup"] == near(record["baseline_step_ms"] / record["sparse_ms"])
        assert 0 < record["attention_kept"] < 1
        if record["schedule"] in ("chipmunk", "sparse"):
            assert 0 < record["mlp_kept"] < 1
        else:
            assert (record["mlp_kept"], record["mlp_density"]) == (None, 1.0)
        assert 0 < record["sparse_error"] < 0.5
        assert record["cache_bytes"] > 0
    if every:
        first = by_name["sparse"]
        assert first["actions"] == {"dense": 1, "refresh": 5, "sparse": 44}
        # The same steps are measured once.
        assert first["sparse_ms"] == by_name["chipmunk"]["sparse_ms"]
        balanced = by_name["balanced"]
        fast = by_name["fast"]
        assert balanced["sparse_ms"] == fast["sparse_ms"]
        assert balanced["step_config"] == fast["step_config"] != first["step_config"]
        assert balanced["config"] != fast["config"]
        small = case.startswith("flux")  # too few tokens for sparse steps
        assert ("sparse" in balanced["actions"]) != small


def test_steps_with_sparse_mlps_are_another_config(uncompiled, tmp_path):
    options = ("--dtype", "float32", "--case", "wan14b_720p", "--schedules", "fast")
    _, (dense,) = dry_run(tmp_path, "steps", *options)
    code, (sparse,) = dry_run(tmp_path, "steps", *options, "--mlp-density", "0.3")
    assert (code, sparse["mlp_density"], sparse["actions"]) == (0, 0.3, dense["actions"])
    for digest in ("config", "step_config"):
        assert sparse[digest] != dense[digest]


def test_few_of_long_steps_are_measured():
    config = MODELS["wan14b_720p"].qualities()["fast"]
    counts = [
        Counter(steps.actions_listed(steps.of_steps(config, step_ms)))
        for step_ms in (steps.LONG_STEP_MS - 1, steps.LONG_STEP_MS)
    ]
    assert counts[0] == {"dense": 3, "refresh": 3, "sparse": 5, "skip": 3}
    assert counts[1] == {"dense": 1, "refresh": 1, "sparse": 5, "skip": 1}
    assert "sparse" not in steps.actions_listed(steps.of_steps(SparsityConfig.dense()))


@pytest.mark.parametrize("linears", [(), ("--fp8-linears",)])
def test_full_steps_in_8_bits_with_compiled_blocks(linears, monkeypatch, tmp_path):
    monkeypatch.setitem(step_timing.COMPILE_OPTIONS, "backend", "aot_eager")
    if linears:
        api = pytest.importorskip("torchao.quantization.quant_api")
        monkeypatch.setattr(api, "_check_hardware_support", lambda _: None)  # looks for a GPU
    options = ("--case", "wan1b_480p", "--schedules", "chipmunk")
    code, (record,) = dry_run(tmp_path, "steps", *options, "--precision", "fp8", *linears)
    assert (code, record["graph_breaks"]) == (0, 0)
    assert record["backends"]["fp8_dense_attention"] == "reference"
    assert record["linears"] == ("fp8" if linears else "bfloat16")
    assert 1e-5 < record["rel_error"] < steps.FP8_LIMIT / 2
    assert ("fp8_dequantization" in record["backends"]) == bool(linears)


def test_a_wrong_model_is_found_by_its_dense_step(uncompiled, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(steps, "relative_error", lambda a, b: float((a + 1 - b).norm() / b.norm()))
    options = ("--case", "flux_1280x768,sora", "--schedules", "fast")
    assert dry_run(tmp_path, "steps", *options)[0] == 1
    printed = capsys.readouterr().out
    assert "FAILED flux_1280x768: WrongResultError: relative error" in printed
    assert "no model for the case 'sora'; there are ['hunyuan_720p'" in printed


def test_masks_are_dropped_and_hooks_put_back():
    model = MODELS["hunyuan_720p"]
    transformer = model.make(True, CPU, torch.float32)
    blocks = [block for name in model.blocks for block in getattr(transformer, name)]
    with without_useless_masks(transformer):
        assert [len(block.attn._forward_pre_hooks) for block in blocks] == [1] * 4
    assert not any(block.attn._forward_pre_hooks for block in blocks)


def test_offloaded_steps_are_measured(uncompiled, tmp_path):
    options = ("--case", "wan1b_480p", "--dtype", "float32", "--mlp")
    code, (record,) = dry_run(tmp_path, "offload", *options)
    assert (code, record["identical"], record["fallbacks"]) == (0, True, [])
    assert (record["layers"], record["mlp"]) == (2, "sparse")
    assert record["slowdown"] == near(record["latency_ms"] / record["baseline_ms"])
    assert record["host_bytes"] > record["baseline_host_bytes"] == 0
    assert record["to_device_bytes"] > 0
    assert record["to_host_bytes"] > 0


@pytest.mark.slow
def test_two_processes_share_steps(tmp_path):
    file = tmp_path / "record.json"
    options = "--tiny --device cpu --case wan1b_480p --json"
    command = "-m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks parallel"
    command = [sys.executable, *command.split(), *options.split(), str(file)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    (record,) = read(file)
    assert (record["ranks"], record["alone"]["peak_gpu_bytes"]) == (2, None)
    by_heads, by_branches = record["together"]
    assert (by_heads["ulysses"], by_heads["guidance"]) == (2, 1)
    assert (by_branches["ulysses"], by_branches["guidance"]) == (1, 2)
    for together in record["together"]:
        assert together["same_again"]
        assert together["rel_l2"] < 1e-5
        for name, ms in record["alone"]["ms"].items():
            assert together["speedup"][name] == near(ms / together["ms"][name])


PARTS_OF_KERNELS = {
    ("_sparse_mlp_up_kernel", "chipsparse::feed_forward"): "MLP",
    ("nvjet_tst_192x192", "chipsparse::parallel_feed_forward"): "MLP",
    ("_top_kernel", "chipsparse::feed_forward"): "index work",
    ("_column_sparse_attention_kernel", "chipsparse::self_attention"): "attention",
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", None): "attention",
    ("nvjet_tst_192x192", None): "other GEMM",
    ("triton_poi_fused_cat", None): "elementwise",
    ("Memcpy HtoD (Pinned -> Device)", None): "transfers",
    ("Memcpy DtoD (Device -> Device)", None): "elementwise",
}


def test_parts_of_kernels():
    assert {case: step_timing.part_of(*case) for case in PARTS_OF_KERNELS} == PARTS_OF_KERNELS
    assert set(step_timing.OPS) == ops._library._op_defs


def test_the_curve_is_measured_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "KEEP_FRACTIONS", (0.1, 0.5))
    monkeypatch.setattr(kernels, "TOKENS", (100, 200))
    code, made = dry_run(tmp_path, "curve")
    assert code == 0
    assert [record["curve"] for record in made] == ["keep"] * 4 + ["tokens"] * 2
    assert [record["tokens"] for record in made] == [300] * 4 + [100, 200]
    out = tmp_path / "curve.png"
    figures.main(["curve", str(tmp_path / "records.json"), "-o", str(out)])
    with Image.open(out) as image:
        assert image.size == (1200, 500)
    keep, tokens = figures.curve(made).axes
    assert [line.get_label() for line in keep.lines] == ["300 tokens", "possible, 1 / kept share"]
    last = made[-1]
    heads = last["batch"] * last["heads"]
    assert tokens.lines[1].get_ydata()[-1] == near(last["latency_ms"] / heads)
    for some in (made[:4], made[4:], made[4:5]):  # also of one curve
        assert len(figures.curve(some).axes) == 1
    with pytest.raises(ValueError, match="no records of a curve"):
        figures.curve([])


def test_bars_of_one_model_stand_together_to_scale():
    known = {"device": "a GPU", "torch": "2.11", "dtype": "bfloat16", "step_speedup": 2.0}
    made = [
        {"case": case, "when": when, "breakdown_ms": dict.fromkeys(step_timing.PARTS, ms)} | known
        for when, ms in (("before", 10.0), ("now", 5.0))
        for case in ("one", "two")
    ]
    for record in made:
        record["breakdown_ms"]["all"] = math.fsum(record["breakdown_ms"].values())
    (axes,) = figures.parts([*made, {"case": "three", "breakdown_ms": None}]).axes
    names = [each.get_text() for each in axes.get_yticklabels()]
    assert names[0] == "one, before\n60 ms, 2.0x stock"
    order = ["one, before", "one, now", "two, before", "two, now"]
    assert [name.partition("\n")[0] for name in names] == order
    ends = [bar.get_x() + bar.get_width() for bar in axes.containers[-1]]
    assert ends == [near(1.0), near(0.5)] * 2
    assert {text.get_text() for text in axes.texts} == {"17%"}  # of a bar's own step


def test_samplers_that_add_noise_are_measured(tmp_path):
    code, records = dry_run(tmp_path, "noisy-samplers", "--sampler", "LTX ancestral, eta 1")
    assert code == 0
    assert [record["full"] for record in records] == [10, 8, 6]
    for record in records:
        assert record["worst_psnr_db"] == record["psnr_db"]  # of one seed
        assert record["psnr_db"] > 20
        assert record["held_psnr_db"] > 10
    assert records[0]["psnr_db"] > records[2]["psnr_db"]
