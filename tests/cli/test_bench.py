"""`chipsparse bench`: what it measures, what it tells, and what it refuses."""

import json
import re
import shlex

import pytest
import torch

from chipsparse.cli.bench import benchmark, step_times
from chipsparse.cli.bench import text as bench_text
from chipsparse.cli.generation.denoise import StepResult
from chipsparse.cli.model.description import describe_model
from chipsparse.cli.model.random_pipeline import random_pipeline
from chipsparse.cli.ranks.joined import Joined
from chipsparse.config import SparsityConfig
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.plan import SparsityPlan
from tests.cli.conftest import PROFILE, change_index, command
from tests.pipelines.test_families import FAMILIES
from tests.tiny_models import tiny_wan_pipeline

CPU = torch.device("cpu")


@pytest.fixture
def bench(model_folder, workdir):
    def run(*arguments, model=model_folder):
        return command("bench", "--model", str(model), *arguments)

    return run


@pytest.fixture
def fails(bench):
    def run(*arguments, **options):
        return bench(*arguments, **options).sentence()

    return run


@pytest.fixture
def without_weights(broken_model):
    for file in broken_model.rglob("*.safetensors"):
        file.unlink()
    return broken_model


def test_json(bench, model_folder):
    content = bench("--json", "--steps", "12").json()
    assert content["model"] == str(model_folder)
    assert (content["device"], content["dtype"]) == ("cpu", "float32")
    assert re.search(r", \d+ cores$", content["device_name"])
    assert content["threads"] == torch.get_num_threads()
    assert content["versions"]["torch"] == torch.__version__
    assert (content["tokens"], content["branches"], content["random_weights"]) == (12, 2, False)
    assert [each["part"] for each in content["layers"]] == ["attention", "mlp"]
    for each in content["layers"]:
        assert each["speedup"] == pytest.approx(
            each["baseline_ms"] / each["milliseconds"]["sparse"]
        )
        assert each["error"] < 1e-4
    steps = content["steps"]
    assert steps["counts"] == {"dense": 2, "refresh": 1, "sparse": 9}
    assert set(steps["patched"]) == {"dense", "refresh", "sparse"}
    expected = sum(count * steps["patched"][action] for action, count in steps["counts"].items())
    assert steps["patched_run"] == pytest.approx(expected)
    assert steps["stock_run"] == pytest.approx(12 * steps["stock"])
    assert steps["speedup_run"] == pytest.approx(steps["stock_run"] / expected)
    assert 0 < steps["attention_kept"] < 1
    assert (steps["stock_peak_bytes"], steps["fallbacks"]) == (None, [])


def test_the_command_runs_the_same_again(bench, workdir):
    (workdir / "my profile.yaml").write_text(PROFILE)
    arguments = ("--config", "my profile.yaml", "--kernels", "--frames", "9")
    content = bench(*arguments, "--json").json()
    words = shlex.split(content["command"])
    assert words[:2] == ["chipsparse", "bench"]
    again = command(*words[1:], "--json").json()
    same = ("settings", "tokens", "profile", "device", "dtype", "command", "random_weights")
    assert {name: again[name] for name in same} == {name: content[name] for name in same}
    assert content["settings"]["num_frames"] == 9
    shown = bench(*arguments).stdout
    assert shown.rstrip().endswith(content["command"])


def test_tables(bench):
    ran = bench("--steps", "12").fine()
    lines = [line.split() for line in ran.stdout.splitlines() if line.strip()]
    names = [line[0] for line in lines]
    assert names.index("attention") < names.index("MLP") < names.index("stock")
    table = {line[0]: line for line in lines}
    assert table["attention"][1].endswith("%")
    assert table["attention"][-1].endswith("x")
    assert table["stock"][-1] == "1.00x"
    assert table["sparse"][-1] == "9"
    assert "12 tokens, 2 heads of 32" in ran.stdout
    assert re.search(r"generation +12 steps: .*, stock .*: [\d.]+ times as fast", ran.stdout)
    assert "relative error" in ran.stdout
    assert "random: times mean something" not in ran.stdout


def test_kernels_alone_need_no_weights(bench, without_weights, monkeypatch):
    content = bench("--kernels", "--json", model=without_weights).json()
    assert (content["steps"], len(content["layers"])) == (None, 2)


def test_random_weights(bench, without_weights):
    content = bench("--random-weights", "--json", model=without_weights).json()
    assert content["random_weights"] is True
    assert content["steps"]["patched"].keys() == {"dense", "refresh", "sparse"}
    assert content["command"].endswith("--random-weights")
    shown = bench("--random-weights", model=without_weights).stdout
    assert "random: times mean something, results would not" in shown


def test_skipped_steps_are_measured_where_there_are_some(bench, workdir):
    (workdir / "skips.yaml").write_text(
        re.sub("schedule: .*", "schedule: {actions: [dense, refresh, sparse, skip]}", PROFILE)
    )
    steps = bench("--config", "skips.yaml", "--json").json()["steps"]
    assert steps["counts"] == {"dense": 1, "refresh": 1, "sparse": 1, "skip": 1}
    assert steps["patched"]["skip"] < steps["patched"]["dense"]
    assert steps["patched_run"] is not None


def test_a_schedule_without_sparse_steps_is_measured_without_them(bench, workdir):
    lines = [line for line in PROFILE.splitlines() if "schedule:" not in line]
    schedule = "  schedule: {full_share: 0.5, between: none}"
    (workdir / "skips.yaml").write_text("\n".join([*lines, schedule]))
    content = bench("--config", "skips.yaml", "--steps", "8", "--json").json()
    assert content["layers"] == []
    assert "attention of block layers: no step of the schedule is sparse" in content["dense"]
    steps = content["steps"]
    assert steps["counts"] == {"dense": 4, "skip": 4}
    assert set(steps["patched"]) == {"dense", "skip"}
    assert steps["patched"]["skip"] < steps["patched"]["dense"]
    assert steps["patched_run"] == pytest.approx(4 * sum(steps["patched"].values()))


def test_parts_that_run_dense_are_not_measured(bench, workdir):
    (workdir / "columns.yaml").write_text(PROFILE + "  mlp: {enabled: false}\n")
    ran = bench("--config", "columns.yaml", "--kernels", "--json")
    content = ran.json()
    assert [each["part"] for each in content["layers"]] == ["attention"]
    assert content["dense"] == ["mlp of block layers: mlp.enabled is false in the profile"]


def test_of_layers_with_budgets_of_their_own_the_middle_one_is_measured():
    layout = ModelLayout((LayerKind("block", 5, 100),), 2, 16, 1, ((2, 8, 10),))
    budgets = [0.5, 0.1, 0.3, 0.2, "dense"]
    layers = [{"layers": layer, "attention": share} for layer, share in enumerate(budgets)]
    plan = SparsityPlan(SparsityConfig().override({"layers": layers}), layout, 10)
    assert benchmark.typical_layer(plan, range(5), "attention") == 3
    assert benchmark.typical_layer(plan, range(1, 3), "attention") == 1
    assert benchmark.typical_layer(plan, range(4, 5), "attention") is None
    assert benchmark.typical_layer(plan, range(5), "mlp") == 2


# Steps


def test_medians_without_the_last_step(monkeypatch):
    """The last step frees the caches; medians are those of the others of each action."""
    before, after = (
        [StepResult(i, "dense", second, None, None) for i, second in enumerate(seconds)]
        for seconds in ([2.0, 1.0, 3.0], [4.0, 5.0, 9.0])
    )
    actions = step_times.ACTIONS
    times = [4.0, 6.0, 7.0, 9.0, 10.0, 20.0, 1.0, 2.0, 2.5, 2.0, 100.0]
    patched = [
        StepResult(i, action, second, 0.1, 0.3)
        for i, (action, second) in enumerate(zip(actions, times, strict=True))
    ]
    runs = iter([(before, None), (patched, None), (after, None)])
    monkeypatch.setattr(step_times.denoise, "warm_up", lambda *_, **__: None)
    monkeypatch.setattr(step_times.denoise, "time_steps", lambda *_, **__: next(runs))
    found = step_times.measure_steps(
        tiny_wan_pipeline(), planned(), torch.float32, display(), Joined()
    )
    assert (found.stock, found.stock_before, found.stock_after) == (3.5, 2.0, 5.0)
    assert found.patched == {"dense": 5.0, "refresh": 8.0, "sparse": 2.25}
    assert found.counts == {"dense": 1, "refresh": 1, "sparse": 8}
    assert found.patched_run == 5.0 + 8.0 + 8 * 2.25
    assert found.stock_run == 35.0


def test_an_action_that_was_not_taken_cannot_be_summed():
    times = step_times.StepTimes(
        1.0, 1.0, 1.0, {"dense": 1.0}, {"dense": 2, "sparse": 3}, None, None, None, None, {}, []
    )
    assert times.patched_run is None


@pytest.mark.parametrize(
    ("after", "noted"), [(1.04, False), (0.96, False), (1.2, True), (0.8, True)]
)
def test_a_machine_of_uneven_speed_is_noted(after, noted):
    times = step_times.StepTimes(
        1.0, 1.0, after, {"dense": 1.0}, {"dense": 2}, None, None, None, None, {}, []
    )
    assert bool(bench_text.uneven_facts(times)) is noted


def planned():
    from chipsparse.cli.planning.planned import PlannedGeneration
    from chipsparse.cli.planning.settings import GenerationSettings
    from chipsparse.pipelines.wan import WanAdapter

    layout = ModelLayout((LayerKind("block", 3, 128),), 2, 32, 1, ((2, 2, 3),))
    return PlannedGeneration(
        GenerationSettings(32, 48, 5, 10, 3.0, None, 16),
        WanAdapter,
        SparsityPlan(SparsityConfig(), layout, 10),
        (32, 48),
        2,
        {},
    )


def display():
    from chipsparse.cli.progress import ProgressDisplay

    return ProgressDisplay()


# Random weights


FAST = ("flux", "wan 2.1", "sd3")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name in FAMILIES
        if not name.startswith(
            ("hunyuan video 1.5", "minimax h3")
        )  # which the command runs otherwise
    ],
)
def test_a_random_pipeline_runs_as_the_real_one_does(name, tmp_path):
    family = FAMILIES[name]
    real = family.make()
    parts = [real, *getattr(real, "components", {}).values()]
    if any(type(part).__module__.startswith("tests.") for part in parts):
        pytest.skip("the tests call its transformer without a pipeline that could be saved")
    real.save_pretrained(tmp_path)
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()
    state, default = torch.get_rng_state(), torch.get_default_dtype()
    pipe = random_pipeline(describe_model(str(tmp_path)), device=CPU, dtype=torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == default
    assert type(pipe) is type(real)
    assert pipe.components.keys() == real.components.keys()
    shapes = [
        {name: parameter.shape for name, parameter in each.transformer.named_parameters()}
        for each in (pipe, real)
    ]
    assert shapes[0] == shapes[1]
    output = pipe(
        **family.call,
        num_inference_steps=2,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
    )
    latents = output.frames if hasattr(output, "frames") else output.images
    assert latents.isfinite().all()


def test_random_weights_have_the_types_of_loaded_ones(model_folder):
    """Wan keeps its norms and its time embedding in float32."""
    from diffusers import WanPipeline

    loaded = WanPipeline.from_pretrained(model_folder, dtype=torch.bfloat16)
    made = random_pipeline(describe_model(str(model_folder)), device=CPU, dtype=torch.bfloat16)
    for name in ("transformer", "text_encoder", "vae"):
        pairs = zip(
            getattr(made, name).named_parameters(),
            getattr(loaded, name).named_parameters(),
            strict=True,
        )
        for (path, mine), (_, theirs) in pairs:
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), path
    kept = {p.dtype for p in made.transformer.parameters()}
    assert kept == {torch.float32, torch.bfloat16}


def test_random_weights_are_the_same_every_time(model_folder):
    model = describe_model(str(model_folder))
    first, second = (random_pipeline(model, device=CPU, dtype=torch.float32) for _ in range(2))
    for a, b in zip(first.transformer.parameters(), second.transformer.parameters(), strict=True):
        assert torch.equal(a, b)


# Mistakes


def test_weights_are_missing(fails, without_weights):
    sentence = fails(model=without_weights)
    assert "has no weights: there is no .safetensors file in" in sentence
    assert sentence.endswith("; --random-weights needs none, --kernels no model")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--kernels", "--random-weights"], "--kernels loads no weights: --random-weights has no"),
        (["--height", "40"], "--height 40 does not fit this model"),
        (["--vram", "8G", "--device", "cpu"], "--vram 8G has no effect on a CPU"),
        (["--config", "no.yaml"], "no.yaml: cannot read the profile"),
    ],
)
def test_bad_options(fails, arguments, sentence):
    assert fails(*arguments).startswith(sentence)


def test_a_class_without_an_adapter(fails, broken_model):
    change_index(broken_model, transformer=["diffusers", "AuraFlowTransformer2DModel"])
    assert "AuraFlowTransformer2DModel" in fails(model=broken_model)


def test_a_pipeline_that_wants_more_than_a_prompt(fails, bench, tmp_path):
    FAMILIES["wan 2.1 image to video"].make().save_pretrained(tmp_path)
    (tmp_path / "chipsparse.yaml").write_text(PROFILE)
    assert fails(model=tmp_path) == (
        "WanImageToVideoPipeline also needs image; --kernels measures its layers without a call"
    )
    assert len(bench("--kernels", "--json", model=tmp_path).json()["layers"]) == 2


def test_a_model_without_a_text_encoder(fails, bench, broken_model):
    change_index(broken_model, text_encoder=[None, None], tokenizer=[None, None])
    expected = (
        f"{broken_model} has no text encoder, so WanPipeline cannot read a prompt; --kernels "
        "measures its layers without a call"
    )
    assert fails(model=broken_model) == expected
    assert fails("--random-weights", model=broken_model) == expected
    assert len(bench("--kernels", "--json", model=broken_model).json()["layers"]) == 2


def test_a_component_that_cannot_be_made(fails, without_weights):
    file = without_weights / "text_encoder" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "d_model": "wide"}))
    assert f"the text_encoder of {without_weights} could not be made: " in fails(
        "--random-weights", model=without_weights
    )
