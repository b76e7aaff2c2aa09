"""The benchmark of equal work: what it counts, compares and makes of it, on random weights."""

import math
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import chipsparse
from benchmarks import curves, equal_work
from benchmarks.__main__ import main
from benchmarks.curves import OURS, SKIPS, at_share, lead, qualities, quality_rows
from benchmarks.records import read
from benchmarks.work import DenseWork
from chipsparse.experiments.diffusers_caches import CacheRun
from chipsparse.sparse.layers.attention import AttentionLayer
from chipsparse.sparse.layers.mlp import MLPLayer
from tests.pipelines.tiny_runs import WAN
from tests.tiny_models import PROMPT, tiny_flux_pipeline, tiny_wan_pipeline
from tests.variants import slow

SIZE = {"height": 64, "width": 64, "max_sequence_length": 16}
STEPS = 12


def generate(pipe, steps=6):
    frames = {"num_frames": 9} if hasattr(pipe, "video_processor") else {}
    options = {"output_type": "latent", "num_inference_steps": steps, **SIZE, **frames}
    made = pipe(PROMPT, generator=torch.Generator().manual_seed(0), **options)
    return made.frames if frames else made.images


aten = torch.ops.aten
# Which argument of a matrix product is summed over, along its last axis. The first two appear by
# these names only inside custom operations; elsewhere PyTorch takes them apart before.
SUMMED = {aten.linear: 0, aten.matmul: 0, aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}


class WorkCounter(TorchDispatchMode):
    """Adds up the multiply-adds of one module's calls, where it is entered around them.

    Layers run inside custom operations, of whose calls PyTorch shows nothing: see `watch`.
    """

    def __init__(self, module):
        super().__init__()
        self.multiply_adds = self.open_calls = 0
        module.register_forward_pre_hook(lambda *_: self.opened(1))
        module.register_forward_hook(lambda *_: self.opened(-1), always_call=True)

    def opened(self, number):
        self.open_calls += number

    def watch(self, monkeypatch, kind):
        own = kind.__call__

        def call(layer, *args, **options):
            with self:
                return own(layer, *args, **options)

        monkeypatch.setattr(kind, "__call__", call)

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
    ("make", "rule"),
    [(tiny_wan_pipeline, "difference"), slow(tiny_flux_pipeline, "block_means")],
)
def test_the_work_of_sparse_steps_is_what_pytorch_computes(make, rule, monkeypatch):
    pipe = make()
    dense = DenseWork.measured(pipe.transformer, lambda: generate(pipe, 2))
    actions = ("dense", "refresh", "sparse", "skip", "refresh", "sparse")
    mlp = {"mlp.density": "dense"} if rule == "difference" else {}
    changes = {"attention.delta_rule": rule, **mlp}
    config = WAN.SPARSE.override({**changes, "schedule.actions": actions})
    counter = WorkCounter(pipe.transformer)
    counter.watch(monkeypatch, AttentionLayer)
    counter.watch(monkeypatch, MLPLayer)
    with chipsparse.enable(pipe, config) as handle, counter:
        generate(pipe)
    assert dense.of_report(handle.report) == pytest.approx(counter.multiply_adds, rel=0.01)


@pytest.mark.parametrize(
    "name",
    [
        "MagCache, first 10%, at most 5 skipped, threshold 0.5",
        "PAB, timesteps 950 to 0, every 3",
        slow("TaylorSeer, whole steps, first 3, order 1, every 3"),
        slow("FasterCache, timesteps 950 to 0, every 3"),
    ],
)
def test_the_work_of_caches_is_what_pytorch_computes(name):
    wan = tiny_wan_pipeline()
    dense = DenseWork.measured(wan.transformer, lambda: generate(wan, 2))
    (entry,) = (each for each in equal_work.entries(STEPS, []) if str(each) == name)
    run = CacheRun(wan, STEPS, tuple(1 - 0.01 * i for i in range(STEPS)))
    made = Counter()
    counter = WorkCounter(wan.transformer)
    with equal_work.with_cache(run, entry, made, lambda f: f), counter:
        generate(wan, STEPS)
    assert counter.multiply_adds < 0.95 * 2 * STEPS * dense.call
    assert dense.of_calls(made, 2 * STEPS) == pytest.approx(counter.multiply_adds, rel=1e-6)
    assert not any("forward" in vars(module) for module in made)


def clip(method, setting, prompt="x", *, variant="", **values):
    fixed = {
        "op": "equal_work",
        "model": "tiny",
        "size": [64, 64, 9],
        "steps": 50,
        "method": method,
        "variant": variant,
        "setting": setting,
        "prompt": prompt,
        "seed": 0,
        "refused": None,
        "psnr": 40.0,
        "work": 0.5,
        "seconds": 1.0,
        "dense_seconds": 2.0,
        "device": "NVIDIA H200",
    }
    return fixed | values


def some_clips():
    """Ours is 2 and 4 dB ahead of A's better variant at 40 %; B has the better worst clip."""
    return [
        clip("dense", "", psnr=None, work=1.0),
        *(clip(OURS, "low", p, work=0.3, psnr=v) for p, v in (("x", 30.0), ("y", 40.0))),
        *(clip(OURS, "high", p, work=0.5, psnr=v) for p, v in (("x", 50.0), ("y", 60.0))),
        *(clip("A", "one", p, variant="poor", work=0.4, psnr=10.0) for p in "xy"),
        clip("A", "one", work=0.4, psnr=38.0),
        clip("A", "one", "y", work=0.38, psnr=46.0),
        *(clip("B", "one", p, work=0.4, psnr=v) for p, v in (("x", 39.0), ("y", 39.5))),
        clip("C", "one", work=0.2, psnr=70.0),
        clip("C", "one", "y", work=0.2, refused="IndexError: no"),
    ]


def test_methods_are_compared_in_their_best_variant_on_all_prompts():
    points = [(0.5, 50.0), (0.3, 30.0), (0.4, 45.0)]
    at = [at_share(points, share) for share in (0.3, 0.35, 0.45, 0.7, 0.29)]
    assert at == [30, pytest.approx(37.5), pytest.approx(47.5), 50, None]
    at_40 = qualities(some_clips(), "work", 0.4)
    assert set(at_40) == {OURS, "A", "B"}
    assert (at_40["A"].variant, at_40["A"].psnrs) == ("", {"x": 38.0, "y": 46.0})
    ahead = lead(at_40)
    assert (ahead.mean, ahead.worst, ahead.interval) == (3.0, 2.0, (2.0, 4.0))
    assert lead({"A": at_40["A"]}) is None
    rows = {row["method"]: row for row in quality_rows(some_clips(), "work")}
    assert (rows[OURS]["40%"], rows["C"]["40%"]) == ("45.0 (40.0)", "-")
    assert rows[curves.LEAD]["40%"] == "+3.0 (+2.0)"
    assert rows[curves.INTERVAL]["40%"] == "+2.0 to +4.0"


PROFILE = """
model_class: WanTransformer3DModel
generation: {height: 64, width: 64, num_frames: 9, num_inference_steps: 10, guidance_scale: 4.0,
  max_sequence_length: 16}
sparsity:
  attention: {density: 0.25}
  mlp: {density: dense}
  schedule: {listed: {full: [0, 1, 4], sparse: [7]}}
  block_size: 16
  tile: [2, 2, 4]
"""
FEW = "chipsparse|5 steps|MagCache, first 10%, at most 5 skipped, threshold (0.12|1)$"


def test_ways_are_compared_on_prompts(tmp_path):
    tiny_wan_pipeline().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "chipsparse.yaml").write_text(PROFILE)
    (tmp_path / "ours.yaml").write_text(PROFILE)
    (tmp_path / "skips.yaml").write_text(PROFILE.replace("sparse: [7]", "sparse: []"))
    (tmp_path / "prompts.txt").write_text(f"{PROMPT}\na blue square\n")
    options = ["equal-work", "--device", "cpu", "--case", FEW]
    files = {"model": "model", "prompts": "prompts.txt", "store": "s.json"}
    for name, file in files.items():
        options += [f"--{name}", str(tmp_path / file)]
    options += ["--profiles", *(str(tmp_path / f"{name}.yaml") for name in ("ours", "skips"))]
    options += ["--json", str(tmp_path / "all.json")]
    assert main([*options, "--first", "1", "--count", "1"]) == 0
    made = read(tmp_path / "all.json")
    by_name = {(record["method"], record["setting"]): record for record in made}
    assert 0 < by_name["MagCache", "threshold 1"]["work"] < 1
    assert by_name["dense", ""]["psnr"] is None
    assert by_name["fewer steps", "5 steps"]["work"] == 0.5
    assert by_name[SKIPS, "skips"]["work"] == pytest.approx(0.3)
    ours = by_name[OURS, "ours"]
    assert 0.3 < ours["work"] < 0.6
    assert ours["calls"] == {"dense": 4, "refresh": 2, "skip": 12, "sparse": 2}
    assert ours["refused"] is None
    assert ours["psnr"] > by_name[SKIPS, "skips"]["psnr"] > 0
    again = [*options[:-1], str(tmp_path / "again.json"), "--first", "1", "--count", "1"]
    assert main(again) == 0  # nothing is made twice
    assert read(tmp_path / "all.json") == read(tmp_path / "again.json")
