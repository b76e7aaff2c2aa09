"""The benchmark of moving photographs: data, drawing, model, training and tables, all tiny."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.__main__ import main
from benchmarks.curves import OURS, SKIPS
from benchmarks.moving_photographs import evaluate, model, photographs, train
from benchmarks.moving_photographs.clips import SPEEDS, Layer, Photographs, Scene, draw
from benchmarks.moving_photographs.model import BLOCK, TINY, LinearLatents, Model
from benchmarks.records import read
from docs.tables import figures

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
    ("shape", "area"), [(0, math.pi), (1, 4 * 0.9**2), (2, 2 * (1.4 * 0.85) ** 2)]
)
def test_a_cover_has_its_area_and_moves_its_way(images, shape, area):
    still = Scene((layer(), layer(photograph=3, shape=shape)))  # white over black
    moving = Scene((layer(), layer(photograph=3, shape=shape, drift=0)))
    size, radius = (96, 96, 64), 0.2 * 96
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


def test_tables_compare_on_the_same_clips():
    """Ours was made of the first clip alone, on which skipped steps are at 30 dB at its cost."""

    def clip(method, setting, prompt, cost, psnr, **values):
        fixed = {"method": method, "variant": "", "setting": setting, "prompt": prompt, "steps": 50}
        fixed |= {"model": "a", "size": [64, 64, 5], "refused": None, "cost": cost, "psnr": psnr}
        return {**fixed, **values}

    changes = {"change_l1": [0.1, 0.3], "change_l2": [0.2, 0.2]}
    clips = [
        clip("dense", "", "x", 1.0, None, **changes),
        *(clip(SKIPS, "low", p, 0.2, v, calls={"dense": 10}) for p, v in (("x", 20), ("y", 5))),
        *(clip(SKIPS, "high", p, 0.4, v, calls={"dense": 20}) for p, v in (("x", 40), ("y", 9))),
        clip(OURS, "one", "x", 0.3, 33.5, calls={"dense": 2, "sparse": 1, "skip": 2}),
        *(clip("MagCache", "a", p, 1 / 2.25, v) for p, v in (("x", 31.0), ("y", 33.0))),
        clip("SeaCache", "a", "x", 0.6, None, refused="IndexError: no"),
    ]
    rows = {(row["method"], row["setting"]): row for row in evaluate.rows_of(clips)}
    assert list(rows) == [(SKIPS, "low"), (OURS, "one"), (SKIPS, "high"), ("MagCache", "a")]
    ours, mag = rows[OURS, "one"], rows["MagCache", "a"]
    assert (ours["ahead"], ours["worst ahead"]) == (pytest.approx(3.5), pytest.approx(3.5))
    assert (ours["D"], ours["S"], ours["skipped"], ours["clips"]) == (20, 10, 20, 1)
    assert (mag["psnr"], mag["worst"], mag["ahead"]) == (32.0, 31.0, 32.0 - 24.5)
    assert mag["worst ahead"] == 31 - 9
    text = evaluate.report(clips)
    assert "MagCache, dB (published for HunyuanVideo): 31.0 (34.5) at 2.25x, not measured (" in text
    assert "from step to step, over its size: L1 0.200 (0.100 to 0.300), L2 0.200 (0.200 to" in text
    assert "SeaCache, a refused: IndexError: no" in text
    (axes,) = figures.photographs(clips).axes
    lines = {line.get_label(): line.get_xydata() for line in axes.lines}
    assert all(psnr == pytest.approx(100 * min(1 / x, 0.4)) for x, psnr in lines[SKIPS])
    assert len(lines[SKIPS]) > 30
    hollow = [tuple(line.get_xdata()) for line in axes.lines if line.get_marker() == "D"]
    assert tuple(evaluate.PUBLISHED["MagCache"]) in hollow


def test_costs_are_those_of_a_large_model():
    """Those of the rows of benchmarks/notes/moving_photographs.md."""
    calls = {"dense": 8, "refresh": 4, "sparse": 4, "skip": 34}
    assert evaluate.cost(calls, 0.2) == pytest.approx(0.274, abs=5e-4)
    assert evaluate.cost({"dense": 1, "refresh": 5, "sparse": 44}, 0.1) == pytest.approx(0.310)
    assert evaluate.cost({"dense": 12, "skip": 38}, 0.1) == 0.24
    attention = {"attention.density": 0.2, "attention.delta_rule": "difference"}
    config = evaluate.BASE.override(attention)
    assert evaluate.density(config, 12) == pytest.approx(0.2)
    config = config.override({"layers": ({"layers": "10-11", "attention": "dense"},)})
    assert evaluate.density(config, 12) == pytest.approx((9 * 0.2 + 2) / 11)
    of_means = config.override({"attention.delta_rule": "means"})
    assert evaluate.density(of_means, 12) == pytest.approx((9 * 0.2 + 2) / 11 + 0.022)


def test_ways_are_compared_and_merged(trained, tmp_path, capsys):
    case = "sparse, [26] in full|means, 2 in full, 4 sparse|MagCache.*(0.12|1)$|fewer steps, 6 "
    options = ["photographs", "--tiny", "--device", "cpu", "--case", case]
    folders = {"checkpoint": trained / "checkpoint"}
    folders |= {name: tmp_path / name for name in ("out", "pictures")}
    options += [word for name, path in folders.items() for word in (f"--{name}", str(path))]
    first = ["--limit", "0", "--json", str(tmp_path / "first.json")]
    assert main([*options, *first]) == 0  # ends after the first clip
    assert len(read(*tmp_path.glob("out/*.json"))) == 1
    assert main([*options, "--json", str(tmp_path / "all.json")]) == 0
    made = read(tmp_path / "all.json")
    assert len(made) == 2 * 7
    by_method = {clip["method"]: clip for clip in made if clip["setting"] != "2 in full"}
    assert by_method[SKIPS]["cost"] == by_method["fewer steps"]["cost"] == 0.5
    assert by_method[OURS]["calls"] == {"dense": 2, "refresh": 2, "skip": 12, "sparse": 8}
    assert by_method[OURS]["cost"] == pytest.approx((1 + 1.14 + 4 * 0.2198) / 12, rel=1e-4)
    assert by_method["MagCache"]["cost"] == by_method["MagCache"]["work"] < 1
    changes = by_method["dense"]["change_l1"]
    assert len(changes) == 11
    assert all(0 < change < 1 for change in changes)
    text = capsys.readouterr().out
    assert "MagCache, dB (published" in text
    assert "L1 of MiniMax-H3: 0.173" in text
    row = next(line for line in text.splitlines() if "| 6 in full |" in line)
    assert "| 0.500 | 2.00 | 6 | 0 | 0 | 6 |" in row
    picture = Image.open(tmp_path / "pictures" / "000-dense.jpg")
    assert picture.size == (4 * 64, 64)
    psnr = {(clip["setting"], clip["seed"]): clip["psnr"] for clip in made}
    seed = max((0, 1), key=lambda seed: psnr["2 in full", seed] - psnr["threshold 1", seed])
    ours, mag = (f"{psnr[way, seed]:.1f} dB" for way in ("2 in full", "threshold 1"))
    drawn = figures.frames(made, folders["pictures"]).axes
    titles = ["dense", f"chipsparse, 6.0x: {ours}", f"MagCache, 4.4x: {mag}"]
    assert [axes.get_title("left") for axes in drawn] == titles
    with pytest.raises(ValueError, match="out has no pictures of MagCache and of chipsparse"):
        figures.frames(made, folders["out"])
    assert main(options) == 0  # nothing is made twice
    assert " dense: " not in capsys.readouterr().out
    assert read(tmp_path / "all.json") == read(*sorted(tmp_path.glob("out/*.json")))
