"""The benchmark of peers: what it compares, what it counts and keeps, on a random-weight video."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from PIL import Image

from benchmarks import peer_rows, peers, peers_figure
from benchmarks.__main__ import main
from benchmarks.computed_work import WorkCounter
from benchmarks.peer_caches import caches, faster, pyramid, taylor_seer
from benchmarks.peer_rows import rows, scheduled
from benchmarks.peers_table import summaries
from benchmarks.static_window import WindowSession, window_columns
from chipsparse.api import attach
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.pipelines.diffusers_caches import CacheRun, cached
from chipsparse.plan import Action, SparsityPlan
from chipsparse.profiles import bundled_model, load_profile
from chipsparse.session import Session
from chipsparse.token_order import voxel_order
from tests.pipelines.test_flux import generate as flux_generate
from tests.pipelines.test_wan import SPARSE, generate
from tests.tiny_models import PROMPT, tiny_flux_pipeline, tiny_wan_pipeline


def layout(grid, *, text=0, text_first=False):
    kinds = (LayerKind("block", layers=3, mlp_width=128),)
    return ModelLayout(kinds, 2, 32, 1, (grid,), text, text_first)


@pytest.fixture(scope="module")
def profile():
    return load_profile(bundled_model() / "chipsparse.yaml").sparsity


# The rows.


def test_every_method_has_a_curve_and_every_point_a_name_of_its_own(profile):
    for video in (False, True):
        found = rows(profile, 30, video=video)
        names = [(row.method, row.setting) for row in found]
        assert len(set(names)) == len(names)
        counts = {name: [method for method, _ in names].count(name) for name, _ in names}
        for method in ("chipsparse", "FirstBlockCache", "MagCache", "TaylorSeer, lite", "PAB"):
            assert counts[method] >= 3
        assert counts["SeaCache"] == (3 if video else 1)
        assert ("chipsparse + SeaCache" in counts) == video
        alone = [row for row in found if row.cache is not None and row.config is None]
        assert all(row.method == row.cache.method for row in alone)


def test_schedules_have_the_shares_of_the_profile(profile):
    def actions(skips):
        plan = SparsityPlan(scheduled(profile, 30, skips), layout((4, 4, 4)), 30)
        return plan.actions()

    unskipped = actions(0)
    full = [step for step in range(30) if unskipped[step] is not Action.SPARSE]
    assert full == [0, 1, 2, 3, 4, 8, 14, 21, 28, 29]
    assert [step for step in full if unskipped[step] is Action.REFRESH] == [4, 8, 14, 21]
    for skips in (1, 3):
        found = actions(skips)
        assert all(found[step] is unskipped[step] for step in full)
        text = "".join("s" if action is Action.SKIP else "c" for action in found)
        assert "s" * skips in text
        assert "s" * (skips + 1) not in text


def test_the_window_has_the_columns_and_the_schedule_of_what_it_is_compared_with(profile):
    by_name = {(row.method, row.setting): row for row in rows(profile, 30, video=True)}
    for share in ("10%", "30%"):
        setting = f"{share} of the columns"
        ours = by_name["chipsparse, attention alone", setting].config
        window = by_name["static window", setting].config
        assert by_name["static window", setting].session is WindowSession
        changes = {"attention.delta_rule": "kept_only", "schedule.reselect": False}
        assert window == ours.override(changes)
        assert not ours.mlp.enabled


# The window.


def test_a_window_is_what_lies_nearest_in_the_grid():
    columns = window_columns(layout((1, 4, 4)), None, count=4, group_rows=4)
    assert columns.shape == (4, 16)
    # A group is a row of the picture: its centre lies between the second and the third token.
    assert columns[0].nonzero().flatten().tolist() == [1, 2, 5, 6]
    order = voxel_order((1, 4, 4), (1, 2, 2))
    columns = window_columns(layout((1, 4, 4)), order, count=4, group_rows=4)
    assert torch.equal(columns, torch.block_diag(*[torch.ones(1, 4)] * 4).bool())


@pytest.mark.parametrize("text_first", [False, True])
def test_a_window_keeps_the_text_and_as_many_columns_as_were_asked(text_first):
    shape = layout((2, 4, 4), text=6, text_first=text_first)
    columns = window_columns(shape, None, count=11, group_rows=8)
    text = slice(0, 6) if text_first else slice(32, 38)
    assert columns.shape == (5, 38)
    assert columns[:, text].all()
    # Rows of text alone have no place in the grid, and keep all.
    last = 11 if text_first else 38
    assert columns.sum(-1).tolist() == [11, 11, 11, 11, last]
    few = window_columns(shape, None, count=2, group_rows=8)
    assert few.sum(-1).tolist()[:4] == [6] * 4
    alone = window_columns(shape, None, count=11, group_rows=2)
    whole = [bool(row.all()) for row in alone]
    assert whole == ([True] * 3 + [False] * 16 if text_first else [False] * 16 + [True] * 3)


def test_a_window_of_several_pictures_is_refused():
    two = ModelLayout(layout((1, 4, 4)).kinds, 2, 32, 1, ((1, 4, 4), (1, 4, 4)))
    with pytest.raises(ValueError, match="one token grid, got 2"):
        window_columns(two, None, count=4, group_rows=4)


def test_a_session_of_windows_keeps_as_many_columns_and_is_not_exact():
    pipe = tiny_wan_pipeline()
    dense = generate(pipe)
    config = SPARSE.override({"mlp.enabled": False, "attention.delta_rule": "kept_only"})
    kept = {}
    for session in (Session, WindowSession):
        handle = attach(pipe, config, session)
        found = generate(pipe)
        sparse = [step for step in handle.report.steps if step.action is Action.SPARSE]
        kept[session] = {round(step.attention_kept, 4) for step in sparse}
        handle.disable()
        assert 0 < (found - dense).norm() < dense.norm()
    (window,) = kept[WindowSession]
    assert max(abs(share - window) for share in kept[Session]) < 0.02
    whole = config.override({"attention.keep_fraction": 1.0})
    handle = attach(pipe, whole, WindowSession)
    torch.testing.assert_close(generate(pipe), dense, atol=5e-5, rtol=5e-5)
    handle.disable()


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


@pytest.mark.parametrize("make", [tiny_wan_pipeline, tiny_flux_pipeline])
def test_the_work_of_a_patched_model_is_that_of_the_stock_one_and_less_where_it_is_sparse(make):
    pipe, counter = make(), WorkCounter()
    size = {"height": 64, "width": 64, "num_inference_steps": 4, "max_sequence_length": 16}

    def work(rule=None, *actions):
        handle = None
        if rule is not None:
            config = SPARSE.override(
                {
                    "attention.delta_rule": rule,
                    "schedule.actions": actions,
                    "mlp.enabled": rule != "reuse",
                }
            )
            handle = attach(pipe, config, counter.sessions(Session))
        with counter.of(pipe.transformer):
            pipe(PROMPT, output_type="latent", generator=torch.Generator().manual_seed(0), **size)
        if handle is not None:
            handle.disable()
        return counter.multiply_adds

    stock = work()
    full = ("dense", "refresh", "dense", "skip")
    assert work("reuse", *full) == stock * 3 // 4
    merged = work("merge", *full)  # computes column sums, the residual and mean activations besides
    assert stock * 3 // 4 < merged < 0.85 * stock
    sparse = work("merge", "dense", "refresh", "sparse", "skip")
    assert merged - stock // 4 < sparse < merged - 0.1 * stock
    assert work() == stock


# Caches.


def test_states_are_kept_apart_where_that_is_asked_for():
    """Both branches reuse what they themselves computed, each at every other step."""
    computed = {}
    for per_branch in (False, True):
        pipe = tiny_wan_pipeline()
        calls, at = [], []
        pipe.transformer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        pipe.transformer.blocks[1].attn1.to_q.register_forward_hook(
            lambda *_, calls=calls, at=at: at.append((len(calls) - 1) % 2)
        )
        for cache in (pyramid(2, (-1, 1001)), faster(2, (-1, 950))):
            cache = replace(cache, per_branch=per_branch)
            dense = generate(pipe)
            at.clear()
            with cached(CacheRun(pipe, 7), cache):
                found = generate(pipe)
                counts = [at.count(0), at.count(1)]
                assert torch.equal(generate(pipe), found)
            computed[cache.method, per_branch] = counts
            assert torch.equal(generate(pipe), dense)
    # Guidance's second branch never computes its own after the first timesteps.
    assert computed["PAB", False] == [7, 0]
    assert computed["PAB", True] == [4, 4]
    assert computed["FasterCache", True][0] == computed["FasterCache", True][1]


def test_what_diffusers_warns_of_is_heard_and_the_cache_is_gone_after_a_failure():
    pipe = tiny_flux_pipeline()
    run = CacheRun(pipe, 7)
    with cached(run, faster(2)) as heard:
        assert pipe.transformer.is_cache_enabled
    assert len(heard) == len(set(heard)) == 2
    assert "experimental" in heard[0]
    assert not pipe.transformer.is_cache_enabled
    with pytest.raises(IndexError), cached(run, faster(2, distilled=False)):
        flux_generate(pipe)
    assert not pipe.transformer.is_cache_enabled
    with cached(run, None) as heard:
        assert heard == []
        assert not pipe.transformer.is_cache_enabled


def test_taylor_seers_own_choice_of_modules_finds_none_of_wan():
    pipe = tiny_wan_pipeline()
    dense = generate(pipe)
    for default, same in ((True, True), (False, False)):
        with cached(CacheRun(pipe, 7), taylor_seer(5, default_names=default)):
            assert torch.equal(generate(pipe), dense) == same
    assert any(cache.setting.startswith("default") for cache in caches(video=True))


# The run.

PROFILE = """
model_class: WanTransformer3DModel
generation: {height: 64, width: 64, num_frames: 9, num_inference_steps: 12, guidance_scale: 4.0,
  max_sequence_length: 16}
sparsity:
  attention: {keep_fraction: 0.25, group_rows: 16}
  mlp: {keep_fraction: 0.3, group_rows: 16}
  token_order: {voxel: [2, 2, 4]}
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A folder of a Wan pipeline, its profile, two prompts; a table of six rows."""
    folder = tmp_path / "model"
    tiny_wan_pipeline().save_pretrained(folder)
    (folder / "chipsparse.yaml").write_text(PROFILE)
    (tmp_path / "prompts.txt").write_text(f"{PROMPT}\na blue square\n")
    chosen = {
        ("dense", "again"),
        ("chipsparse", "1 skipped in a row"),
        ("static window", "10% of the columns"),
        ("FirstBlockCache", "threshold 0.4"),
        ("FasterCache, splitting the batch", "every 2, timesteps 681 to 0"),
        ("chipsparse + PAB", "1 skipped in a row, every 2, timesteps 950 to 0"),
    }

    def fewer(*arguments, **options):
        found = [row for row in rows(*arguments, **options) if (row.method, row.setting) in chosen]
        assert len(found) == len(chosen)
        return found

    monkeypatch.setattr(peer_rows, "rows", fewer)
    return folder


def run(folder, *arguments):
    path = folder.parent / "peers.json"
    given = ("--model", str(folder), "--prompts", str(folder.parent / "prompts.txt"))
    code = main(["--op", "peers", "--device", "cpu", "--json", str(path), *given, *arguments])
    return code, json.loads(path.read_text())


def test_every_row_is_measured_once_and_a_run_goes_on(model, capsys, monkeypatch):
    sheet = model.parent / "sheet.png"
    code, found = run(model, "--count", "1", "--sheet", str(sheet))
    assert code == 0
    calibration, *clips = found
    assert len(calibration["ratios"]) == 12
    assert calibration["ratios"][0] == 1
    assert len(clips) == 7
    # The stock clip and five others; the cache that fails makes none.
    assert Image.open(sheet).size == (8 * 64, 6 * 64)
    by_method = {clip["method"]: clip for clip in clips if clip["setting"] != "first"}
    refused = by_method.pop("FasterCache, splitting the batch")
    assert refused["refused"].startswith("IndexError: ")
    again = by_method.pop("dense")
    assert (again["psnr"], again["work"], again["ssim"]) == (None, 1, 1)
    for clip in by_method.values():
        assert clip["refused"] is None
        assert 5 < clip["psnr"] < 100
        assert 0.2 < clip["work"] < 1
        assert clip["processor_seconds"] > 0
        assert clip["flicker"] > 0
        assert (clip["steps"], clip["frames"], clip["prompt"]) == (12, 9, PROMPT)
    assert by_method["chipsparse"]["actions"]["skip"] > 0
    assert by_method["static window"]["attention_kept"] < 0.5
    assert by_method["chipsparse + PAB"]["work"] < by_method["chipsparse"]["work"]
    assert f"| {model.name} | dense | again | 1 |" in capsys.readouterr().out

    shutil.move(sheet, model.parent / "first.png")
    code, both = run(model, "--count", "2", "--sheet", str(sheet))
    assert code == 0
    assert both[: len(found)] == found
    assert [clip["seed"] for clip in both[len(found) :]] == [1] * 7
    assert sheet.exists()

    monkeypatch.setattr(peers._Bench, "_generate", None)  # nothing is left to generate
    assert run(model, "--count", "1", "--case", "^static") == (0, both)
    assert run(model, "--count", "2") == (0, both)


def test_some_rows_can_be_left_out(model):
    code, found = run(model, "--count", "1", "--case", "^(?!.*(Cache|PAB|window))")
    assert code == 0
    names = [(clip["method"], clip["setting"]) for clip in found if clip["seed"] is not None]
    assert names[0] == ("dense", "first")
    assert set(names[1:]) == {("dense", "again"), ("chipsparse", "1 skipped in a row")}


def test_a_failure_of_our_own_is_no_result(model, monkeypatch):
    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(WindowSession, "_attention_budget", broken)
    code, found = run(model, "--count", "1")
    assert code == 1
    assert "static window" not in {clip["method"] for clip in found}


# Table and figure.


def clip(method, setting, seed, **values):
    fixed = {
        **{"op": "peers", "model": "tiny", "steps": 30, "frames": None, "refused": None},
        **{"prompt": "x", "seed": seed, "method": method, "setting": setting, "remarks": []},
        **{"psnr": 40.0, "ssim": 0.9, "flicker": None, "dense_flicker": None},
        **{"processor_seconds": 1.0, "work": 1.0},
        **{"device": "a CPU", "torch": "2", "diffusers": "0.42"},
    }
    return fixed | values


def some_records():
    return [
        {"op": "peers", "model": "tiny", "method": "MagCache", "ratios": [1.0]},
        *(clip("dense", "first", seed, processor_seconds=8.0, psnr=None) for seed in (0, 1, 2)),
        *(clip("dense", "again", seed, processor_seconds=12.0, psnr=None) for seed in (0, 1, 2)),
        clip("PAB", "a", 0, processor_seconds=5.0, psnr=30.0, work=0.5),
        clip("PAB", "a", 1, processor_seconds=2.0, psnr=None, work=0.7),
        clip("PAB", "a", 2, processor_seconds=4.0, psnr=35.0, work=0.6),
        clip("PAB", "b", 0, processor_seconds=2.5, psnr=20.0, work=0.2),
        clip("chipsparse", "a", 0, processor_seconds=3.0, psnr=38.0, work=0.4),
        clip("chipsparse + PAB", "a", 0, processor_seconds=2.0, psnr=28.0, work=0.3),
        {
            **{"op": "peers", "model": "tiny", "steps": 30, "frames": None, "prompt": "x"},
            **{"method": "SeaCache", "setting": "a", "seed": 0, "refused": "ValueError: no"},
        },
    ]


def test_the_table_has_medians_over_prompts():
    found = {(each["method"], each["setting"]): each for each in summaries(some_records())}
    assert list(found) == [
        ("dense", "first"),
        ("dense", "again"),
        ("chipsparse", "a"),
        ("PAB", "a"),
        ("PAB", "b"),
        ("SeaCache", "a"),
        ("chipsparse + PAB", "a"),
    ]
    pab = found["PAB", "a"]
    assert (pab["prompts"], pab["psnr_median"], pab["psnr_min"]) == (3, 35.0, 30.0)
    assert (pab["speedup"], pab["work"], pab["flicker"]) == (2.5, 0.6, None)
    assert not pab["inert"]
    assert found["dense", "again"]["psnr_median"] == math.inf
    assert found["dense", "again"]["inert"]
    assert found["SeaCache", "a"]["refused"] == "ValueError: no"
    assert "speedup" not in found["SeaCache", "a"]


def test_flicker_is_told_as_a_share_of_dense():
    moving = [
        clip("dense", "first", 0, flicker=0.2, dense_flicker=0.2),
        clip("PAB", "a", 0, flicker=0.3, dense_flicker=0.2),
    ]
    assert [each["flicker"] for each in summaries(moving)] == pytest.approx([1.0, 1.5])


def test_clips_of_other_lengths_are_not_mixed():
    both = [clip("dense", "first", 0), clip("dense", "first", 0, steps=50)]
    assert [each["steps"] for each in summaries(both)] == [30, 50]


def test_the_figure_has_a_curve_per_method():
    image = peers_figure.draw(some_records())
    assert image.width == 2 * peers_figure.PANEL_WIDTH + peers_figure.LEGEND_WIDTH
    for left in (0, peers_figure.PANEL_WIDTH):
        panel = image.crop((left, 0, left + peers_figure.PANEL_WIDTH, image.height))
        colours = {"#{:02x}{:02x}{:02x}".format(*colour) for _, colour in panel.getcolors(1 << 20)}
        assert {peers_figure.COLOURS["PAB"], peers_figure.COLOURS["chipsparse"]} <= colours
        assert peers_figure.COLOURS["MagCache"] not in colours
    with pytest.raises(ValueError, match="no records of peers"):
        peers_figure.draw([])


def test_every_method_has_a_colour(profile):
    """But the controls, which have one point each, and what is not a curve."""
    methods = {row.method for video in (False, True) for row in rows(profile, 30, video=video)}
    stacked = {method for method in methods if method.startswith(peers_figure.STACKED)}
    assert {method.removeprefix(peers_figure.STACKED) for method in stacked} <= set(
        peers_figure.COLOURS
    )
    assert set(peers_figure.COLOURS) <= methods
    plain = methods - stacked - set(peers_figure.COLOURS)
    assert all(
        sum(row.method == method for row in rows(profile, 30, video=True)) == 1 for method in plain
    )
