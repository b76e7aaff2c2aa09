"""The benchmark of moving photographs: data, drawing, model, training and tables, all tiny."""

import contextlib
import math
import re
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

import chipsparse
from benchmarks import curves
from benchmarks.__main__ import main
from benchmarks.curves import OURS, SKIPS, at_share, lead, qualities, quality_rows
from benchmarks.models import MODELS
from benchmarks.moving_photographs import (
    evaluate,
    methods,
    mlp_rules,
    model,
    photographs,
    train,
)
from benchmarks.moving_photographs.clips import SPEEDS, Layer, Photographs, Scene, draw
from benchmarks.moving_photographs.model import BLOCK, TINY, LinearLatents, Model
from benchmarks.moving_photographs.work import DenseWork
from benchmarks.prices import PRICED_AS, priced
from benchmarks.records import read
from chipsparse import SparsityConfig
from chipsparse.config import Action
from chipsparse.experiments.diffusers_caches import CacheRun
from chipsparse.experiments.engine import step_digest
from docs.tables import figures
from tests.tiny_models import PROMPT, tiny_wan_pipeline
from tests.variants import slow

CPU = torch.device("cpu")
FACTS = {"transformer": TINY, "photographs": 4, **train.GENERATION}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two photographs of noise of different coarseness, a black and a white one."""
    folder = tmp_path_factory.mktemp("photographs")
    draw = np.random.default_rng(0)
    for number, cells in enumerate((6, 24)):
        image = Image.fromarray(draw.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        image.resize((160, 120)).save(folder / f"{number:03d}.jpg", quality=95)
    Image.new("RGB", (160, 120), "black").save(folder / "002.jpg")
    Image.new("RGB", (160, 120), "white").save(folder / "003.jpg")
    return folder


@pytest.fixture(scope="module")
def images(folder):
    return Photographs(folder, CPU)


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("training")
    options = [str(folder), str(out), "--tiny", "--print-every", "2", "--steps"]
    assert train.main([*options, "3"]) == 0
    assert train.main([*options, "2"]) == 0
    return out


def test_photographs_are_prepared_by_name(tmp_path):
    names = [name for _, name in photographs.listed()]
    assert len(names) == len(set(names)) == 40
    Image.new("RGB", (300, 200), "red").save(tmp_path / "a.png")
    Image.new("RGB", (90, 270), "blue").save(tmp_path / "b.webp")
    with pytest.raises(FileNotFoundError, match=r"c\.jpg"):
        photographs.prepare(tmp_path, tmp_path / "out", ["a.png", "c.jpg"])
    assert not (tmp_path / "out").exists()
    size = photographs.prepare(tmp_path, tmp_path / "out", ["a.png", "b.webp"])
    made = sorted((tmp_path / "out").iterdir())
    assert size == sum(file.stat().st_size for file in made)
    assert [Image.open(file).size for file in made] == [(1350, 900), (900, 1600)]


def layer(**changes):
    """A layer that stands still in the middle."""
    words = {"photograph": 2, "shape": 0, "place": 4, "drift": 8, "bend": 1, "zoom": 1, "turn": 1}
    return Layer({**words, **changes}, size=0.2, speed=1.0, shift=(0.0, 0.0), sway=0.0)


def test_clips_depend_on_their_seed_alone(images):
    scenes = [Scene.drawn(seed, 3) for seed in range(20)]
    assert {len(scene.layers) for scene in scenes} == {3, 4, 5}
    assert Scene.drawn(3, 3) == scenes[3] != scenes[4]
    clips = [draw(scene, images, (32, 48, 4)) for scene in (scenes[3], scenes[3], scenes[4])]
    assert clips[0].shape == (3, 4, 32, 48)
    assert torch.equal(clips[0], clips[1])
    assert (clips[0] - clips[2]).abs().mean() > 0.1
    assert max(clip.abs().max() for clip in clips) <= 1 + 1e-6


@pytest.mark.parametrize(
    ("shape", "area"),
    [(0, math.pi), (1, 4 * 0.9**2), (2, 2 * (1.4 * 0.85) ** 2)],
)
def test_a_cover_has_its_area_and_moves_its_way(images, shape, area):
    still = Scene((layer(), layer(photograph=3, shape=shape)))  # white over black
    moving = Scene((layer(), layer(photograph=3, shape=shape, drift=0)))
    size = (96, 96, 64)
    radius = 0.2 * 96
    masks = [(draw(scene, images, size).mean(0) > 0).float() for scene in (still, moving)]
    assert torch.equal(masks[0][0], masks[0][63])
    assert masks[0][0].sum() == pytest.approx(area * radius**2, rel=0.05)
    places = torch.arange(96).float()
    middle = [(mask.sum(1) * places).sum(-1) / mask.sum((1, 2)) for mask in masks]
    assert middle[0].std() < 0.01
    passed = 96 * SPEEDS[1] / 64  # pixels a frame
    assert (middle[1][36] - middle[1][28]).item() == pytest.approx(8 * passed, rel=0.1)


def test_latents_invert_and_keep_what_they_say(images):
    latents = LinearLatents()
    clips = [draw(Scene.drawn(i, 3), images, (64, 64, 8)) for i in range(8)]
    blocks = torch.cat([model.blocks_of(clip) for clip in clips]).flatten(0, 2)
    kept = latents.fit(blocks)
    coded = (blocks - latents.mean) @ latents.basis
    assert coded.std(0) == pytest.approx(latents.deviation, rel=0.01)
    error = (coded @ latents.basis.T + latents.mean - blocks).square().mean()
    assert kept == pytest.approx(-10 * math.log10(error / 4), abs=0.01)
    made = torch.randn(1, 32, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    (frames,) = latents.decode(made)
    assert frames.shape == (1, 3, 5, 24, 32)
    cut = torch.cat([torch.zeros(3, BLOCK[0] - 1, 24, 32), frames[0]], 1)
    assert latents.encode(cut)[:, 1].numpy() == pytest.approx(made[0, :, 1].numpy(), abs=1e-3)


def test_a_checkpoint_is_small_and_close(tmp_path, monkeypatch):
    torch.manual_seed(0)
    made = Model.new(FACTS)
    with torch.no_grad():
        made.transformer.proj_out.weight.normal_()
        made.transformer.proj_out.weight[0, 0] = 50.0
    monkeypatch.setattr(model, "PART_BYTES", 20_000)
    size = model.write_checkpoint(made, tmp_path / "c")
    size = model.write_checkpoint(made, tmp_path / "c")  # in place of the first
    sizes = [file.stat().st_size for file in sorted(tmp_path.glob("c/weights-*.bin"))]
    assert len(sizes) > 10  # so that their order by name is looked at
    assert sizes[:-1] == [20_000] * (len(sizes) - 1)
    assert sum(sizes) == size
    weights = dict(made.transformer.named_parameters())
    assert size < 1.15 * sum(tensor.numel() for tensor in weights.values())
    again = model.read_checkpoint(tmp_path / "c")
    assert again.facts == FACTS
    for name, tensor in again.transformer.named_parameters():
        error = (tensor - weights[name]).norm() / (weights[name].norm() + 1e-9)
        large = tensor.ndim > 1 and tensor.numel() >= model.LEAST_ROUNDED
        assert error < (0.02 if large else 1e-7), name
    assert again.transformer.proj_out.weight[0, 0].item() == pytest.approx(50, rel=0.01)


def test_training_goes_on_where_it_ended(trained, folder, tmp_path, capsys):
    state = torch.load(trained / "state.pt", weights_only=True)
    assert state["numbers"][1:] == (5, 5)
    assert state["optimizers"][1]["state"][0]["step"] == 5
    kept = model.read_checkpoint(trained / "checkpoint")
    assert (kept.facts["trained_steps"], kept.facts["photographs"]) == (5, 4)
    for name, tensor in kept.transformer.named_parameters():
        assert torch.allclose(tensor, state["average"][name], atol=0.02), name
    assert kept.latents.basis.numpy() == pytest.approx(state["latents"]["basis"].numpy())
    options = [str(folder), str(tmp_path), "--tiny", "--steps", "1", "--print-every", "1"]
    assert train.main([*options, "--checkpoint", str(trained / "checkpoint")]) == 0
    assert "step 6, " in capsys.readouterr().out  # from the average alone
    assert train.main([*options, "--seconds", "0"]) == 0  # nothing is left to do
    begun = torch.load(tmp_path / "state.pt", weights_only=True)
    assert begun["numbers"][1:] == (6, 1)
    assert torch.equal(begun["latents"]["mean"], state["latents"]["mean"])


def test_a_student_is_distilled(trained, folder, tmp_path):
    options = [str(folder), str(tmp_path), "--tiny", "--steps", "1", "--distil", "8"]
    assert train.main([*options, "--teacher", str(trained / "checkpoint")]) == 0
    student = model.read_checkpoint(tmp_path / "checkpoint").facts
    assert (student["steps"], student["guidance"], student["trained_steps"]) == (8, 1.0, 1)


def made(method, setting, prompt, psnr, **values):
    """The record of a clip without its cost."""
    fixed = {"method": method, "variant": "", "setting": setting, "prompt": prompt, "steps": 50}
    fixed |= {"model": "a", "size": [64, 64, 5], "refused": None, "psnr": psnr, "seed": 0}
    return {**fixed, **values}


def priced_by_config(name):
    return {"step_config": step_digest(evaluate.shipped()[name]), "variant": evaluate.QUALITIES}


def test_tables_compare_on_the_same_clips():
    """Ours was made of the first clip alone, on which skipped steps are at 30 dB at its cost."""

    def clip(method, setting, prompt, cost, psnr, **values):
        return made(method, setting, prompt, psnr, cost=cost, **values)

    clips = [
        clip("dense", "", "x", 1.0, None),
        *(clip(SKIPS, "low", p, 0.2, v, calls={"dense": 10}) for p, v in (("x", 20), ("y", 5))),
        *(clip(SKIPS, "high", p, 0.4, v, calls={"dense": 20}) for p, v in (("x", 40), ("y", 9))),
        clip(OURS, "one", "x", 0.3, 33.5, calls={"dense": 2, "sparse": 1, "skip": 2}),
        *(clip("MagCache", "a", p, 1 / 2.25, v) for p, v in (("x", 31.0), ("y", 33.0))),
        clip("SeaCache", "a", "x", 0.6, None, refused="IndexError: no"),
    ]
    rows = {(row["method"], row["setting"]): row for row in evaluate.rows_of(clips)}
    assert list(rows) == [(SKIPS, "low"), (OURS, "one"), (SKIPS, "high"), ("MagCache", "a")]
    ours = rows[OURS, "one"]
    mag = rows["MagCache", "a"]
    assert (ours["ahead"], ours["worst ahead"]) == (pytest.approx(3.5), pytest.approx(3.5))
    assert (ours["D"], ours["S"], ours["skipped"], ours["clips"]) == (20, 10, 20, 1)
    assert (mag["psnr"], mag["worst"], mag["ahead"]) == (32.0, 31.0, 32.0 - 24.5)
    assert mag["worst ahead"] == 31 - 9


def test_the_report_prices_clips_and_compares_the_shipped_qualities():
    calls = {"dense": 2, "refresh": 8, "sparse": 20, "skip": 70}
    changes = {"change_l1": [0.1, 0.3], "change_l2": [0.2, 0.2]}
    skipped = priced_by_config("faithful") | {"variant": ""}
    clips = [
        made("dense", "", "x", None, work=1.0, **changes),
        *(
            made(
                SKIPS,
                f"{n} in full",
                "x",
                float(n),
                calls={"dense": n, "skip": 50 - n},
                **skipped,
            )
            for n in (6, 25)
        ),
        made(OURS, "balanced", "x", 33.0, calls=calls, **priced_by_config("balanced")),
        made(OURS, "chipmunk", "x", 39.0, calls=calls, **priced_by_config("chipmunk")),
        made("MagCache", "a", "x", 31.0, work=1 / 2.25),
        made("SeaCache", "a", "x", None, work=0.6, refused="IndexError: no"),
    ]
    text = evaluate.report(clips, evaluate.known_prices())
    assert "MagCache, dB (published for HunyuanVideo): 31.0 (34.5) at 2.25x, not measured (" in text
    assert "from step to step, over its size: L1 0.200 (0.100 to 0.300), L2 0.200 (0.200 to" in text
    assert "SeaCache, a refused: IndexError: no" in text
    head, _, ours, skips, *_ = text.partition("of clips made in all ways:\n\n")[2].splitlines()
    # What was published first is no column, and no setting of ours at another one's cost.
    assert re.fullmatch(r"\| method \| `balanced`, 6\.\dx \|", head)
    assert ours == f"| {OURS} | 33.0 (33.0) |"
    assert re.fullmatch(rf"\| {SKIPS} \| [78]\.\d \([78]\.\d\) \|", skips)
    whole = priced(clips, evaluate.known_prices())
    (axes,) = figures.photographs(whole).axes
    lines = {line.get_label(): line.get_xydata() for line in axes.lines}
    dense = evaluate.known_prices()[skipped["step_config"]].by_action[Action.DENSE]
    assert all(psnr == pytest.approx(min(50 / x / dense, 25), rel=1e-3) for x, psnr in lines[SKIPS])
    assert len(lines[SKIPS]) > 30
    hollow = [tuple(line.get_xdata()) for line in axes.lines if line.get_marker() == "D"]
    assert tuple(evaluate.PUBLISHED["MagCache"]) in hollow


@pytest.mark.parametrize("text", ["0", "9+", "9+x", "-1", "9 17"])
def test_lists_that_are_none(text):
    with pytest.raises(ValueError, match=r"--lists: expected numbers such as 20 or 9.17, got"):
        evaluate._counts(text)


def test_qualities_have_the_steps_of_the_model_that_their_time_is_counted_of():
    """At the size of the clips some would skip the steps that are sparse there."""
    shipped = evaluate.shipped()
    named = [way for way in evaluate.ways(50) if (way.variant, way.setting) in evaluate.NAMED]
    assert {way.setting: way.method for way in named} == {
        name: SKIPS if name == "faithful" else OURS for name in evaluate.COMPARED
    }
    for way in named:
        assert way.config == MODELS[PRICED_AS].decided(shipped[way.setting])


def test_ways_are_compared_and_merged(trained, tmp_path, capsys):
    case = "[26] in full|qualities, fast|fewer steps, 6 |MagCache.*(0.12|1)$"
    options = ["photographs", "--tiny", "--device", "cpu", "--case", f"{case}|MLP, held, fast"]
    options += ["--lists", "6", "2", "2+4", "--rules"]
    folders = {"checkpoint": trained / "checkpoint"}
    folders |= {name: tmp_path / name for name in ("out", "pictures")}
    options += [word for name, path in folders.items() for word in (f"--{name}", str(path))]
    first = ["--limit", "0", "--json", str(tmp_path / "first.json")]
    assert main([*options, *first]) == 0  # ends after the first clip
    assert len(read(*tmp_path.glob("out/*.json"))) == 1
    assert main([*options, "--json", str(tmp_path / "all.json")]) == 0
    clips = read(tmp_path / "all.json")
    assert len(clips) == 2 * 9
    by_method = {
        clip["method"]: clip for clip in clips if clip["setting"] not in ("2 in full", "fast")
    }
    assert by_method[OURS]["calls"] == {"dense": 2, "refresh": 2, "skip": 12, "sparse": 8}
    assert by_method[OURS]["sparse_layers"] == {"attention": 2, "mlp": 0}
    fewer = by_method["fewer steps"]
    assert (fewer["work"], fewer["config"]) == (0.5, "")
    held = next(clip for clip in clips if clip["variant"] == "MLP, held")
    named = next(clip for clip in clips if clip["variant"] == evaluate.QUALITIES)
    assert (held["mlp_time"], held["config"]) == (0, named["config"])
    changes = by_method["dense"]["change_l1"]
    assert len(changes) == 11
    assert all(0 < change < 1 for change in changes)
    text = capsys.readouterr().out
    assert "MagCache, dB (published" in text
    assert "L1 of MiniMax-H3: 0.173" in text
    row = next(line for line in text.splitlines() if "| 6 in full |" in line)
    share = 0.5 * evaluate.known_prices()[named["step_config"]].by_action[Action.DENSE]
    assert f"| {share:.3f} | {1 / share:.2f} | 6 | 0 | 0 | 6 |" in row
    picture = Image.open(tmp_path / "pictures" / "000-dense.jpg")
    assert picture.size == (4 * 64, 64)
    whole = priced(clips, evaluate.known_prices())
    fast = [clip["psnr"] for clip in clips if clip["variant"] == evaluate.QUALITIES]
    drawn = figures.frames(whole, folders["pictures"]).axes
    titles = [axes.get_title("left") for axes in drawn]
    assert titles[0] == "dense"
    assert re.fullmatch(r"chipsparse, 2\.[56]x: [\d.]+ dB", titles[1])
    assert re.fullmatch(r"MagCache, [\d.]+x: [\d.]+ dB", titles[2])
    assert any(f"{psnr:.1f} dB" in titles[1] for psnr in fast)
    first = figures.frames(whole, folders["pictures"], clip=0).axes[1].get_title("left")
    assert f"{fast[0]:.1f} dB" in first
    with pytest.raises(ValueError, match="out has no pictures of MagCache and of fast"):
        figures.frames(whole, folders["out"])
    assert main(options) == 0  # nothing is made twice
    assert " dense: " not in capsys.readouterr().out
    assert read(tmp_path / "all.json") == read(*sorted(tmp_path.glob("out/*.json")))


# Quality at equal cost.


def clip(method, setting, prompt="x", *, variant="", **values):
    fixed = {"method": method, "variant": variant, "setting": setting, "prompt": prompt}
    return fixed | {"refused": None, "psnr": 40.0, "cost": 0.5} | values


def some_clips():
    """Ours is 2 and 4 dB ahead of A's better variant at 40 %; B has the better worst clip."""
    return [
        clip("dense", "", psnr=None, cost=1.0),
        *(clip(OURS, "low", p, cost=0.3, psnr=v) for p, v in (("x", 30.0), ("y", 40.0))),
        *(clip(OURS, "high", p, cost=0.5, psnr=v) for p, v in (("x", 50.0), ("y", 60.0))),
        *(clip("A", "one", p, variant="poor", cost=0.4, psnr=10.0) for p in "xy"),
        clip("A", "one", cost=0.4, psnr=38.0),
        clip("A", "one", "y", cost=0.38, psnr=46.0),
        *(clip("B", "one", p, cost=0.4, psnr=v) for p, v in (("x", 39.0), ("y", 39.5))),
        clip("C", "one", cost=0.2, psnr=70.0),
        clip("C", "one", "y", cost=0.2, refused="IndexError: no"),
    ]


def test_methods_are_compared_in_their_best_variant_on_all_prompts():
    points = [(0.5, 50.0), (0.3, 30.0), (0.4, 45.0)]
    at = [at_share(points, share) for share in (0.3, 0.35, 0.45, 0.7, 0.29)]
    assert at == [30, pytest.approx(37.5), pytest.approx(47.5), 50, None]
    at_40 = qualities(some_clips(), 0.4)
    assert set(at_40) == {OURS, "A", "B"}
    assert (at_40["A"].variant, at_40["A"].psnrs) == ("", {"x": 38.0, "y": 46.0})
    ahead = lead(at_40)
    assert (ahead.mean, ahead.worst, ahead.interval) == (3.0, 2.0, (2.0, 4.0))
    assert lead({"A": at_40["A"]}) is None
    rows = {row["method"]: row for row in quality_rows(some_clips(), {"40%": 0.4})}
    assert (rows[OURS]["40%"], rows["C"]["40%"]) == ("45.0 (40.0)", "-")
    assert rows[curves.LEAD]["40%"] == "+3.0 (+2.0)"
    assert rows[curves.INTERVAL]["40%"] == "+2.0 to +4.0"


# The work of other methods.


STEPS = 12


def generate(pipe, steps):
    size = {"height": 64, "width": 64, "num_frames": 9, "max_sequence_length": 16}
    options = {"output_type": "latent", "num_inference_steps": steps, **size}
    return pipe(PROMPT, generator=torch.Generator().manual_seed(0), **options).frames


aten = torch.ops.aten
# Which argument of a matrix product is summed over, along its last axis.
SUMMED = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}


class WorkCounter(TorchDispatchMode):
    """Adds up the multiply-adds of one module's calls, where it is entered around them."""

    def __init__(self, module):
        super().__init__()
        self.multiply_adds = self.open_calls = 0
        module.register_forward_pre_hook(lambda *_: self.opened(1))
        module.register_forward_hook(lambda *_: self.opened(-1), always_call=True)

    def opened(self, number):
        self.open_calls += number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not self.open_calls:
            return result
        if (place := SUMMED.get(func.overloadpacket)) is not None:
            self.multiply_adds += result.numel() * args[place].shape[-1]
        elif func.overloadpacket is aten.convolution:
            self.multiply_adds += result.numel() * args[1][0].numel()
        elif "scaled_dot_product" in func.name():
            query, key, value = (tensor.shape for tensor in args[:3])
            self.multiply_adds += math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
        return result


@pytest.mark.parametrize(
    "name",
    [
        "MagCache, first 10%, at most 12 skipped, threshold 1",
        slow("TaylorSeer, whole steps, first 3, order 1, every 3"),
    ],
)
def test_the_work_of_caches_is_what_pytorch_computes(name):
    wan = tiny_wan_pipeline()
    dense = DenseWork.measured(wan.transformer, lambda: generate(wan, 2))
    (entry,) = (each for each in methods.rivals(STEPS) if str(each) == name)
    run = CacheRun(wan, STEPS, tuple(1 - 0.01 * i for i in range(STEPS)))
    made = Counter()
    counter = WorkCounter(wan.transformer)
    with methods.with_cache(run, entry, made), counter:
        generate(wan, STEPS)
    assert counter.multiply_adds < 0.95 * 2 * STEPS * dense.call
    assert dense.of_calls(made, 2 * STEPS) == pytest.approx(counter.multiply_adds, rel=1e-6)
    assert not any("forward" in vars(module) for module in made)


# Rules of sparse MLPs.


LAYER = mlp_rules.FeedForward(
    *(
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 4
        for seed, shape in enumerate(((64, 16), (64,), (16, 64), (16,)))
    ),
)


def inputs():
    """At a refresh and at a later step; tokens of a tile change by something in common."""
    draw = torch.Generator().manual_seed(9)
    before, own = torch.randn(2, 256, 16, generator=draw)
    common = torch.randn(2, 1, 16, generator=draw).expand(2, 128, 16).reshape(256, 16)
    return before, before + 0.1 * own + 0.3 * common


@pytest.mark.parametrize("rule", mlp_rules.RULES, ids=lambda rule: rule.name)
def test_a_rule_keeps_part_of_the_change_and_all_of_none(rule):
    before, after = inputs()
    assert torch.allclose(rule.refresh(LAYER, before).step(before), LAYER(before), atol=1e-5)
    missed = (rule.refresh(LAYER, before).step(after) - LAYER(after)).norm()
    share = missed / (LAYER(before) - LAYER(after)).norm()
    assert (0 <= rule.time < 1, 0 < share <= 1) == (True, True)
    assert (share == 1) == (rule.name == "held")


def test_rules_that_leave_nothing_out_are_the_layer():
    before, after = inputs()
    for kept in (
        mlp_rules.Neurons(LAYER, before, share=1.0),
        mlp_rules.Rows(LAYER, before, share=1.0),
        mlp_rules.Pooled(LAYER, before, group=(1, 1, 1)),
        mlp_rules.Pooled(LAYER, before, group=(2, 2, 2), share=1.0),
    ):
        assert torch.allclose(kept.step(after), LAYER(after), atol=1e-5)


def test_means_of_tokens_are_right_where_a_group_is_alike():
    before, _ = inputs()
    pooled = mlp_rules.Pooled(LAYER, before, group=(2, 2, 4))
    groups = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
    spread = pooled._spread(groups)
    assert torch.allclose(pooled._pooled(spread), groups, atol=1e-6)
    tiles = spread.view(2, 4, 4, 8, 16)  # frames, rows and columns of a tile
    assert torch.equal(tiles[0, :2, :2, :4], groups[0].expand(2, 2, 4, 16))
    assert torch.equal(tiles[0, 2:, :2, 4:], groups[5].expand(2, 2, 4, 16))
    alike = mlp_rules.Pooled(LAYER, spread, group=(2, 2, 4))
    moved = spread + pooled._spread(0.5 * groups.flip(0))
    assert torch.allclose(alike.step(moved), LAYER(moved), atol=1e-5)


def test_a_simulated_rule_computes_what_our_sparse_layers_do(folder):
    """The rule of our kernels gives their clip, and the pipeline is restored."""
    torch.manual_seed(0)
    made_model = Model.new({**FACTS, "transformer": TINY | {"num_layers": 2}})
    with torch.no_grad():
        for weights in made_model.transformer.parameters():
            if weights.ndim > 1 and not weights.any():
                weights.normal_(0, 0.2)
    pipe = made_model.pipeline(torch.float32, CPU)
    call = {"prompt": "photograph1", "height": 128, "width": 128, "num_frames": 13}
    call |= {"num_inference_steps": 6, "guidance_scale": 3.0, "output_type": "latent"}
    dense = SparsityConfig().override(
        {"mlp.density": "dense", "schedule.actions": ["dense", "refresh", "sparse"]},
    )
    sparse = dense.override({"mlp.density": 0.3, "backend": "reference"})

    def clip(config, rule=None):
        with chipsparse.enable(pipe, config), contextlib.ExitStack() as stack:
            if rule is not None:
                stack.enter_context(mlp_rules.simulated(rule, pipe, first=0))
            return pipe(**call, generator=torch.Generator().manual_seed(0)).frames

    rules = {rule.name: rule for rule in mlp_rules.RULES}
    by_rule = clip(dense, rules["30 % of the neurons"])
    by_kernels = clip(sparse)
    by_none = clip(dense)
    assert (by_rule - by_kernels).norm() < 1e-3 * (by_none - by_kernels).norm()
    assert not any("forward" in vars(block.ffn) for block in pipe.transformer.blocks)
    assert torch.equal(clip(dense), by_none)
