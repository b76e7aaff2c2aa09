"""The benchmark of equal work: what it counts, compares and makes of it, on random weights."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.__main__ import main, parse
from benchmarks.computed_work import WorkCounter
from benchmarks.equal_work import curves, figure
from benchmarks.equal_work import run as bench
from benchmarks.equal_work.beneath_hooks import with_cache
from benchmarks.equal_work.curves import OURS, SKIPS, at_share, chosen, joined, lead, qualities
from benchmarks.equal_work.methods import entries
from benchmarks.equal_work.tables import LEADS, WORST, by_workload, quality_rows, step_rows
from benchmarks.equal_work.work import DenseWork, attention_of, blocks_of
from benchmarks.records import read, write_compact
from chipsparse.api import attach
from chipsparse.pipelines.diffusers_caches import CacheRun, cached
from chipsparse.session import Session
from tests.pipelines.test_wan import SPARSE
from tests.tiny_models import PROMPT, tiny_flux_pipeline, tiny_wan_pipeline
from tests.variants import slow

SIZE = {"height": 64, "width": 64, "max_sequence_length": 16}
STEPS = 12


def generate(pipe, steps=6):
    frames = {"num_frames": 9} if hasattr(pipe, "video_processor") else {}
    found = pipe(
        PROMPT,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
        num_inference_steps=steps,
        **SIZE,
        **frames,
    )
    return found.frames if frames else found.images


def as_it_is(forward):
    return forward


# The work.


def test_products_and_attention_are_counted_in_a_modules_calls_alone():
    linear, counter = torch.nn.Linear(5, 7), WorkCounter()
    x, q = torch.rand(2, 3, 5), torch.rand(1, 2, 11, 8)

    class Both(torch.nn.Module):
        def forward(self, q):
            linear(x)
            return torch.nn.functional.scaled_dot_product_attention(q, q[:, :, :4], q[:, :, :4])

    module = Both()
    with torch.no_grad(), counter.of(module):
        linear(x)
        module(q)
        x @ x.mT
    assert counter.multiply_adds == 2 * 3 * 5 * 7 + 2 * (2 * 11 * 4 * 8)
    with torch.no_grad(), counter.of(module):
        pass
    assert counter.multiply_adds == 0


def test_products_in_fp8_are_counted():
    class Product(torch.nn.Module):
        def forward(self, rows, weight):
            one = torch.ones(())
            options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
            return torch._scaled_mm(rows, weight.t(), **options)

    module, counter = Product(), WorkCounter()
    rows, weight = (torch.ones(size, 32).to(torch.float8_e4m3fn) for size in (5, 16))
    with torch.no_grad(), counter.of(module):
        module(rows, weight)
    assert counter.multiply_adds == 5 * 16 * 32


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (tiny_wan_pipeline, "difference"),
        (tiny_flux_pipeline, "merge"),
        slow(tiny_wan_pipeline, "merge"),
        slow(tiny_flux_pipeline, "difference"),
    ],
)
def test_the_work_of_sparse_steps_is_what_pytorch_computes(make, rule):
    pipe, counter = make(), WorkCounter()
    dense = DenseWork.measured(pipe.transformer, lambda: generate(pipe, 2))
    config = SPARSE.override(
        {
            "attention.delta_rule": rule,
            "mlp.enabled": rule != "difference",
            "schedule.actions": ("dense", "refresh", "sparse", "skip", "refresh", "sparse"),
        }
    )
    handle = attach(pipe, config, partial(Session, observer=counter))
    with counter.of(pipe.transformer):
        generate(pipe)
    handle.disable()
    assert dense.of_report(handle.report) == pytest.approx(counter.multiply_adds, rel=0.01)


QUICK = ("MagCache", "first 10%, at most 5 skipped", "threshold 0.5")
OTHERS = {
    ("TaylorSeer", "attention, first 3, order 1", "every 3"),
    ("SeaCache", "order 1, first 1, at most 3 skipped", "threshold 1"),
    ("FirstBlockCache", "", "threshold 0.4"),
    ("TaylorSeer", "whole steps, first 3, order 1", "every 3"),
    ("PAB", "timesteps 950 to 0", "every 3"),
    ("FasterCache", "timesteps 950 to 0", "every 3"),
}


@pytest.fixture(scope="module")
def wan():
    return tiny_wan_pipeline()


@pytest.fixture(scope="module")
def dense_work(wan):
    return DenseWork.measured(wan.transformer, lambda: generate(wan, 2))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(QUICK, id=", ".join(QUICK)),
        *(slow(name, id=", ".join(name)) for name in sorted(OTHERS)),
    ],
)
def test_the_work_of_caches_is_what_pytorch_computes(name, wan, dense_work):
    """Compiled beneath their hooks, too, where they give the same and leave nothing behind."""
    (entry,) = (
        each for each in entries(STEPS, []) if (each.method, *each.curve[1:], each.setting) == name
    )
    run = CacheRun(wan, STEPS, tuple(1 - 0.01 * i for i in range(STEPS)))
    counter, made = WorkCounter(), Counter()
    with with_cache(run, entry, made, as_it_is), counter.of(wan.transformer):
        expected = generate(wan, STEPS)
    assert counter.multiply_adds < 0.95 * 2 * STEPS * dense_work.call
    found = dense_work.of_calls(made, 2 * STEPS)
    assert found == pytest.approx(counter.multiply_adds, rel=1e-6)

    ran = []

    def backend(graph, _):
        def compiled(*args):
            ran.append(graph)
            return graph(*args)

        return compiled

    again = Counter()
    with torch._dynamo.config.patch(**bench.COMPILATIONS):
        torch._dynamo.reset()
        with with_cache(run, entry, again, lambda f: torch.compile(f, backend=backend)):
            torch.testing.assert_close(generate(wan, STEPS), expected, atol=1e-5, rtol=1e-5)
    assert again == made
    blocks = blocks_of(wan.transformer)
    # Each computed block ran as compiled code, and so did its attention where that is hooked.
    least = sum(again[block] for block in blocks)
    if entry.reuses_attention:
        least += sum(again[attention_of(block)] for block in blocks)
    assert len(ran) >= least
    assert not any("forward" in vars(module) for module in made)


def test_attention_is_reused_in_the_branch_that_computed_it():
    """As diffusers has these caches, the second branch gets what the first one computed."""
    counts = {}
    pipe = tiny_wan_pipeline()
    calls, at = [], []
    pipe.transformer.register_forward_pre_hook(lambda *_: calls.append(1))
    pipe.transformer.blocks[1].attn1.to_q.register_forward_hook(
        lambda *_: at.append((len(calls) - 1) % 2)
    )
    for entry in entries(STEPS, []):
        if (entry.setting, entry.variant) == ("every 2", "timesteps 950 to 0"):
            for per_branch in (entry.cache.per_branch, False):
                at.clear()
                with cached(CacheRun(pipe, STEPS), replace(entry.cache, per_branch=per_branch)):
                    generate(pipe, STEPS)
                counts[entry.method, per_branch] = at.count(0), at.count(1)
    assert set(counts) == {
        (method, apart) for method in ("PAB", "FasterCache") for apart in (True, False)
    }
    for method in ("PAB", "FasterCache"):
        first, second = counts[method, True]
        assert 0 < first == second < STEPS
    first, second = counts["PAB", False]
    assert second < first == STEPS


# Curves.


def clip(method, setting, prompt="x", *, variant="", **values):
    fixed = {
        **{"op": "equal_work", "role": "compared", "model": "tiny", "size": [64, 64, 9]},
        **{"steps": 50, "method": method, "variant": variant, "setting": setting},
        **{"prompt": prompt, "seed": 0, "refused": None, "psnr": 40.0, "work": 0.5},
        **{"seconds": 1.0, "dense_seconds": 2.0, "device": "NVIDIA H200"},
    }
    return fixed | values


def test_a_curve_is_straight_between_its_points_and_has_no_left_side():
    points = [(0.5, 50.0), (0.3, 30.0), (0.4, 45.0)]
    assert at_share(points, 0.3) == 30
    assert at_share(points, 0.35) == pytest.approx(37.5)
    assert at_share(points, 0.45) == pytest.approx(47.5)
    assert at_share(points, 0.7) == 50
    assert at_share(points, 0.29) is None
    assert at_share([], 0.5) is None


def some_clips():
    """Ours is 2 and 4 dB ahead of A's better variant at 40 %; B has the better worst clip."""
    return [
        clip("dense", "", psnr=None, work=1.0),
        clip(OURS, "low", work=0.3, psnr=30.0, seconds=0.8),
        clip(OURS, "high", work=0.5, psnr=50.0, seconds=1.2),
        clip(OURS, "low", "y", work=0.3, psnr=40.0, seconds=0.8),
        clip(OURS, "high", "y", work=0.5, psnr=60.0, seconds=1.2),
        clip("A", "one", variant="poor", work=0.4, psnr=10.0),
        clip("A", "one", "y", variant="poor", work=0.4, psnr=10.0),
        clip("A", "one", work=0.4, psnr=38.0),
        clip("A", "one", "y", work=0.38, psnr=46.0),
        clip("B", "one", work=0.4, psnr=39.0),
        clip("B", "one", "y", work=0.4, psnr=39.5),
        clip("C", "one", work=0.2, psnr=70.0),
        clip("C", "one", "y", work=0.2, refused="IndexError: no"),
    ]


def test_methods_are_compared_in_their_best_variant_on_all_prompts():
    found = qualities(some_clips(), "work", 0.4)
    assert set(found) == {OURS, "A", "B"}
    assert (found["A"].variant, found["A"].psnrs) == ("", {"x": 38.0, "y": 46.0})
    ahead = lead(found, [OURS])
    assert (ahead.best.method, ahead.best_worst.method) == ("A", "B")
    assert ahead.mean == pytest.approx(3)
    assert ahead.interval == pytest.approx((2, 4))
    assert ahead.worst == pytest.approx(1)
    assert lead({OURS: found[OURS]}, [OURS]) is None
    assert lead(found, [OURS, "A", "B"]) is None
    assert lead(found, ["B", "A"]).mean == pytest.approx(-3)


def test_equal_time_is_another_comparison_than_equal_work():
    found = qualities(some_clips(), "time", 0.5)
    assert found[OURS].psnrs == {"x": pytest.approx(40), "y": pytest.approx(50)}
    assert qualities(some_clips(), "time", 0.3) == {}


def test_a_tables_last_rows_say_how_far_ours_is_ahead():
    rows = {row["method"]: row for row in quality_rows(some_clips(), "work")}
    assert list(rows)[:2] == [OURS, "A"]
    assert rows[OURS]["40%"] == "45.0 (40.0)"
    assert rows["C"]["40%"] == "-"
    assert rows[OURS]["25%"] == "-"
    for name in LEADS:  # there is no list of skips
        assert rows[name]["40%"] == "+3.0 (A)"
        assert rows[f"{name}: {WORST}"]["40%"] == "+1.0 (B)"
    assert rows["B"]["time / work"] == "1.25"


def test_a_file_for_the_repository_reads_back_as_the_records_were(tmp_path):
    found = [
        clip(OURS, "low", psnr=1 / 3, call_ms={"dense": 2 / 3}),
        clip("A", "x", psnr=float("inf")),
    ]
    write_compact(found, tmp_path / "all.json")
    ours, other = read(tmp_path / "all.json")
    assert ours == found[0] | {"psnr": 0.333333, "call_ms": {"dense": 0.666667}}
    assert other == found[1] | {"psnr": None}
    assert (tmp_path / "all.json").read_text().count("NVIDIA") == 1


def test_where_time_goes_is_split_by_action():
    made = {"calls": {"dense": 60, "sparse": 20, "skip": 20}}
    times = {"call_ms": {"dense": 10.0, "sparse": 3.0, "skip": 0.1}}
    (row,) = step_rows([clip(OURS, "fast", **made, **times), clip("A", "one")])
    assert row["calls"] == "60 dense, 20 sparse, 20 skip"
    assert (row["sparse, ms"], row["refresh, ms"], row["stock, ms"]) == ("3.00", "-", "20.00")
    assert (row["work"], row["time"]) == ("50.0%", "50.0%")
    apart = [clip(OURS, "fast", variant=each, **made, **times) for each in ("tuned", "by hand")]
    assert [row["profile"] for row in step_rows(apart)] == ["by hand/fast", "tuned/fast"]


def test_settings_are_chosen_on_both_sides_of_each_target_from_the_best_variant():
    tried = [
        *(clip("A", f"{w}", variant="good", work=w, psnr=100 * w) for w in (0.2, 0.26, 0.3, 0.6)),
        *(clip("A", f"{w}", variant="poor", work=w, psnr=90 * w) for w in (0.2, 0.3, 0.6)),
        *(clip("B", f"{w}", work=w, psnr=60.0) for w in (0.45, 0.7)),
        *(clip("C", text, psnr=None, work=1.0) for text in ("one", "two")),
        clip("D", "no", refused="IndexError: no"),
    ]
    at_quarter = chosen(tried, [0.25])
    assert at_quarter.pop(("A", "good")) == {"0.2", "0.26", "0.3"}
    assert at_quarter == {("B", ""): {"0.45"}, ("C", ""): {"one"}}
    assert chosen(tried, [0.5], best=2) == {
        ("A", "good"): {"0.3", "0.6"},
        ("B", ""): {"0.45", "0.7"},
    }
    assert chosen(tried, [0.25, 0.5], best=1) == {
        ("A", "good"): {"0.2", "0.26", "0.3"},
        ("B", ""): {"0.45", "0.7"},
    }


def test_the_figure_has_a_panel_for_work_and_one_for_time():
    drawn = figure.draw([clip for clip in some_clips() if clip["method"] != "C"])
    assert [axes.get_xlabel() for axes in drawn.axes] == [*figure.LABELS.values()]
    for axes in drawn.axes:
        colours = {line.get_color() for line in axes.lines}
        assert figure.COLOURS[OURS] in colours
        assert figure.COLOURS["MagCache"] not in colours
    with pytest.raises(ValueError, match="no records of equal work"):
        figure.draw([])


def test_the_figure_keeps_numbers_of_steps_apart():
    found = some_clips()
    two = figure.draw([*found, *({**each, "steps": 20} for each in found)])
    assert len(two.axes) == 2 * len(figure.draw(found).axes)


def test_flow_shifts_are_kept_apart():
    own, given = clip(OURS, "a"), clip(OURS, "a", flow_shift=6.0)
    assert joined([own, given, dict(own, flow_shift=None), dict(given)]) == [own, given]
    assert [*by_workload([own, given]).values()] == [[own], [given]]
    assert [name.endswith(" steps, flow shift 6") for name in by_workload([own, given])] == [
        False,
        True,
    ]


def test_every_method_has_a_colour_and_every_point_a_name_of_its_own():
    found = entries(50, [])
    assert {entry.method for entry in found} | {OURS, SKIPS} == set(figure.COLOURS)
    assert len({(*entry.curve, entry.setting) for entry in found}) == len(found)
    assert curves.known_methods(some_clips()) == [OURS, "A", "B", "C"]


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("schedule: {full_steps: [0, 1, 4], between: middle}", OURS),
        ("schedule: {full_steps: [0, 1, 4], between: none}", SKIPS),
        ("schedule: {full_steps: [0, 1, 3], sparse_steps: [20]}", SKIPS),  # of 10 steps, never
        ("schedule: {actions: [dense, refresh, skip, sparse]}", OURS),
        ("{attention: {enabled: false}, mlp: {enabled: false}}", SKIPS),
        ("{mlp: {enabled: false}, schedule: {warmup_steps: 2}}", OURS),
        ("{mlp: {enabled: false}, schedule: {warmup_steps: 9}}", SKIPS),
    ],
)
def test_what_is_never_sparse_counts_as_skipped_steps_alone(tmp_path, text, method):
    path = tmp_path / "mine.yaml"
    path.write_text(f"sparsity: {text if text.startswith('{') else f'{{{text}}}'}")
    assert entries(10, [path])[0].method == method


# The run.

PROFILE = """
model_class: WanTransformer3DModel
generation: {height: 64, width: 64, num_frames: 9, num_inference_steps: 10, guidance_scale: 4.0,
  max_sequence_length: 16}
sparsity:
  attention: {enabled: true, density: 0.25, block_size_q: 16}
  mlp: {enabled: false}
  schedule: {full_steps: [0, 1, 4], between: middle}
  tile: [2, 2, 4]
"""


@pytest.fixture
def folder(tmp_path):
    tiny_wan_pipeline().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "chipsparse.yaml").write_text(PROFILE)
    (tmp_path / "ours.yaml").write_text(PROFILE)
    (tmp_path / "skips.yaml").write_text(PROFILE.replace("middle", "none"))
    (tmp_path / "prompts.txt").write_text(f"{PROMPT}\na blue square\na green triangle\n")
    return tmp_path


def run(folder, name, *arguments):
    given = ["--op", "equal_work", "--device", "cpu", "--json", str(folder / name)]
    given += ["--model", str(folder / "model"), "--prompts", str(folder / "prompts.txt")]
    profiles = [str(folder / "ours.yaml"), str(folder / "skips.yaml")]
    code = main([*given, "--profiles", *profiles, *arguments])
    return code, json.loads((folder / name).read_text())


FEW = (
    "--case",
    "chipsparse|alone|5 steps|MagCache, first 10%, at most 5 skipped, threshold (0.12|1)$",
)


@pytest.mark.slow
def test_settings_are_chosen_on_one_prompt_and_compared_on_others(folder, capsys, monkeypatch):
    code, tried = run(folder, "tried.json", "--role", "calibrating", *FEW)
    assert code == 0
    assert {each["prompt"] for each in tried if "prompt" in each} == {PROMPT}
    assert {each["method"] for each in tried} == {"dense", "MagCache"}
    (ratios,) = (each for each in tried if "ratios" in each)
    assert len(ratios["ratios"]) == 10

    known = ("--known", str(folder / "tried.json"))
    code, refused = run(folder, "refused.json", *known, *FEW)
    assert (code, len(refused)) == (1, len(tried))
    assert "settings are chosen on prompt 0" in "".join(capsys.readouterr())

    known += ("--first", "1", "--count", "2")
    code, first = run(folder, "first.json", *known, "--part", "0/2", *FEW)
    assert code == 0
    code, second = run(folder, "second.json", *known, "--part", "1/2", *FEW)
    assert code == 0
    made = curves.compared(joined([*first, *second]))
    assert {each["prompt"] for each in made} == {"a blue square", "a green triangle"}
    by_name = {(each["method"], each["setting"]): each for each in made}
    assert by_name["dense", ""]["psnr"] is None
    assert by_name["fewer steps", "5 steps"]["work"] == 0.5
    assert by_name[SKIPS, "skips"]["work"] == pytest.approx(0.3)
    ours = by_name[OURS, "ours"]
    assert 0.3 < ours["work"] < 0.6
    assert ours["calls"] == {"dense": 4, "refresh": 2, "skip": 12, "sparse": 2}
    mag = {(each["prompt"], each["setting"]) for each in made if each["method"] == "MagCache"}
    settings = {setting for _, setting in mag}
    assert settings
    assert settings <= {each["setting"] for each in tried}
    assert len(mag) == 2 * len(settings)
    assert f"{OURS} |" in capsys.readouterr().out

    # The same settings on another prompt, with none chosen on one.
    again = ("--again", str(folder / "first.json"), "--count", "1")
    code, other = run(folder, "again.json", *again)
    assert code == 0
    other = curves.compared(other)
    assert {each["prompt"] for each in other} == {PROMPT}
    assert {(each["method"], each["setting"]) for each in other} == set(by_name)

    # Nothing is left to generate.
    monkeypatch.setattr(bench._Bench, "_generate", None)
    assert run(folder, "first.json", *known, "--part", "0/2", *FEW) == (0, first)


@pytest.mark.slow
def test_blocks_are_compiled_and_warm_before_anything_is_timed(folder, monkeypatch):
    """All that is compiled is compiled in the warm-up, for every kind of patch."""
    graphs = []
    measure = bench._Bench.measure

    def watched(*args):
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        measure(*args)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    monkeypatch.setitem(bench.COMPILE_OPTIONS, "backend", "eager")
    monkeypatch.setattr(bench._Bench, "measure", watched)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    few = ("--case", "chipsparse|alone|5 steps|MagCache, first 10%, at most 5.*old 1$|PAB.*950.*2$")
    code, found = run(folder, "compiled.json", "--compile", "--count", "1", *few)
    assert code == 0
    assert {each["method"] for each in found} == {
        *("dense", OURS, SKIPS, "fewer steps", "MagCache", "PAB"),
    }
    before, after = graphs
    assert before == after > 3


def test_a_failure_of_our_own_is_no_result(folder, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("broken")

    monkeypatch.setattr(bench._Bench, "_generate", broken)
    code, found = run(folder, "broken.json", *FEW)
    assert code == 1
    assert all("prompt" not in record for record in found)


def test_options_are_read():
    args = parse(["--op", "equal_work", "--size", "64x48x9", "--part", "1/4"])
    assert (args.size, args.part) == ((64, 48, 9), (1, 4))


@pytest.mark.parametrize(
    "arguments", [("--size", "256"), ("--part", "4/4"), ("--role", "tuning")], ids=" ".join
)
def test_a_wrong_option_is_refused(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--op", "equal_work", *arguments])
    assert arguments[0] in capsys.readouterr().err
