"""The benchmarks: kernel cases, whole steps, records and figures, on tiny shapes."""

import contextlib
import json
import math
import subprocess
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.testing._internal.two_tensor import TwoTensor

import chipsparse.kernels
from benchmarks import cases, figures, kernels, step_timing, steps
from benchmarks.__main__ import main, parse
from benchmarks.cases import CASES
from benchmarks.fp8_linears import linears, to_fp8
from benchmarks.kernel_cases import KERNELS, Inputs, Settings
from benchmarks.kernel_checks import WrongResultError, check_selection, samples
from benchmarks.models import FAMILIES, MODELS, STEPS, last_blocks_only, without_useless_masks
from benchmarks.records import Run, read, table, write, write_compact
from chipsparse.cache.memory_plan import Capacity, MemoryDemand, plan_memory
from chipsparse.kernels.dispatch import Backend
from chipsparse.kernels.mask_packing import unpack_mask
from chipsparse.layers.mlp_weights import fp8_form
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.pipelines import bridge
from chipsparse.plan import SparsityPlan
from chipsparse.profiles.qualities import QUALITIES
from tests.variants import slow, slow_unless

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]


def dry_run(tmp_path, *arguments):
    """Exit code and records of a tiny run on the CPU."""
    path = tmp_path / "records.json"
    path.unlink(missing_ok=True)
    code = main([*arguments, "--tiny", "--device", "cpu", "--json", str(path)])
    return code, json.loads(path.read_text()) if path.exists() else []


# Records.


def test_compact_files_hold_what_was_written(tmp_path):
    made = [
        {"case": f"case {number % 7}", "one": 1, "number": number / 7, "rare": [number // 40]}
        for number in range(90)
    ]
    for record in made[::3]:
        del record["rare"]
    write_compact(made, tmp_path / "compact.json")
    write([{"a": float("inf")}], tmp_path / "list.json")
    paths = [tmp_path / name for name in ("compact.json", "list.json", "missing.json")]
    for record in made:
        record["number"] = pytest.approx(record["number"], rel=1e-5)
    assert read(*paths) == [*made, {"a": None}]


def test_a_run_saves_after_each_record_and_survives_failures(tmp_path, capsys):
    run = Run(tmp_path / "records.json")
    with run.attempt("first"):
        run.add({"case": "a", "psnr": float("inf")})
        raise ValueError("no more")
    with pytest.raises(TypeError):
        run.add({"case": object()})
    assert json.loads((tmp_path / "records.json").read_text()) == [{"case": "a", "psnr": None}]
    assert [item.name for item in tmp_path.iterdir()] == ["records.json"]
    assert run.failed == ["first"]
    assert "FAILED first: ValueError: no more" in capsys.readouterr().out
    text = table([{"a": 31.26}, {"a": None}], {"a": ".1f"})
    assert text.splitlines()[2:] == ["| 31.3 |", "|  |"]


# Kernels.


def test_every_operation_has_a_case():
    """But for those whose time is part of another's, and copies between processes."""
    others = {"attention_residual", "rank_pieces", "fp8_quantization", "fp8_rows"}
    others |= {"fp8_dequantization"}
    folders = resources.files(chipsparse.kernels).iterdir()
    operations = {each.name for each in folders if (each / "reference.py").is_file()}
    combined = {"dense_attention", "fp8_dense_attention_column_sums", "sparse_mlp"}
    assert KERNELS.keys() == (operations - others) | combined


def test_the_named_cases_fit_together():
    for name, case in CASES.items():
        assert name == case.name
        assert case.channels == case.heads * case.head_dim
        assert 0 < case.density < 1
    small = CASES["hunyuan_720p"].scaled(tokens=300, heads=2)
    assert (small.tokens, small.heads, small.head_dim) == (300, 2, 128)
    assert small.name == "hunyuan_720p N300 H2"  # it cannot be mistaken for the named one
    assert small.scaled(tokens=300) == small


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
            assert record["speedup"] == pytest.approx(record["baseline_ms"] / record["latency_ms"])
        if op == "column_sparse_attention":
            kept = round(300 * case.density)
            assert (record["density"], record["ideal"]) == (kept / 300, 300 / kept)
            flops = 4 * case.batch * 2 * case.head_dim * 300 * kept
            assert record["tflops"] == pytest.approx(flops / record["latency_ms"] / 1e9)


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


@pytest.mark.parametrize("rule", ["merge", "difference"])
def test_delta_rules_are_measured(rule, tmp_path):
    options = ("--op", "column_sparse_attention", "--case", "odd", "--delta-rule", rule)
    code, (record,) = dry_run(tmp_path, "kernels", *options, "--keep", "0.1")
    assert (code, record["delta_rule"], record["density"]) == (0, rule, 0.1)


def test_a_selection_is_judged_by_value_and_count():
    sums = torch.tensor([[5.0, 4, 3, 3, 3, 1, 1, 1]])
    ties = torch.tensor([[True, True, False, True, False, False, False, False]])
    assert check_selection(ties, sums, 3, "here") == {"rel_error": 0, "count_error": 0}
    low = torch.tensor([[True, True, False, False, False, True, False, False]])
    with pytest.raises(WrongResultError, match="missed share"):
        check_selection(low, sums, 3, "here")
    with pytest.raises(WrongResultError, match="count error"):
        check_selection(torch.ones_like(low), sums, 3, "here")


def test_samples_cover_the_first_and_the_ragged_block_and_several_heads():
    drawn = list(samples(2, 24, 1337, 128))
    assert str(drawn[0]) == "batch 0, head 0, block 0"
    assert str(drawn[-1]) == "batch 1, head 23, block 10"
    assert drawn[-1].rows == slice(1280, 1337)
    assert len({sample.head.start for sample in drawn}) == 5


def test_random_inputs_are_as_in_models():
    lists = cases.index_lists((2, 3, 7), 333, 25, device=CPU)
    assert (lists.shape, lists.dtype) == ((2, 3, 7, 25), torch.int32)
    assert (lists.diff(dim=-1) > 0).all()
    assert 0 <= lists.min() <= lists.max() < 333
    packed, largest = cases.packed_masks((1, 2, 5), 333, 0.3, device=CPU)
    counts = unpack_mask(packed, 333).sum(-1)
    assert 60 < counts.min() <= counts.max() == largest
    form = {"block_size": 128, "device": CPU, "dtype": torch.float32}
    sums = cases.column_sums((1, 2, 21), 4000, **form)
    torch.testing.assert_close(sums.sum(-1), torch.full((1, 2, 21), 128.0), rtol=0.2, atol=0)
    assert 0.25 < (sums.topk(200, dim=-1).values.sum(-1) / sums.sum(-1)).mean() < 0.42
    logs = sums[0, 0].log()  # neighbouring blocks look at similar columns
    assert torch.corrcoef(logs[[0, 7]])[0, 1] > 0.5 > 0.1 > torch.corrcoef(logs[[7, 8]])[0, 1]


# Whole steps.


def measured_of(case, *options):
    args = parse(["steps", "--tiny", "--depth", "0.1", *options])
    model = (MODELS | FAMILIES)[case]
    return steps.Measured(model, args, CPU, torch.float32), steps.chosen(model, args)


@pytest.fixture
def uncompiled(monkeypatch):
    facts = {"graphs": 0, "graph_breaks": 0}
    monkeypatch.setattr(steps, "compiled_blocks", lambda _: contextlib.nullcontext(facts))


@pytest.mark.parametrize("case", slow_unless(("flux_1280x768", "wan1b_480p"), MODELS))
def test_records_of_a_small_model(case, uncompiled, tmp_path):
    code, made = dry_run(
        *(tmp_path, "steps", "--dtype", "float32", "--depth", "0.1", "--case", case),
        *("--schedules", ",".join((*QUALITIES, "sparse"))),
    )
    by_name = {record["schedule"]: record for record in made}
    assert (code, [*by_name]) == (0, [*QUALITIES, "sparse"])
    for record in made:
        actions = record["actions"]
        assert sum(actions.values()) == STEPS
        expected = sum(record[f"{name}_ms"] * count for name, count in actions.items())
        assert record["latency_ms"] == pytest.approx(expected)
        assert record["speedup"] == pytest.approx(record["baseline_ms"] / record["latency_ms"])
        assert record["baseline_ms"] == pytest.approx(STEPS * record["baseline_step_ms"])
        assert record["measured_layers"] == sum(MODELS[case].layers_of(0.1)) < record["layers"]
        assert record["fallbacks"] == []
        assert record["rel_error"] < 1e-5
        assert (record["sparse_ms"] is None) == ("sparse" not in actions)
        if "sparse" not in actions:
            assert (record["cache_bytes"], record["step_speedup"]) == (0, None)
            continue
        assert 0 < record["attention_kept"] < 1
        assert 0 < record["mlp_kept"] < 1
        assert 0 < record["sparse_error"] < 0.5
        assert record["cache_bytes"] > 0
        parts = record["breakdown_ms"]
        assert parts["attention"] > 0
        assert parts["MLP"] > 0
    first = by_name["sparse"]
    assert first["actions"] == {"dense": 1, "refresh": 5, "sparse": 44}
    # The same steps are measured once, but for one model, whose columns were others.
    assert (first["sparse_ms"] == by_name["published"]["sparse_ms"]) == (case != "hunyuan_720p")


@pytest.mark.parametrize("case", slow_unless(("z_image", "wan_vace", "cosmos3"), FAMILIES))
def test_further_families_run_dense_as_stock_and_sparse(case, uncompiled):
    measured, qualities = measured_of(case, "--schedules", "published")
    (record,) = measured.records(qualities)
    assert measured.rel_error < 1e-5
    assert record["actions"]["sparse"] > STEPS / 2
    assert record["fallbacks"] == []
    for name in ("attention_kept", "mlp_kept", "sparse_error"):
        assert 0 < record[name] < 1


@pytest.mark.parametrize("linears", [(), ("--fp8-linears",)])
def test_full_steps_in_8_bits_with_compiled_blocks(linears, monkeypatch, tmp_path):
    """The dense step is off by the rounding, and not by more."""
    monkeypatch.setitem(step_timing.COMPILE_OPTIONS, "backend", "aot_eager")
    if linears:
        pytest.importorskip("torchao")
    options = ("--depth", "0.1", "--case", "wan1b_480p", "--schedules", "published")
    code, (record,) = dry_run(tmp_path, "steps", *options, "--precision", "fp8", *linears)
    assert (code, record["graph_breaks"]) == (0, 0)
    assert record["backends"]["fp8_dense_attention"] == "reference"
    assert record["linears"] == ("fp8" if linears else "bfloat16")
    assert 1e-5 < record["rel_error"] < steps.FP8_LIMIT / 2
    assert ("fp8_dequantization" in record["backends"]) == bool(linears)


def test_all_linears_of_the_blocks_are_rounded_as_users_name_it(monkeypatch):
    api = pytest.importorskip("torchao.quantization.quant_api")
    monkeypatch.setattr(api, "_check_hardware_support", lambda _: None)  # looks for a GPU
    model = MODELS["wan1b_480p"]
    ours, users = (model.make((2,), True, CPU, torch.bfloat16) for _ in range(2))
    to_fp8(ours, model.blocks)
    config = api.Float8DynamicActivationFloat8WeightConfig(
        granularity=api.PerRow(), set_inductor_config=False
    )
    api.quantize_(users.blocks, config)
    for name, module in ours.named_modules():
        if isinstance(module, torch.nn.Linear):
            inside = name.startswith(model.blocks)
            assert fp8_form(module.weight) == ("weights and inputs" if inside else None)
    pairs = zip(linears(ours, model.blocks), linears(users, model.blocks), strict=True)
    for weight, expected in ((one.weight, other.weight) for one, other in pairs):
        assert torch.equal(weight.qdata.float(), expected.qdata.float())
        assert torch.equal(weight.scale, expected.scale)


def test_a_wrong_model_is_found_by_its_dense_step(uncompiled, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(steps, "relative_error", lambda a, b: float((a + 1 - b).norm() / b.norm()))
    options = ("--depth", "0.1", "--case", "flux_1280x768,sora", "--schedules", "fast")
    assert dry_run(tmp_path, "steps", *options)[0] == 1
    printed = capsys.readouterr().out
    assert "FAILED flux_1280x768: WrongResultError: relative error" in printed
    assert "no model for the case 'sora'; there are ['hunyuan_720p'" in printed


def test_schedules_that_are_measured():
    def chosen(*options):
        return [*steps.chosen(MODELS["h3_5s"], parse(["steps", *options]))]

    assert chosen() == [*QUALITIES]
    assert chosen("--schedules", "published,dense") == ["published", "dense"]
    with pytest.raises(ValueError, match="--schedules slow: there are dense, sparse, faithful"):
        chosen("--schedules", "fast,slow")


def test_a_few_blocks_stand_for_all():
    """What is outside of the blocks counts once, and the layers that are always dense as such."""
    measured, _ = measured_of("wan1b_480p")  # a tenth of them, two calls a step
    parts = {"all": 3.0, "elementwise": 1.5, "MLP": 0.5}
    facts = {"dense_ms": 10.0, "refresh_ms": 12.0, "sparse_ms": 4.0, "breakdown_ms": parts}
    facts |= {"cache_bytes": 900, "host_bytes": 300, "pinned_bytes": 0, "peak_gpu_bytes": 10**6}
    times = ("dense_ms", "refresh_ms", "sparse_ms")
    scaled = measured._of_all_blocks(facts, 1 / 3)
    assert [scaled[name] for name in times] == pytest.approx([100, 340 / 3, 60])
    assert [scaled[name] for name in steps.CACHES] == [6000, 2000, 0]
    measured._outside = {"all": 2.0, "elementwise": 1.0}
    scaled = measured._of_all_blocks(facts, 0.0)
    assert [scaled[name] for name in times] == pytest.approx([82, 102, 22])
    assert scaled["breakdown_ms"] == {"all": 21.0, "elementwise": 10.5, "MLP": 5.0}
    linear = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
    halves = (half.clone() for half in linear.weight.detach().chunk(2))
    linear.weight = torch.nn.Parameter(TwoTensor(*halves), requires_grad=False)
    assert steps.bytes_of(linear) == 2 * (2 * 16 * 64 + 32)  # weights in FP8, as they are stored


GIB = 2**30


# Tokens, heads, neurons, blocks, branches, and GiB that all blocks leave on the GPU and the host.
@pytest.mark.parametrize(
    ("tokens", "heads", "width", "blocks", "branches", "room"),
    [
        pytest.param(75_600, 40, 13_824, 40, 2, (100, 100), id="Wan 14B 720p"),
        pytest.param(103_000, 56, 14_336, 50, 1, (58, 108), id="MiniMax-H3, 15 s"),
    ],
)
def test_caches_of_some_blocks_live_where_those_of_all_do(
    tokens, heads, width, blocks, branches, room
):
    kind = LayerKind("block", blocks, width, True, 2, 4)
    layout = ModelLayout((kind,), heads, 128, 1, ((1, 1, tokens),))
    some = replace(layout, kinds=(replace(kind, layers=blocks // 5),))
    config = MODELS["hunyuan_720p"].nearly_all_sparse()
    plan = SparsityPlan(config.override({"schedule.first_dense_layers": 0}), some, STEPS)
    of_all = steps.of_all_blocks(plan, 0.2)
    assert of_all.layout == layout
    demand = MemoryDemand(torch.bfloat16, branches, captures=False)
    whole = plan_memory(of_all, Capacity(*(each * GIB for each in room)), demand)
    taken = 7 * GIB
    budgets = steps.in_share(plan.config, whole, share=0.2, taken=taken)
    capacity = Capacity(budgets.memory.vram - taken, budgets.memory.ram)
    part = plan_memory(replace(plan, config=budgets), capacity, demand)
    assert part.in_fp8 == whole.in_fp8
    device = whole.placement.device_bytes
    assert 5 * part.placement.device_bytes == pytest.approx(device, rel=0.1)
    assert 5 * part.host_bytes == pytest.approx(whole.host_bytes, rel=0.1)


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


@pytest.mark.parametrize("mlp", [slow(()), ("--mlp",)])
def test_offloaded_steps_are_measured(mlp, uncompiled, tmp_path):
    options = ("--depth", "0.1", "--case", "wan1b_480p", "--dtype", "float32", *mlp)
    code, (record,) = dry_run(tmp_path, "offload", *options)
    assert (code, record["identical"], record["fallbacks"]) == (0, True, [])
    assert (record["layers"], record["mlp"]) == (3, "sparse" if mlp else "dense")
    assert record["slowdown"] == pytest.approx(record["latency_ms"] / record["baseline_ms"])
    assert record["host_bytes"] > record["baseline_host_bytes"] == 0
    assert record["bytes_to_device"] > 0
    assert (record["bytes_to_host"] > 0) == bool(mlp)


@pytest.mark.slow
def test_two_processes_share_steps(tmp_path):
    file = tmp_path / "record.json"
    options = "--tiny --device cpu --case wan1b_480p --depth 0.1 --json"
    command = "-m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks parallel"
    command = [sys.executable, *command.split(), *options.split(), str(file)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    (record,) = read(file)
    (together,) = record["together"]
    assert (record["ranks"], together["ulysses"], together["same_again"]) == (2, 2, True)
    assert together["rel_l2"] < 1e-5
    for name, ms in record["alone"]["ms"].items():
        assert together["speedup"][name] == pytest.approx(ms / together["ms"][name])


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
    assert set(step_timing.OPS) == bridge._library._op_defs


def test_the_parts_of_a_call_add_up():
    weight = torch.randn(64, 64)
    parts = step_timing.breakdown(lambda: (weight @ weight).relu(), CPU)
    assert parts["other GEMM"] > 0
    assert parts["elementwise"] > 0
    assert sum(parts[part] for part in step_timing.PARTS) >= parts["all"] * 0.99


# Figures.


def test_the_curve_is_measured_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "KEEP_FRACTIONS", (0.1, 0.5))
    monkeypatch.setattr(kernels, "TOKENS", (100, 200))
    code, made = dry_run(tmp_path, "curve")
    assert code == 0
    assert [record["curve"] for record in made] == ["keep"] * 4 + ["tokens"] * 2
    assert [record["tokens"] for record in made] == [300] * 4 + [100, 200]
    out = tmp_path / "curve.png"
    assert main(["figure", "curve", str(tmp_path / "records.json"), "-o", str(out)]) == 0
    with Image.open(out) as image:
        assert image.size == (1200, 500)
    keep, tokens = figures.curve(made).axes
    assert [line.get_label() for line in keep.lines] == ["300 tokens", "possible, 1 / kept share"]
    last = made[-1]
    heads = last["batch"] * last["heads"]
    assert tokens.lines[1].get_ydata()[-1] == pytest.approx(last["latency_ms"] / heads)
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
    assert ends == [pytest.approx(1.0), pytest.approx(0.5)] * 2
    assert {text.get_text() for text in axes.texts} == {"17%"}  # of a bar's own step
