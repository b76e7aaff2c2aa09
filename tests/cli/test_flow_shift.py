"""`--flow-shift`: what it makes, what is kept of it, and what does not go with it."""

import json

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
)
from PIL import Image

from chipsparse.cli.errors import UserError
from chipsparse.cli.profiles import write_profile
from chipsparse.cli.settings import GenerationSettings
from chipsparse.config import SparsityConfig
from chipsparse.experiments import clips as denoise
from chipsparse.profiles.profile import bundled_model, load_profile
from chipsparse.profiles.tuned_range import TunedFor
from tests.cli.conftest import change_index, command, names
from tests.tiny_models import PROMPT

SIZE = 32
SMALL = ("--height", SIZE, "--width", SIZE, "--frames", 1, "--steps", 4)
SHIFT = 6.0
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
# All commands that generate, without a model.
COMMANDS = {
    "generate": ("generate", PROMPT, "-o", "o.png", "--frames", 1, "--compare"),
    "batch": ("batch", "prompts.txt", "-o", "out", "--frames", 1),
    "compare": ("compare", "dense", "profile", "--prompts", "prompts.txt"),
    "suite": ("compare", "--prompts", "prompts.txt", "-o", "suite"),
    "tune": ("tune", "--min-psnr", 30, "-o", "p.yaml", "--prompts", "prompts.txt"),
}


def run(name, model, *arguments):
    given = ("--suite" if name == "suite" else "--model", model, "--device", "cpu")
    return command(*COMMANDS[name], *given, *arguments)


@pytest.fixture
def prompts(workdir):
    """A file of prompts that differ."""
    (workdir / "prompts.txt").write_text("".join(f"{PROMPT} {i}\n" for i in range(6)))


def with_scheduler(folder, scheduler):
    """The model of a folder, with another scheduler."""
    scheduler.save_pretrained(folder / "scheduler")
    change_index(folder, scheduler=["diffusers", type(scheduler).__name__])
    return folder


# What is made.


def test_the_bundled_model_makes_what_its_pipeline_makes_with_that_scheduler(workdir):
    given = ("generate", PROMPT, *SMALL, "--seed", 3, "--dense", "--device", "cpu")
    ran = command(*given, "-o", "o.png", "--flow-shift", SHIFT).fine()
    assert ", flow shift 6, float32, on cpu" in ran.stdout
    made = np.asarray(Image.open("o.png"))
    pipe = WanPipeline.from_pretrained(bundled_model(), dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)

    def as_the_command_has_it():
        frames = pipe(
            PROMPT,
            height=SIZE,
            width=SIZE,
            num_frames=1,
            num_inference_steps=4,
            guidance_scale=4.0,
            max_sequence_length=64,
            generator=torch.Generator().manual_seed(3),
            output_type="np",
        ).frames[0]
        return np.rint(frames.clip(0, 1) * 255).astype(np.uint8)[0]

    assert not np.array_equal(made, as_the_command_has_it())
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    assert np.array_equal(made, as_the_command_has_it())


def test_what_is_kept_says_it(generate, workdir):
    given = ("--frames", "1", "--flow-shift", "6")
    made = generate("-o", "o.png", "--report", "r.json", "--json", *given).json()
    assert (made["flow_shift"], made["scheduler"]) == (SHIFT, None)
    words = made["command"]
    assert words[words.index("--flow-shift") + 1] == "6.0"
    assert [step["action"] for step in made["sparse"]["steps"]].count("sparse") == 2
    assert json.loads((workdir / "r.json").read_text())["request"]["flow_shift"] == SHIFT
    assert "Flow shift: 6.0" in Image.open("o.png").text["parameters"]
    own = generate("-o", "own.png", "--frames", "1", "--json").json()
    assert own["flow_shift"] is None
    assert "--flow-shift" not in own["command"]
    assert "Flow shift" not in Image.open("own.png").text["parameters"]


@pytest.fixture
def scheduler_of(monkeypatch):
    """The scheduler of a command's first generation, at which the command ends."""
    found = []

    def watched(pipe, *_, **__):
        found.append(pipe.scheduler)
        raise UserError("that is enough")

    for name in ("warm_up", "generate"):
        monkeypatch.setattr(denoise, name, watched)

    def ran(name, model, *arguments):
        found.clear()
        assert "that is enough" in run(name, model, *arguments).refused()
        (scheduler,) = found
        return scheduler

    return ran


@pytest.mark.parametrize(("given", "shift"), [((), 3.0), (("--flow-shift", 6), SHIFT)])
@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"batch"}))
def test_every_command_generates_with_it(scheduler_of, model_folder, prompts, name, given, shift):
    assert scheduler_of(name, model_folder, *given).config.shift == shift


def test_with_another_scheduler(scheduler_of, broken_model, prompts):
    folder = with_scheduler(broken_model, UniPCMultistepScheduler(**FLOW))
    assert scheduler_of("compare", folder, "--flow-shift", 6).config.flow_shift == SHIFT
    made = scheduler_of("generate", folder, "--flow-shift", 6, "--scheduler", "deis")
    assert type(made).__name__ == "DEISMultistepScheduler"
    assert made.config.flow_shift == SHIFT


# What a tuned profile says of it.


@pytest.mark.parametrize("shift", [None, SHIFT])
def test_a_tuned_profile_has_it_where_one_was_given(workdir, shift):
    write_profile(
        workdir / "p.yaml",
        command="tune",
        model_class="WanTransformer3DModel",
        description="",
        settings=GenerationSettings(32, 48, 5, 4, 3.0, None, 16),
        config=SparsityConfig(),
        tuned=TunedFor(model="tiny", flow_shift=shift),
    )
    assert ("flow_shift" in (workdir / "p.yaml").read_text()) == (shift is not None)
    assert load_profile(workdir / "p.yaml").tuned.flow_shift == shift


# Mistakes.


@pytest.mark.parametrize("shift", ["0", "-3", "nan", "inf", "1001"])
@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_no_shift(model_folder, prompts, name, shift):
    said = run(name, model_folder, "--flow-shift", shift).sentence()
    assert said.startswith(f"--flow-shift {shift} is out of range; it must be above 0")
    assert names(".") == ["prompts.txt"]


@pytest.mark.parametrize("name", [*COMMANDS, "explain"])
def test_a_scheduler_without_one_is_refused_before_loading(
    broken_model, prompts, monkeypatch, name
):
    for module in ("generate", "tune", "suite"):
        monkeypatch.setattr(f"chipsparse.cli.{module}.job.load_pipeline", None)
    monkeypatch.setattr("chipsparse.cli.compare.configs.load_pipeline", None)
    monkeypatch.setitem(COMMANDS, "explain", ("explain",))
    folder = with_scheduler(
        broken_model, FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    )
    assert run(name, folder, "--flow-shift", 6).sentence() == (
        "--flow-shift 6 does not go with this model: FlowMatchEulerDiscreteScheduler takes its "
        "flow shift from the size here (use_dynamic_shifting)"
    )
    assert names(".") == ["prompts.txt"]


def test_noise_that_is_none_of_flow_matching(generate, broken_model, loads_nothing):
    folder = with_scheduler(broken_model, DDIMScheduler())
    said = generate("--flow-shift", "6", model=folder).sentence()
    assert "--flow-shift 6 does not go with this model: DDIMScheduler has no flow shift" in said


def test_several_processes_are_not_started_for_it(broken_model, prompts, monkeypatch):
    monkeypatch.setattr("chipsparse.cli.ranks.launch", lambda *_: pytest.fail("started"))
    folder = with_scheduler(broken_model, DDIMScheduler())
    for name in ("generate", "compare", "tune"):
        said = run(name, folder, "--flow-shift", 6, "--gpus", 2).refused()
        assert "DDIMScheduler has no flow shift" in said


def test_explain_takes_it(model_folder, workdir):
    given = ("--model", model_folder, "--flow-shift", 6)
    command("explain", *given, "--device", "cpu").fine()
