"""`chipsparse explain`: its numbers against real runs and against sums by hand, and its tables."""

import json
import math
import re

import pytest
import torch
from diffusers import DiffusionPipeline

import chipsparse
from chipsparse.cli.explain import explanation
from chipsparse.cli.explain.explanation import no_faster
from chipsparse.cli.explain.record import Quality
from chipsparse.profiles.measured import measured_of
from chipsparse.profiles.profile import load_profile
from chipsparse.sparse.cache.tensors import PLACED
from chipsparse.sparse.cost_model.layer_times import Rates
from tests.cli.conftest import command
from tests.tiny_models import PROMPT, tiny_flux_pipeline, tiny_wan_pipeline

GIB = 1 << 30
WAN = {"num_attention_heads": 40, "attention_head_dim": 128, "num_layers": 40, "ffn_dim": 13824}
WAN |= {"in_channels": 16, "out_channels": 16, "text_dim": 4096, "rope_max_seq_len": 1024}
KL = {"latent_channels": 16, "block_out_channels": [128, 256, 512, 512]}
# The pipeline, the transformer's class and config, and the VAE's.
MODELS = {
    "wan": ("WanPipeline", "WanTransformer3DModel", WAN, ("KLWan", {})),
    "flux": ("FluxPipeline", "FluxTransformer2DModel", {"guidance_embeds": True}, ("KL", KL)),
}
SIZE = ("--height", "720", "--width", "1280", "--frames", "81")
LARGE = (*SIZE, "--quality", "chipmunk")
MLP = "mlp: {density: 0.3}"
PROFILE = "model_class: WanTransformer3DModel\nsparsity: %s\n"


@pytest.fixture
def folder(workdir):
    """Writes a model folder that has configs and no weights."""

    def write(name="wan", *, pipeline=None, transformer=None, own=None, vae=None, **index):
        pipeline_class, transformer_class, config, usual_vae = MODELS[name]
        vae_class, vae_config = vae or usual_vae
        configs = {"transformer": config if own is None else own, "vae": vae_config}
        classes = {
            "transformer": ["diffusers", transformer or transformer_class],
            "vae": ["diffusers", f"Autoencoder{vae_class}"],
            "text_encoder": ["transformers", "UMT5EncoderModel"],
            **index,
        }
        for component in classes:
            (workdir / name / component).mkdir(parents=True, exist_ok=True)
            values = configs.get(component.removesuffix("_2"))
            if values is not None:
                (workdir / name / component / "config.json").write_text(json.dumps(values))
        content = {"_class_name": pipeline or pipeline_class, **classes}
        (workdir / name / "model_index.json").write_text(json.dumps(content))
        return name

    return write


@pytest.fixture
def explain(workdir, monkeypatch):
    """Runs `chipsparse explain` on a machine without a GPU; its tables fit a terminal of 80."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments):
        ran = command("explain", *arguments)
        if "--json" not in arguments:
            assert max(len(line.rstrip()) for line in ran.stdout.splitlines() or [""]) <= 80
            assert "…" not in ran.stdout
        return ran

    return run


@pytest.fixture
def explained(explain):
    """What `--json` says."""
    return lambda *arguments: explain(*arguments, "--json").json()


@pytest.fixture
def wan(explained, folder):
    """What `--json` says of Wan 2.1 14B at 720p, with its published schedule."""
    folder("wan")
    return lambda *arguments: explained("--model", "wan", *LARGE, *arguments)


def total(result, place):
    """Bytes of all caches that are in a place."""
    return sum(sizes[place] for sizes in result["caches"].values())


REAL = """\
model_class: {}
generation: {{{}: {}, height: 32, width: 64, num_inference_steps: 4, max_sequence_length: 16}}
sparsity:
  mlp: {{density: 0.3}}
  block_size: 16
  schedule: {{periodic: {{warmup: 2}}}}
  layers: [{{index: 0, attention: dense, mlp: dense}}]
  tile: [1, 4, 4]
"""


@pytest.mark.parametrize(
    ("make", "guidance", "sparse"),
    [
        (tiny_wan_pipeline, "guidance_scale", {"block": 2}),
        (tiny_flux_pipeline, "true_cfg_scale", {"double": 1, "single": 3}),
    ],
)
def test_caches_are_as_large_as_in_a_real_generation(explained, workdir, make, guidance, sparse):
    pipe = make()
    sizes = []
    pipe.save_pretrained("model")
    text = REAL.format(type(pipe.transformer).__name__, guidance, 3.0)
    (workdir / "model/chipsparse.yaml").write_text(text)

    def look(_pipe, _step, _t, tensors):
        sizes.append({kept.field: 0 for kept in PLACED})
        caches = handle._runners[0].sparse.session._caches
        for key in caches:
            for kept in PLACED:
                tensor = getattr(getattr(caches[key], kept.part), kept.field)
                if tensor is not None:
                    sizes[-1][kept.field] += tensor.untyped_storage().nbytes()
        return tensors

    profile = load_profile("model/chipsparse.yaml")
    frames = {"num_frames": 5} if make is tiny_wan_pipeline else {}
    call = {"height": 32, "width": 64, "num_inference_steps": 4, "max_sequence_length": 16}
    call |= {guidance: 3.0, "negative_prompt": "", "output_type": "latent", **frames}
    with chipsparse.enable(pipe, profile.sparsity) as handle:
        pipe(PROMPT, callback_on_step_end=look, **call)
    words = ("--frames", 5) if frames else ()
    result = explained("--model", "model", "--device", "cpu", *words)
    assert result["branches"] == 2
    planned = {kind: size["total"] for kind, size in result["caches"].items()}
    assert planned == {kind: size for kind, size in sizes[1].items() if size}
    assert planned == {kind: size["device"] for kind, size in result["caches"].items()}
    # Each layer also has a count of four bytes.
    assert 0 < handle.report.cache_bytes - sum(planned.values()) <= 4 * 10
    # Weights are counted as they are loaded: some modules keep float32.
    loaded = DiffusionPipeline.from_pretrained("model", dtype=torch.bfloat16)
    weights = explained("--model", "model", "--dtype", "bfloat16")["weights"]
    assert {"transformer", "vae", "text_encoder"} <= weights.keys()
    for name, nbytes in weights.items():
        assert nbytes == sum(tensor.nbytes for tensor in getattr(loaded, name).parameters())
    mlps = {part["kind"]: part["sparse"] for part in result["layers"] if part["part"] == "mlp"}
    assert mlps == sparse


def test_a_large_model_without_weights(wan):
    result = wan()
    assert (result["device"], result["device_here"], result["dtype"]) == ("cuda", False, "bfloat16")
    assert (result["grids"], result["tokens"], result["text_tokens"]) == ([[21, 45, 80]], 75600, 0)
    for part, columns, kept in zip(result["layers"], (75600, 13824), (7560, 4147), strict=True):
        assert (part["sparse"], part["dense"]) == (40, {})
        assert (part["blocks"], part["block_size"], part["total"]) == (591, 128, columns)
        assert part["kept"] == {str(kept): list(range(40))}
    assert result["branches"] == 2
    assert result["counts"] == {"dense": 7, "refresh": 5, "sparse": 38}
    assert result["schedule"].startswith("5 dense, 1 refresh, 9 sparse, ")
    one = {kind: sizes["layer"]["block"] for kind, sizes in result["caches"].items()}
    assert one == {
        "mean": 591 * 13824 * 4,
        "output": 75600 * 5120 * 2,
        "activation": 75600 * 13824 * 2,
        "lse": 40 * 75600 * 4,
        "columns": 40 * 591 * 9450,
        "residual": 75600 * 5120 * 2,
    }
    for kind, sizes in result["caches"].items():
        assert sizes["total"] == sizes["device"] == 2 * 40 * one[kind]
        assert sizes["host"] == sizes["slots"] == 0
    assert result["weights"]["transformer"] > 14.2e9 * 2
    assert "give --vram to see what fits" in result["notes"][0]
    assert result["notes"][1] == "the weights of text_encoder are not counted: no config.json there"


def test_what_fits_nowhere_runs_dense(wan, explain):
    budgets = ("--vram", "48G", "--ram", "64G")
    result = wan(*budgets)
    attention, mlp = result["layers"]
    # With residuals in FP8 all attention fits, and with activations in FP8 more of the MLPs do.
    assert result["memory"]["precision"] == "fp8"
    assert (attention["sparse"], attention["dense"]) == (40, {})
    assert 0 < mlp["sparse"] < 10
    reason = "its caches do not fit into the memory budgets"
    assert mlp["dense"] == {reason: 40 - mlp["sparse"]}
    one = {kind: sizes["layer"]["block"] for kind, sizes in result["caches"].items()}
    assert (one["residual"], one["residual_scale"]) == (75600 * 5120, 40 * 75600 * 4)
    assert (one["activation"], one["token_scale"]) == (75600 * 13824, 75600 * 4)
    assert total(result, "total") < result["memory"]["caches_wanted"]
    assert total(result, "host") <= 64 * GIB
    table = explain("--model", "wan", *LARGE, *budgets).fine().stdout
    for heading in ("model", "tokens", "schedule", "layers", "cache", "weights", "GPU", "quality"):
        assert re.search(rf"^ {heading}\b", table, re.MULTILINE), heading
    printed = " ".join(table.split())
    assert re.search(r"quality .* fast 7 \d+ \d+ \d+% \d.*\d+\.\d\dx", printed)
    for text in (
        "block attention 40/40 591x128 7,560 of 75,600 10.0% 23 ms 200 ms",
        f"dense block MLP, {40 - mlp['sparse']} layers: {reason}",
        "caches in FP8 (e4m3)",
        "of 48.00 GiB for weights, work, caches and slots",
        "a sparse step brings",
        "one NVIDIA H200 (not measured here)",
    ):
        assert text in printed


COGVIDEO = ("CogVideoXPipeline", "CogVideoXTransformer3DModel", ("KLCogVideoX", {}))
SD3 = ("StableDiffusion3Pipeline", "SD3Transformer2DModel")
SD3 = (*SD3, ("KL", {"block_out_channels": [128, 512, 512]}))
MOCHI = ("MochiPipeline", "MochiTransformer3DModel", ("KLMochi", {}))
DUAL = {"dual_attention_layers": list(range(13)), "num_layers": 24}


@pytest.mark.parametrize(
    ("classes", "own", "grid", "text", "layers"),
    [
        # What the pipelines make where nobody names a size, as their checkpoints are configured.
        (COGVIDEO, {}, [13, 30, 45], 226, [30]),
        (MOCHI, {}, [4, 30, 53], 256, [48]),
        (SD3, DUAL, [1, 64, 64], 77 + 256, [13, 11]),  # of CLIP and of T5
        ((), None, [1, 64, 64], 512, [19, 38]),
    ],
)
def test_what_pipelines_make_by_default(explained, folder, classes, own, grid, text, layers):
    folder("flux", own=own, **dict(zip(("pipeline", "transformer", "vae"), classes, strict=False)))
    result = explained("--model", "flux", "--steps", 20, "--quality", "chipmunk")
    assert (result["grids"], result["tokens"] - math.prod(grid)) == ([grid], text)
    assert result["text_tokens"] == text
    counts = [part["sparse"] + sum(part["dense"].values()) for part in result["layers"]]
    assert counts[::2] == counts[1::2] == layers
    # Guidance: with CogVideoX and SD3 in the batch; Mochi's prompts differ in length.
    assert result["branches"] == (2 if classes is MOCHI else 1)
    if not classes:
        assert result["pixels"] == [1024, 1024]
        sizes = {"double": 4096 * 12288 * 2, "single": 4608 * 12288 * 2}
        assert result["caches"]["activation"]["layer"] == sizes


@pytest.mark.parametrize(
    ("sparsity", "part", "reason", "layers"),
    [
        ("{mlp: {density: dense}}", 1, "mlp.density is dense in the profile", 40),
        (f"{{{MLP}, layers: [{{index: 0-1, mlp: dense}}]}}", 1, "layers names it dense", 2),
        (f"{{{MLP}, schedule: {{actions: [dense]}}}}", 1, "no step of the schedule is sparse", 40),
        # What would be slower sparse.
        ("{}", 0, "by the rates of one NVIDIA H200 a sparse step of it may take up to 0.", 40),
    ],
)
def test_why_layers_run_dense(explained, folder, workdir, sparsity, part, reason, layers):
    (workdir / "mine.yaml").write_text(PROFILE % sparsity)
    small = ("--height", "64", "--width", "64", "--frames", "1") if sparsity == "{}" else ()
    result = explained("--model", folder(), "--config", "mine.yaml", *small)
    row = result["layers"][part]
    ((why, count),) = row["dense"].items()
    assert (row["sparse"], count, why.startswith(reason)) == (40 - layers, layers, True)
    if small:
        assert row["step"]["dense"] < row["step"]["sparse"] < row["step"]["most"] < 1e-3
    if small or "dense]" in sparsity:
        assert result["caches"] == {}


def test_a_schedule_that_lists_its_full_steps(explained, explain, folder, workdir):
    schedule = "{schedule: {spread: {full: 0.26, sparse: 0.1}, forecast: 0.5}}"
    (workdir / "mine.yaml").write_text(PROFILE % schedule)
    small = ("--model", folder(), "--config", "mine.yaml", "--steps", "50")
    result = explained(*small)
    assert result["schedule"].startswith("13 of 50 steps in full, close at the start, 5 between")
    assert result["counts"] == {"dense": 8, "refresh": 5, "skip": 32, "sparse": 5}
    assert result["full_steps"] == [0, 1, 2, 3, 5, 7, 10, 14, 19, 26, 34, 42, 47]
    printed = " ".join(explain(*small).stdout.split())
    assert "in full: 0-3, 5, 7, 10, 14, 19, 26, 34, 42, 47" in printed


def test_what_was_measured_is_of_the_shipped_profile(explained):
    result = explained()
    assert (result["measured_speed"], result["measured_quality"]) == ("nothing", "nothing")


def test_qualities_stand_side_by_side(explained, explain, folder):
    arguments = ("--model", folder(), *SIZE)
    result = explained(*arguments)
    rows = result["qualities"]
    estimate = result["estimate"]
    assert result["quality"] == "balanced"
    assert list(rows) == ["faithful", "balanced", "fast", "draft", "chipmunk"]
    assert rows["balanced"]["counts"] == result["counts"]
    assert rows["balanced"]["speedup_run"] == estimate["stock_run"] / estimate["run"]
    published = {"model": "WanTransformer3DModel", "speedup": 3.0, "low": 21, "high": 25}
    assert rows["balanced"]["published"] == published
    works, gains = (
        [rows[name][key] for name in ("faithful", "balanced", "fast", "draft")]
        for key in ("work", "speedup_run")
    )
    assert (works, gains) == (sorted(works, reverse=True), sorted(gains))
    # A dense step is 1, a skipped one nothing, and a sparse one more than the columns it keeps.
    assert (6 + 0.2 * rows["fast"]["counts"]["sparse"]) / 50 < works[2] < works[0] < 1
    # Where gaps are short nothing is sparse.
    assert rows["faithful"]["counts"] == {"dense": 20, "skip": 30}
    assert result["measured_quality"] == measured_of("WanTransformer3DModel").quality_text
    assert "Wan 14B 720p" in result["measured_speed"]
    assert "quality measured on" in explain(*arguments).stdout
    alone = explained(*arguments, "--quality", "faithful")
    assert (alone["qualities"], alone["counts"]) == (rows, rows["faithful"]["counts"])
    assert all(part["kept"] == {} for part in alone["layers"])


def test_small_images_say_why_they_skip(explained, explain, folder):
    arguments = ("--model", folder("flux"), "--height", "1024", "--width", "1024")
    arguments += ("--steps", "50")
    result = explained(*arguments)
    assert result["counts"] == {"dense": 16, "skip": 34}
    (said,) = [note for note in result["notes"] if note.startswith("no step is sparse")]
    assert "at this size one takes" in said
    assert "no step is sparse" in " ".join(explain(*arguments).stdout.split())
    large = explained(*arguments, "--height", "4096", "--width", "4096")
    assert large["counts"]["sparse"] == 13
    assert not any(note.startswith("no step is sparse") for note in large["notes"])


def test_a_gpu_that_is_here_is_asked_and_measured(wan, monkeypatch):
    rates = Rates(device="Some GPU", measured=True, attention=100e12)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _: 0)
    monkeypatch.setattr("chipsparse.sparse.cache.memory_plan.device_free_bytes", lambda _: 60 * GIB)
    monkeypatch.setattr(explanation, "measure_rates", lambda _: rates)
    monkeypatch.setattr(explanation.layer_times, "known_rates", lambda *_: None)
    result = wan("--ram", "1T")
    assert result["layers"][0]["step"] is None
    assert 55 * GIB < result["memory"]["device"] <= 60 * GIB
    assert result["device_here"] is True
    assert result["estimate"]["rates"]["device"] == "Some GPU"
    assert wan("--ram", "1T", "--vram", "48G")["memory"]["device"] <= 48 * GIB


def test_what_is_not_known_is_noted(explained, folder):
    for arguments, reason in [
        (("--model", folder(), "--dtype", "float32"), "those of 16-bit types"),
        ((), "a layer this small"),
        (("--device", "cpu"), "the rates of this CPU are not known"),
    ]:
        result = explained(*arguments)
        assert result["estimate"] is None
        assert any(reason in note for note in result["notes"])
    result = explained("--model", folder(transformer_2=["diffusers", "WanTransformer3DModel"]))
    assert result["weights"]["transformer_2"] == result["weights"]["transformer"]
    assert any("second expert" in note for note in result["notes"])


ALLEGRO = {"pipeline": "AllegroPipeline", "transformer": "AllegroTransformer3DModel", "own": {}}


@pytest.mark.parametrize(
    ("model", "arguments", "sentence"),
    [
        ({}, "--vram 37G --ram 64M", "not one layer's caches fit: all of them need 291.07 GiB"),
        ({}, "--vram 32G", "--vram 32.00 GiB does not hold the model and its work (weights 26.9"),
        ({}, "--gpus 2 --guidance-parallel 2 --guidance-scale 1", "--guidance-parallel 2: this ge"),
        (ALLEGRO, "", "the transformer of wan is a AllegroTransformer3DModel, which chipsparse"),
    ],
)
def test_mistakes(explain, folder, model, arguments, sentence):
    words = ["--model", folder(**model), *LARGE]
    if model is ALLEGRO:
        words = ["--model", "wan", "--config", "mine.yaml"]
        with open("mine.yaml", "w") as file:
            file.write("model_class: AllegroTransformer3DModel\n")
    ran = explain(*words, *arguments.split())
    assert ran.stderr.count("\n") == 1
    assert ran.sentence().startswith(sentence)


# Several GPUs. What they send each other: see the tests of `cost_model.exchanges`.


def test_what_each_of_two_gpus_has(wan, explain):
    result = wan("--gpus", 2)
    alone = wan()
    explain("--model", "wan", *LARGE, "--gpus", 4, "--guidance-parallel", 2).fine()
    assert alone["shared"] is None
    # 591 blocks of 128 tokens, the last one short; 20 of the 40 heads each.
    last, first = result["shared"]["ranks"]  # the first rank has less
    assert (last["tokens"], first["tokens"]) == (295 * 128, 75600 - 295 * 128)
    assert (first["heads"], last["heads"]) == (20, 20)
    one = 20 * 75600 * 4 + 20 * 591 * 9450 + 75600 * 2560 * 2  # of attention
    one += 296 * 13824 * 4 + 37840 * 5120 * 2 + 37840 * 13824 * 2
    assert first["cache_bytes"] == 2 * 40 * one == total(result, "device")
    times = result["estimate"]
    single = alone["estimate"]
    assert times["exchanging"]["skip"] == first["sent_bytes"]["skip"] == 0
    sparse = times["computing"] + times["exchanging"]["sparse"]
    assert times["steps"]["sparse"] == pytest.approx(sparse)
    for action in ("dense", "refresh", "sparse"):
        own = single["steps"][action] / (2 * times["steps"][action])
        assert result["shared"]["efficiency"][action] == pytest.approx(own)
        assert 0.8 < own < 1
    assert result["shared"]["efficiency_run"] == pytest.approx(single["run"] / (2 * times["run"]))
    ranks = wan("--gpus", 2, "--guidance-parallel", 2)["shared"]["ranks"]
    sizes = [(rank["branch"], rank["tokens"], rank["cache_bytes"]) for rank in ranks]
    assert sizes == [(branch, 75600, total(alone, "device") // 2) for branch in (0, 1)]
    four = wan("--gpus", 4, "--guidance-parallel", 2)["shared"]["ranks"]
    assert [(rank["branch"], rank["heads"]) for rank in four] == [(0, 20)] * 2 + [(1, 20)] * 2


def test_host_memory_is_shared_and_caches_that_fit_on_more_gpus_pay(wan, explained):
    budgets = ("--vram", "48G", "--ram", "64G")
    alone = wan(*budgets)
    four = wan(*budgets, "--gpus", 4)
    assert total(four, "host") <= 16 * GIB
    kept = [sum(part["sparse"] for part in result["layers"]) for result in (alone, four)]
    assert kept[0] < kept[1]
    free = wan("--gpus", 4)["shared"]["efficiency_run"]
    assert four["shared"]["efficiency_run"] > free
    on_cpu = explained("--device", "cpu", "--gpus", 2)["shared"]
    assert on_cpu["efficiency"] is None
    assert on_cpu["ranks"][0]["sent_bytes"]["sparse"] > 0


def quality(work, speedup=None, *, skip=10, sparse=0):
    counts = {"dense": 5, "skip": skip, "sparse": sparse}
    return Quality(counts=counts, work=work, cache_bytes=0, speedup_run=speedup, published=None)


@pytest.mark.parametrize(
    ("qualities", "said"),
    [
        ({"faithful": quality(0.4, skip=30), "balanced": quality(0.44, sparse=13)}, True),
        ({"faithful": quality(0.4), "balanced": quality(0.3, sparse=13)}, False),
        ({"faithful": quality(0.4, 2.0), "balanced": quality(0.5, 2.5, sparse=13)}, False),
        ({"faithful": quality(0.4, 2.0, skip=30), "balanced": quality(0.3, 2.0, sparse=13)}, True),
        ({"draft": quality(0.2), "chipmunk": quality(0.5)}, False),
    ],
)
def test_a_quality_that_is_no_faster_says_why(qualities, said):
    notes = no_faster(qualities)
    assert len(notes) == said
    for note in notes:
        assert note.startswith("balanced is no faster than faithful here")
        assert "balanced skips 10 and computes 13 sparsely, and faithful skips 30" in note


def test_the_bundled_model_says_why_balanced_gains_nothing(explained):
    notes = explained()["notes"]
    assert any("balanced is no faster than faithful here (44% and 40%" in note for note in notes)
