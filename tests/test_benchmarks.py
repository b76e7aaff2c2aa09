"""The benchmark runner: its cases, inputs, checks, records, table and figure, on tiny shapes."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from PIL import Image

from benchmarks import (
    attention_curve,
    curve_figure,
    fp8_mlp_ops,
    mlp_ops,
    offload,
    random_inputs,
    records,
)
from benchmarks.__main__ import main
from benchmarks.attention_ops import OPS
from benchmarks.case_tensors import CaseTensors
from benchmarks.cases import CASES
from benchmarks.clips import Workload
from benchmarks.contact_sheet import contact_sheet
from benchmarks.kernel_work import Settings
from benchmarks.records import table, write
from benchmarks.run import Run
from benchmarks.sampled_checks import WrongResultError, check_selection, samples
from chipsparse.common import machine
from chipsparse.experiments.timing import LONG_REPEATS, REPEATS, time_call
from chipsparse.kernels.column_sparse_attention import column_sparse_attention
from chipsparse.kernels.dispatch import Backend
from chipsparse.kernels.mask_packing import unpack_mask
from tests.tiny_models import PROMPT, tiny_flux_pipeline
from tests.variants import slow

CPU = torch.device("cpu")


def test_records_are_written_whole_and_as_json(tmp_path):
    path = tmp_path / "results.json"
    write([{"case": "a", "psnr": float("inf"), "values": [1.5, float("inf")]}], path)
    assert json.loads(path.read_text()) == [{"case": "a", "psnr": None, "values": [1.5, None]}]
    with pytest.raises(TypeError):
        write([{"case": object()}], path)
    assert len(json.loads(path.read_text())) == 1
    assert [item.name for item in tmp_path.iterdir()] == ["results.json"]


def test_the_table_formats_and_leaves_gaps():
    text = table(
        [{"case": "a", "psnr": 31.26}, {"case": "b", "psnr": None}], {"case": "", "psnr": ".1f"}
    )
    assert text.splitlines()[2:] == ["| a | 31.3 |", "| b |  |"]


def test_the_named_cases_fit_together():
    for name, case in CASES.items():
        assert name == case.name
        assert case.channels == case.heads * case.head_dim
        assert 0 < case.density < 1


def test_a_scaled_case_cannot_be_mistaken_for_the_named_one():
    case = CASES["hunyuan_720p"]
    small = case.scaled(tokens=300, heads=2)
    assert (small.tokens, small.heads, small.head_dim) == (300, 2, 128)
    assert small.name == "hunyuan_720p N300 H2"
    assert small.scaled(heads=1).name == "hunyuan_720p N300 H1"
    assert case.scaled(tokens=case.tokens) == case


@pytest.mark.parametrize(("columns", "count"), [(333, 1), (333, 25), (64, 64)])
@pytest.mark.parametrize("chunk_bytes", [1 << 20, 10_000])
def test_index_lists_are_distinct_ascending_columns(columns, count, chunk_bytes, monkeypatch):
    monkeypatch.setattr(random_inputs, "CHUNK_BYTES", chunk_bytes)
    lists = random_inputs.index_lists(2, 3, 7, columns, count, device=CPU)
    assert lists.shape == (2, 3, 7, count)
    assert lists.dtype == torch.int32
    assert (lists.diff(dim=-1) > 0).all()
    assert lists.min() >= 0
    assert lists.max() < columns
    if count < columns:
        assert len(lists.flatten(0, 2).unique(dim=0)) > 30  # of 42 lists


def test_column_sums_are_heavy_tailed_and_alike_in_neighbouring_blocks():
    sums = random_inputs.column_sums(
        1, 2, 21, 4000, block_size=128, device=CPU, dtype=torch.float32
    )
    assert sums.shape == (1, 2, 21, 4000)
    assert sums.min() > 0
    torch.testing.assert_close(sums.sum(-1), torch.full((1, 2, 21), 128.0), rtol=0.2, atol=0)
    top = sums.topk(200, dim=-1).values.sum(-1) / sums.sum(-1)
    assert 0.25 < top.mean() < 0.42
    logs = sums[0, 0].log()
    assert torch.corrcoef(logs[[0, 7]])[0, 1] > 0.5
    assert abs(torch.corrcoef(logs[[7, 8]])[0, 1]) < 0.1


def test_packed_masks_know_their_largest_count():
    packed, largest = random_inputs.packed_masks(1, 2, 5, 333, 0.3, device=CPU)
    counts = unpack_mask(packed, 333).sum(-1)
    assert counts.max() == largest
    assert counts.min() > 60


def test_samples_cover_the_first_and_the_ragged_block_and_several_heads():
    found = list(samples(2, 24, 1337, 128))
    assert [found[0].batch.start, found[0].head.start, found[0].block.start] == [0, 0, 0]
    assert [found[-1].batch.start, found[-1].head.start, found[-1].block.start] == [1, 23, 10]
    assert found[-1].rows == slice(1280, 1337)
    assert len({sample.head.start for sample in found}) == 5
    assert all(sample.rows.stop <= 1337 for sample in found)


def dry_run(tmp_path, *arguments):
    """Exit code and records of a run on at most 300 tokens and two heads."""
    path = tmp_path / "records.json"
    code = main(
        ["--device", "cpu", "--tokens", "300", "--heads", "2", "--json", str(path), *arguments]
    )
    return code, json.loads(path.read_text()) if path.exists() else []


@pytest.mark.parametrize("op", OPS)
def test_each_kernel_op_is_measured(op, tmp_path, capsys):
    code, found = dry_run(tmp_path, "--op", op, "--case", "odd,d64_video", "--block-size", "64,128")
    assert code == 0
    grouped = op != "dense_attention"
    assert len(found) == (4 if grouped else 2)
    assert capsys.readouterr().out.count(f"| {op} |") == len(found)
    for record in found:
        name = record["case"].split()[0]
        case = CASES[name].scaled(tokens=300, heads=2)
        kept = round(300 * case.density)
        assert record["op"] == op
        assert record["case"] == case.name
        assert record["backend"] == ("reference" if grouped else "library")
        assert record["latency_ms"] > 0
        assert record["rel_error"] < 1e-2
        for field in ("device", "torch", "triton", "commit"):
            assert field in record
        if op == "mask_packing":
            assert record["baseline"] is None
            assert record["speedup"] is None
            assert record["gb_per_s"] > 0
        else:
            assert record["speedup"] == pytest.approx(record["baseline_ms"] / record["latency_ms"])
            assert record["baseline"] == (
                "torch.topk" if op == "column_selection" else "dense sdpa"
            )
        if "attention" in op:
            columns = kept if op == "column_sparse_attention" else 300
            flops = 4 * case.batch * 2 * case.head_dim * 300 * columns
            assert record["tflops"] == pytest.approx(flops / record["latency_ms"] / 1e9)
            assert record["lse_error"] < 2e-3
        if op == "column_sparse_attention":
            assert record["density"] == kept / 300
            assert record["ideal"] == 300 / kept
            assert record["of_ideal"] == pytest.approx(record["speedup"] * kept / 300)
            dense = 4 * case.batch * 2 * case.head_dim * 300 * 300
            assert record["baseline_tflops"] == pytest.approx(dense / record["baseline_ms"] / 1e9)
    if grouped:
        assert [record["block_size"] for record in found] == [64, 128, 64, 128]


def test_attention_in_fp8_is_measured_beside_the_16_bit_kernel(tmp_path):
    code, found = dry_run(tmp_path, "--op", "fp8_attention", "--case", "odd")
    assert code == 0
    assert [record["op"] for record in found] == [
        "fp8_quantization",
        "fp8_dense_attention",
        "fp8_dense_attention_column_sums",
        "dense_attention_column_sums",
    ]
    assert {record["baseline"] for record in found} == {"dense sdpa"}
    for record in found[1:3]:
        assert 1e-2 < record["rel_error"] < 8e-2  # random values cancel, their rounding does not
        assert record["kernel_error"] == record["lse_error"] == 0  # the reference against itself


def test_the_mlp_in_fp8_is_measured_beside_linears_in_fp8(tmp_path):
    code, (record,) = dry_run(tmp_path, "--op", "fp8_mlp", "--case", "odd")
    assert (code, record["baseline"]) == (0, "two linears in FP8 and GELU")
    assert record["rel_error"] < 1e-2
    assert record["ideal"] == pytest.approx(1 / record["density"])
    assert record["speedup"] == pytest.approx(record["baseline_ms"] / record["latency_ms"])


def test_the_rounding_of_rows_is_measured_beside_pytorchs_own(tmp_path):
    code, (record,) = dry_run(tmp_path, "--op", "fp8_rows", "--case", "odd")
    assert (code, record["baseline"]) == (0, "rounded by PyTorch")
    assert 1e-2 < record["rel_error"] < 4e-2
    assert record["gb_per_s"] > 0


def test_linears_in_fp8_compute_the_layer_but_for_their_rounding():
    tensors = CaseTensors(CASES["odd"].scaled(tokens=200, heads=2), CPU, torch.float32)
    layer = fp8_mlp_ops.make_fp8_layer(tensors, Settings())
    found, exact = fp8_mlp_ops.linears_in_fp8(layer)(), mlp_ops.whole_layer(layer)()
    error = (found - exact).norm() / exact.norm()
    assert 1e-3 < error < 6e-2  # inputs alone are rounded, by half of an eighth at most


def test_rows_are_rounded_as_torchao_does():
    quantization = pytest.importorskip("torchao.quantization")
    linear = torch.nn.Linear(64, 48)
    data, scale = fp8_mlp_ops.rounded_rows(linear.weight.data)
    quantization.quantize_(linear, quantization.Float8WeightOnlyConfig())
    assert torch.equal(data.float(), linear.weight.qdata.float())
    assert torch.equal(scale, linear.weight.scale)


@pytest.mark.parametrize("rule", ["merge", "difference"])
def test_delta_rules_are_measured(rule, tmp_path):
    code, found = dry_run(
        tmp_path,
        *("--op", "column_sparse_attention", "--case", "odd"),
        *("--delta-rule", rule, "--keep", "0.1", "--backend", "reference"),
    )
    assert code == 0
    assert [(record["delta_rule"], record["density"]) for record in found] == [(rule, 0.1)]


@pytest.mark.parametrize(
    "op", ["dense_attention_column_sums", "fp8_dense_attention_column_sums", "column_selection"]
)
def test_sums_that_do_not_fit_are_measured_head_by_head(op, tmp_path):
    code, found = dry_run(tmp_path, "--op", op, "--case", "odd", "--transient-gb", "0.000001")
    assert code == 0
    assert [record["parts"] for record in found] == [2]


@pytest.fixture
def forgets_the_last_row(monkeypatch):
    """A first backend of sparse attention that is wrong in one row of the ragged block."""
    right = column_sparse_attention.backends

    def launch(call):
        output, lse = right[-1].launch(call)
        output[:, :, -1] = 0
        return output, lse

    wrong = Backend("wrong", lambda: launch)
    monkeypatch.setattr(column_sparse_attention, "backends", (wrong, *right))


@pytest.mark.usefixtures("forgets_the_last_row")
def test_a_wrong_kernel_is_not_timed_and_the_others_are(tmp_path, capsys):
    ops = "column_sparse_attention,mask_packing"
    code, found = dry_run(
        tmp_path, "--op", ops, "--case", "odd,nowhere,odd_d64", "--block-size", "128"
    )
    assert code == 1
    assert [record["op"] for record in found] == ["mask_packing"] * 2
    output = capsys.readouterr().out
    assert "column_sparse_attention, odd N300 H2, wrong: WrongResultError" in output
    assert "unknown case 'nowhere'" in output


def test_a_forced_backend_that_there_is_not_fails(tmp_path, capsys):
    code, found = dry_run(tmp_path, "--op", "mask_packing", "--case", "odd", "--backend", "nothing")
    assert (code, found) == (1, [])
    assert "unknown backend 'nothing'" in capsys.readouterr().out


def test_a_selection_is_judged_by_value_and_count():
    sums = torch.tensor([[5.0, 4, 3, 3, 3, 1, 1, 1]])
    ties = torch.tensor([[True, True, False, True, False, False, False, False]])
    assert check_selection(ties, sums, 3, "here") == {"rel_error": 0, "count_error": 0}
    low = torch.tensor([[True, True, False, False, False, True, False, False]])
    with pytest.raises(WrongResultError, match="missed share"):
        check_selection(low, sums, 3, "here")
    with pytest.raises(WrongResultError, match="count error"):
        check_selection(torch.ones_like(low), sums, 3, "here")


def test_time_is_the_median_of_ten_calls_and_of_three_long_ones(monkeypatch):
    class Clock:
        now, calls, seconds = 0.0, 0, 0.01

        def call(self):
            self.calls += 1
            self.now += self.seconds * (1 + 9 * (self.calls == 3))  # one call is disturbed

    for seconds, repeats in ((0.01, REPEATS), (0.2, LONG_REPEATS)):
        clock = Clock()
        clock.seconds = seconds
        monkeypatch.setattr("time.perf_counter", lambda clock=clock: clock.now)
        timing = time_call(clock.call, CPU)
        assert timing.latency_ms == pytest.approx(seconds * 1e3)
        assert timing.method == "clock"
        assert clock.calls == 2 + repeats


@pytest.mark.gpu
def test_short_calls_on_a_gpu_are_timed_as_graph_replays():
    x = torch.rand(1000, device="cuda")
    stream = torch.cuda.current_stream()
    assert time_call(lambda: x + 1, x.device).method == "graph"
    assert time_call(lambda: (x + 1).sum().item(), x.device).method == "events"
    assert torch.cuda.current_stream() == stream


def test_a_run_saves_after_each_record_and_survives_failures(tmp_path, capsys):
    run = Run(tmp_path / "records.json")
    with run.attempt("first"):
        run.add({"case": "a"})
        raise ValueError("no more")
    assert json.loads((tmp_path / "records.json").read_text()) == [{"case": "a"}]
    run.save([{"case": "b"}])
    assert json.loads((tmp_path / "records.json").read_text()) == [{"case": "a"}, {"case": "b"}]
    assert run.failed == ["first"]
    assert "FAILED first: ValueError: no more" in capsys.readouterr().out


def test_records_do_without_diffusers(monkeypatch):
    def version(package):
        if package == "diffusers":
            raise PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(machine, "version", version)
    found = records.environment(CPU)
    assert (found["diffusers"], found["triton"]) == (None, "1.0")


@pytest.mark.slow
def test_kernels_are_measured_where_diffusers_is_missing():
    """In a process of its own: here it may be imported already."""
    script = (
        "import runpy, sys\n"
        "sys.modules.update(diffusers=None, transformers=None, PIL=None)\n"
        "sys.argv = ['benchmarks', '--op', 'mask_packing', '--case', 'odd', '--device', 'cpu']\n"
        "sys.argv += ['--tokens', '100', '--heads', '1']\n"
        "runpy.run_module('benchmarks', run_name='__main__')\n"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "| mask_packing | odd N100 H1 |" in done.stdout


def test_the_curve_is_measured_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(attention_curve, "KEEP_FRACTIONS", (0.1, 0.5))
    monkeypatch.setattr(attention_curve, "TOKENS", (100, 200))
    figure = tmp_path / "curve.png"
    code, found = dry_run(tmp_path, "--op", "attention_curve", "--figure", str(figure))
    assert code == 0
    assert [record["curve"] for record in found] == ["keep"] * 4 + ["tokens"] * 2
    assert [record["tokens"] for record in found] == [300] * 4 + [100, 200]
    assert {record["backend"] for record in found} == {"reference"}
    with Image.open(figure) as image:
        assert image.size == (1200, 500)


def test_the_curve_has_few_heads_where_there_are_many_tokens():
    points = attention_curve.curve_cases()
    assert [(curve, case.tokens, case.heads) for curve, case, _ in points[:2]] == [
        ("keep", 32_256, 24),
        ("keep", 119_056, 6),
    ]
    assert {case.heads for _, case, _ in points[2:] if case.tokens <= 32_256} == {24}


def curve_records():
    """What a GPU might give: nearly ideal over the keep fraction, quadratic over the tokens."""
    common = {
        **{"op": "attention_curve", "batch": 1, "heads": 2, "head_dim": 128, "block_size": 128},
        **{"device": "a GPU", "torch": "2.11", "dtype": "bfloat16", "backend": "triton"},
        "baseline": "dense cuDNN",
    }
    over_keep = [
        {"curve": "keep", "tokens": tokens, "density": keep, "ideal": 1 / keep}
        | {"speedup": share / keep}
        for tokens, share in ((32_256, 0.8), (119_056, 0.9))
        for keep in attention_curve.KEEP_FRACTIONS
    ]
    over_tokens = [
        {"curve": "tokens", "tokens": tokens, "density": 0.07}
        | {"baseline_ms": tokens**2 / 1e8, "latency_ms": tokens**2 / 1e9}
        for tokens in attention_curve.TOKENS
    ]
    return [common | record for record in over_keep + over_tokens]


def test_the_figure_is_drawn_from_records_alone():
    figure = curve_figure.draw([{"op": "quality", "case": "another benchmark"}, *curve_records()])
    keep, tokens = figure.axes
    labels = [line.get_label() for line in keep.lines]
    assert labels == ["32,256 tokens", "119,056 tokens", "possible, 1 / kept share"]
    shares = attention_curve.KEEP_FRACTIONS
    assert [*keep.lines[0].get_ydata()] == pytest.approx([0.8 / share for share in shares])
    assert [*tokens.lines[0].get_xdata()] == sorted(attention_curve.TOKENS)
    least = min(attention_curve.TOKENS)
    assert tokens.lines[1].get_ydata()[0] == pytest.approx(least**2 / 1e9 / 2)  # per head
    assert [each.get_text() for each in tokens.get_xticklabels()][:2] == ["4k", "8k"]
    with pytest.raises(ValueError, match="no records"):
        curve_figure.draw([])


def test_the_figure_can_be_of_one_curve():
    tokens = [record for record in curve_records() if record["curve"] == "tokens"]
    keep = [record for record in curve_records() if record["curve"] == "keep"]
    for some in (tokens, keep, tokens[:1]):
        figure = curve_figure.draw(some)
        figure.draw_without_rendering()
        assert len(figure.axes) == 1


def test_a_contact_sheet_shows_frames_in_a_row_and_images_in_a_grid():
    clips = torch.rand(3, 5, 4, 6, 3)
    assert contact_sheet(clips, frames=2).size == (2 * 6, 3 * 4)
    images = torch.rand(3, 1, 4, 6, 3)
    sheet = contact_sheet(images)
    assert sheet.size == (2 * 6, 2 * 4)
    expected = [tuple((image[0, 0, 0] * 255).round().byte().tolist()) for image in images]
    corners = [(0, 0), (6, 0), (0, 4), (6, 4)]
    assert [sheet.getpixel(corner) for corner in corners] == [*expected, (255, 255, 255)]


IMAGE_PROFILE = """
model_class: FluxTransformer2DModel
generation: {height: 32, width: 48, num_inference_steps: 8, max_sequence_length: 16}
sparsity:
  attention: {density: 0.3, block_size_q: 16}
  mlp: {density: 0.3, block_size: 16}
  schedule: {warmup_steps: 2, refresh_every: 3}
  tile: [1, 4, 4]
"""


@pytest.fixture
def image_model(tmp_path):
    """A folder of a FLUX pipeline with random weights, and its profile."""
    folder = tmp_path / "model"
    tiny_flux_pipeline().save_pretrained(folder)
    (folder / "chipsparse.yaml").write_text(IMAGE_PROFILE)
    return folder


def test_guidance_of_image_models_is_that_of_the_profile(image_model):
    """A pipeline that gets no negative prompt would leave true guidance out."""
    plain = Workload(image_model, [PROMPT], CPU, torch.float32)
    profile = IMAGE_PROFILE.replace("height: 32", "true_cfg_scale: 3.0, height: 32")
    (image_model / "chipsparse.yaml").write_text(profile)
    guided = Workload(image_model, [PROMPT], CPU, torch.float32)
    clip = guided.generate(guided.profile.sparsity, PROMPT)
    assert {record.branch for record in clip.report.steps} == {"cond", "uncond"}
    assert clip.frames.shape == (1, 32, 48, 3)
    assert 0 <= clip.frames.min() < clip.frames.max() <= 1
    assert not torch.equal(
        guided.generate(None, PROMPT).frames, plain.generate(None, PROMPT).frames
    )


@pytest.mark.parametrize("mlp", [slow(()), ("--mlp",)])
def test_offloaded_steps_are_measured(tmp_path, mlp):
    shape = ("--heads", "2", "--layers", "3", "--dtype", "float32", "--block-size", "64")
    code, found = dry_run(tmp_path, "--op", "offload", "--case", "wan1b_480p", *shape, *mlp)
    (record,) = found
    assert code == 0
    assert record["identical"]
    assert record["fallbacks"] == []
    assert (record["layers"], record["mlp"]) == (3, "sparse" if mlp else "dense")
    assert record["slowdown"] == pytest.approx(record["latency_ms"] / record["baseline_ms"])
    tokens, blocks = record["tokens"], -(-record["tokens"] // 64)
    assert record["mask_slots_bytes"] == 2 * 2 * blocks * -(-tokens // 8)
    assert record["residual_slots_bytes"] == 2 * 2 * tokens * 128 * 4
    assert 1 <= record["pinned_share"] < 1.02
    assert (record["to_host_bytes"] > 0) == bool(mlp)
    assert record["unpack_ms"] > 0


def test_checksums_see_every_bit_and_its_place():
    tensor = torch.randn(3, 8)
    assert offload.checksum(tensor) == offload.checksum(tensor.clone())
    assert offload.checksum(tensor) != offload.checksum(tensor.flip(1))
    changed = tensor.clone()
    changed[1, 2] = torch.nextafter(changed[1, 2], torch.tensor(9.0))
    assert offload.checksum(tensor) != offload.checksum(changed)
