"""The benchmark runner: its cases, inputs, checks, records, table and figure, on tiny shapes."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from benchmarks import attention_curve, curve_figure, random_inputs, records
from benchmarks.__main__ import main
from benchmarks.attention_ops import OPS
from benchmarks.cases import CASES
from benchmarks.quality import cases
from benchmarks.records import table, write
from benchmarks.run import Run
from benchmarks.sampled_checks import WrongResultError, check_selection, samples
from benchmarks.timing import LONG_REPEATS, REPEATS, time_call
from chipsparse.kernels import column_sparse_attention
from chipsparse.kernels.dispatch import Backend, runs_anywhere
from chipsparse.kernels.mask_packing import unpack_mask
from chipsparse.profiles import bundled_model, load_profile

CPU = torch.device("cpu")


def test_the_quality_table_has_every_row_and_control():
    profile = load_profile(bundled_model() / "chipsparse.yaml").sparsity
    rows = cases(profile)
    assert rows.pop("profile") == profile
    for rule in ("merge", "difference"):
        for parts in ("attention", "attention + MLP"):
            for keep in (0.05, 0.1, 0.2, 0.3):
                config = rows[f"{rule}, keep {keep:.0%}, {parts}"]
                assert config.attention.delta_rule == rule
                assert config.attention.keep_fraction == keep
                assert config.mlp.enabled == (parts != "attention")
    assert all(config.schedule.skip_steps == () for config in rows.values())
    assert len(set(map(repr, rows.values()))) >= len(rows) - 1  # the base may be one of the rows
    kept = [name for name in rows if name.startswith("control:")]
    assert len(kept) == 11


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
        assert 0 < case.keep_fraction < 1


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


def test_column_sums_are_heavy_tailed_and_alike_in_neighbouring_groups():
    sums = random_inputs.column_sums(
        1, 2, 21, 4000, group_rows=128, device=CPU, dtype=torch.float32
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


def test_samples_cover_the_first_and_the_ragged_group_and_several_heads():
    found = list(samples(2, 24, 1337, 128))
    assert [found[0].batch.start, found[0].head.start, found[0].group.start] == [0, 0, 0]
    assert [found[-1].batch.start, found[-1].head.start, found[-1].group.start] == [1, 23, 10]
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
    code, found = dry_run(tmp_path, "--op", op, "--case", "odd,d64_video", "--group-rows", "64,128")
    assert code == 0
    grouped = op != "dense_attention"
    assert len(found) == (4 if grouped else 2)
    assert capsys.readouterr().out.count(f"| {op} |") == len(found)
    for record in found:
        name = record["case"].split()[0]
        case = CASES[name].scaled(tokens=300, heads=2)
        kept = round(300 * case.keep_fraction)
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
            assert record["keep_fraction"] == kept / 300
            assert record["ideal"] == 300 / kept
    if grouped:
        assert [record["group_rows"] for record in found] == [64, 128, 64, 128]


@pytest.mark.parametrize("rule", ["merge", "difference"])
def test_delta_rules_are_measured(rule, tmp_path):
    code, found = dry_run(
        tmp_path,
        *("--op", "column_sparse_attention", "--case", "odd"),
        *("--delta-rule", rule, "--keep", "0.1", "--backend", "reference"),
    )
    assert code == 0
    assert [(record["delta_rule"], record["keep_fraction"]) for record in found] == [(rule, 0.1)]


@pytest.mark.parametrize("op", ["dense_attention_column_sums", "column_selection"])
def test_sums_that_do_not_fit_are_measured_head_by_head(op, tmp_path):
    code, found = dry_run(tmp_path, "--op", op, "--case", "odd", "--transient-gb", "0.000001")
    assert code == 0
    assert [record["parts"] for record in found] == [2]


@pytest.fixture
def forgets_the_last_row(monkeypatch):
    """A first backend of sparse attention that is wrong in one row of the ragged group."""
    right = column_sparse_attention.BACKENDS[-1].launch

    def launch(*arguments, **options):
        output, lse = right(*arguments, **options)
        output[:, :, -1] = 0
        return output, lse

    wrong = Backend("wrong", launch, runs_anywhere)
    monkeypatch.setattr(
        column_sparse_attention, "BACKENDS", (wrong, *column_sparse_attention.BACKENDS)
    )


@pytest.mark.usefixtures("forgets_the_last_row")
def test_a_wrong_kernel_is_not_timed_and_the_others_are(tmp_path, capsys):
    ops = "column_sparse_attention,mask_packing"
    code, found = dry_run(
        tmp_path, "--op", ops, "--case", "odd,nowhere,odd_d64", "--group-rows", "128"
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
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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

    monkeypatch.setattr(records, "version", version)
    found = records.environment(CPU)
    assert (found["diffusers"], found["triton"]) == (None, "1.0")


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
    assert figure.stat().st_size > 1000


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
        **{"op": "attention_curve", "batch": 1, "heads": 2, "head_dim": 128, "group_rows": 128},
        **{"device": "a GPU", "torch": "2.11", "dtype": "bfloat16", "backend": "triton"},
        "baseline": "dense cuDNN",
    }
    over_keep = [
        {"curve": "keep", "tokens": tokens, "keep_fraction": keep, "ideal": 1 / keep}
        | {"speedup": share / keep}
        for tokens, share in ((32_256, 0.8), (119_056, 0.9))
        for keep in attention_curve.KEEP_FRACTIONS
    ]
    over_tokens = [
        {"curve": "tokens", "tokens": tokens, "keep_fraction": 0.07}
        | {"baseline_ms": tokens**2 / 1e8, "latency_ms": tokens**2 / 1e9}
        for tokens in attention_curve.TOKENS
    ]
    return [common | record for record in over_keep + over_tokens]


def test_the_figure_is_drawn_from_records_alone(tmp_path):
    image = curve_figure.draw([{"op": "quality", "case": "another benchmark"}, *curve_records()])
    assert image.size == (1200, 500)
    blue, orange = (0, 0x72, 0xB2), (0xD5, 0x5E, 0)
    for left in (0, 600):
        panel = image.crop((left, 0, left + 600, 500))
        assert {blue, orange} <= {colour for _, colour in panel.getcolors(1 << 20)}
    for edge in ((0, 0, 1200, 2), (0, 498, 1200, 500), (0, 0, 2, 500), (1198, 0, 1200, 500)):
        ((_, colour),) = image.crop(edge).getcolors()
        assert colour == (255, 255, 255)  # no text is cut off
    with pytest.raises(ValueError, match="no records"):
        curve_figure.draw([])


def test_the_figure_can_be_of_one_curve():
    tokens = [record for record in curve_records() if record["curve"] == "tokens"]
    keep = [record for record in curve_records() if record["curve"] == "keep"]
    for some in (tokens, keep, tokens[:1]):
        assert curve_figure.draw(some).size == (1200, 500)
