"""One resolved request: profile, settings, image, scheduler, warnings."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
import yaml
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from PIL import Image

from chipsparse.cli import main, settings
from chipsparse.cli.errors import UserError
from chipsparse.cli.model.description import ModelDescription, describe_model
from chipsparse.cli.options import GenerateOptions, GenerationOptions
from chipsparse.cli.plan import too_few_steps
from chipsparse.cli.profiles import write_profile
from chipsparse.cli.request import Place, choose_profile, resolve
from chipsparse.config import Periodic, SparsityConfig
from chipsparse.experiments import clips
from chipsparse.pipelines import model_sizes as sizes
from chipsparse.profiles import profile as profiles
from chipsparse.profiles.tuned_range import TunedFor
from chipsparse.sparse.plan import SparsityPlan
from tests.chipsparse.sparse.test_plan import LAYOUT
from tests.cli.conftest import by_hand, change_json, command, names, pictures
from tests.tiny_models import FLOW, PROMPT, tiny_flux_pipeline

INDEX = "model_index.json"
PLACE = {"location": "model", "experts": 1}
MODEL = SimpleNamespace(**PLACE, transformer_class="WanTransformer3DModel")
OTHER = SimpleNamespace(**PLACE, transformer_class="NewTransformer3DModel")


@pytest.fixture
def chosen(tmp_path):
    def choose(text=None, *, model=MODEL, optional=False, **options):
        path = None
        if text is not None:
            path = tmp_path / "mine.yaml"
            path.write_text(text)
        given = GenerationOptions(config=path, vram="1G", **options)
        return choose_profile(given, model, optional=optional)

    return choose


def test_the_profile_is_the_one_that_is_asked_for_with_its_quality_and_budgets(chosen):
    """That another class is refused is a row of `test_refusals`."""
    assert chosen("").sparsity == SparsityConfig().override({"memory.vram": "1G"})
    profile = chosen("qualities: {fast: {tile: null}}", quality="fast")
    assert (profile.quality, profile.sparsity.tile) == ("fast", None)
    assert profile.sparsity.memory.vram == profile.qualities["fast"].memory.vram == 1 << 30
    assert chosen().quality == "balanced"
    assert chosen(quality="chipmunk").sparsity.schedule.form == Periodic(6)
    with pytest.raises(UserError, match=r"class NewTransformer3DModel .* --quality balanced"):
        chosen(model=OTHER)
    assert chosen(model=OTHER, optional=True) is None
    general = chosen(model=OTHER, quality="fast")
    assert (general.is_general, general.quality) == (True, "fast")


@pytest.mark.parametrize("shift", [None, 6.0])
def test_a_written_profile_reads_as_what_was_written(workdir, shift):
    layers = [{"index": "1-2", "mlp": "dense"}]
    config = SparsityConfig().override(
        {"attention.density": 0.25, "schedule.periodic.warmup": 3, "layers": layers, "tile": None},
    )
    own = settings.GenerationSettings(height=32, width=48, num_inference_steps=4)
    request = SimpleNamespace(model=MODEL, settings=own)
    tuned = TunedFor("tiny", flow_shift=shift)
    facts = {"command": "tune", "description": "", "config": config, "tuned": tuned}
    write_profile(workdir / "p.yaml", request, **facts)
    content = yaml.safe_load((workdir / "p.yaml").read_text())
    usual = {"forecast": 0.0, "forecast_after": 0.0, "correct": True}
    assert content["sparsity"] == {
        "attention": {"density": 0.25},
        "mlp": {"density": "dense"},  # the default, but a search chooses it
        "schedule": {"periodic": {"warmup": 3, "refresh_every": 10}, **usual},
        "layers": layers,
        "tile": None,
    }
    profile = profiles.load_profile(workdir / "p.yaml")
    assert (profile.sparsity, profile.tuned.flow_shift) == (config, shift)
    assert names(workdir) == ["p.yaml"]


def described(pipeline, transformer_config, vae_config, transformer_class=""):
    kind = getattr(diffusers, pipeline)
    return ModelDescription("", kind, transformer_class, transformer_config, vae_config)


FLUX = described("FluxPipeline", {"patch_size": 1}, {"block_out_channels": [128, 256, 512, 512]})
EIGHT = {"spatial_compression_ratio": 8, "temporal_compression_ratio": 4}
HUNYUAN = described("HunyuanVideoPipeline", {"patch_size": 2, "patch_size_t": 1}, EIGHT)
LTX = {"spatio_temporal_scaling": [True] * 3 + [False]}
NOTHING = profiles.GenerationDefaults()


def resolved(model, defaults=NOTHING, **options):
    return settings.resolve_settings(GenerationOptions(**options), model, defaults)


def test_option_then_profile_then_pipeline():
    values = resolved(HUNYUAN, profiles.GenerationDefaults(height=96, width=128), height=64)
    assert (values.height, values.width, values.num_frames) == (64, 128, 129)
    assert values.num_inference_steps == 50
    image = resolved(FLUX, profiles.GenerationDefaults(num_frames=9))
    assert "num_frames" not in image.call_arguments()
    assert image.height is None  # the pipeline decides


def test_guidance_of_a_model_that_takes_no_scale():
    scaled = dataclasses.replace(FLUX, transformer_config={"guidance_embeds": True})
    free = dataclasses.replace(FLUX, transformer_config={"guidance_embeds": False})
    defaults = profiles.GenerationDefaults(true_cfg_scale=4.0)
    for model, scale, expected in [
        (scaled, None, (3.5, 4.0)),
        (scaled, 2.0, (2.0, 4.0)),
        (free, None, (3.5, 4.0)),
        (free, 2.0, (3.5, 2.0)),
    ]:
        values = resolved(model, defaults, guidance_scale=scale)
        assert (values.guidance_scale, values.true_cfg_scale) == expected
    resolved(scaled, defaults, negative_prompt="fog")
    wan = described("WanPipeline", {}, {}, "WanTransformer3DModel")
    resolved(wan, negative_prompt="fog", guidance_scale=1.5)
    for model, given, said in [
        (scaled, {}, r"no effect .* set generation\.true_cfg_scale"),
        (free, {}, r"no effect .* raise --guidance-scale"),
        (wan, {"guidance_scale": 1.0}, r"no effect without .*; raise --guidance-scale"),
    ]:
        with pytest.raises(UserError, match=said):
            resolved(model, negative_prompt="fog", **given)
    with pytest.raises(UserError, match="--negative-prompt has no effect"):
        resolved(FLUX, profiles.GenerationDefaults(true_cfg_scale=0.0), negative_prompt="fog")


def test_settings_of_a_profile_that_the_pipeline_does_not_have():
    used = profiles.GenerationDefaults(height=64, true_cfg_scale=4.0)
    profile = profiles.Profile("", "", used, SparsityConfig(), "a.yaml")
    assert settings.unused_defaults(FLUX, profile) == []
    more = dataclasses.replace(profile, generation=dataclasses.replace(used, num_frames=9))
    assert settings.unused_defaults(FLUX, more) == [
        "a.yaml: FluxPipeline has no use for generation.num_frames (9)",
    ]


def test_sizes_that_do_not_fit_a_family():
    vae = {"latent_channels": 16, "block_out_channels": [1] * 5}
    packed = described("FluxPipeline", {"patch_size": 1, "in_channels": 64}, vae)
    for model, given, said in [
        (FLUX, {"width": 100}, r"--width 100 .* multiple of 16; use 96 or 112"),
        (FLUX, {"frames": 9}, "FluxPipeline has no num_frames; leave --frames out"),
        (HUNYUAN, {"frames": 2}, r"--frames 2 .* multiple of 4 plus 1; use 1 or 5"),
        (packed, {"width": 48}, r"--width 48 .* multiple of 32; use 32 or 64"),
    ]:
        with pytest.raises(UserError, match=said):
            resolved(model, **given)
    resolved(described("FluxPipeline", {"patch_size": 1, "in_channels": 16}, vae), width=48)


def test_what_configs_say_of_sizes():
    factors = sizes.vae_factors
    patches = sizes.patch_sizes
    assert factors({"scale_factor_spatial": 16, "scale_factor_temporal": 4}) == (16, 4)
    assert factors({"temperal_downsample": [False, True, True]}) == (8, 4)
    ratios = {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
    assert factors(ratios) == (32, 8)
    assert factors({**LTX, "patch_size": 4, "patch_size_t": 1}) == (32, 8)
    assert factors({"block_out_channels": [1, 2, 3, 4]}) == (8, 1)
    assert patches({"patch_size": [1, 2, 2]}) == (1, 2, 2)
    assert patches({"patch_size": 2, "patch_size_t": 1}) == (1, 2, 2)


def test_the_size_has_the_shape_of_the_image():
    for height, width, expected in (
        (None, None, (256, 384)),  # as many pixels as usual, 3:2
        (128, None, (128, 192)),
        (None, 96, (64, 96)),
        (80, 80, (80, 80)),
    ):
        options = GenerationOptions(height=height, width=width)
        image = Image.new("RGB", (96, 64))
        assert settings.size_like(image, options, (320, 307), (16, 32)) == expected


def on_cpu(folder):
    return Place(describe_model(str(folder)), torch.device("cpu"), torch.float32)


def picture(width=48, height=32):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def test_image_to_video(generate, image_to_video_folder, workdir, monkeypatch):
    picture(96, 64).save("in.png")
    given = ("-o", "out.png", "--image", "in.png", "--seed", "3")
    missing = generate(*given, model=image_to_video_folder)
    if missing.exit_code:  # where ftfy is not installed
        said = "WanImageToVideoPipeline needs the Python package ftfy; install it with pip install"
        assert missing.sentence() == f"{said} ftfy"
    fake = SimpleNamespace(fix_text=lambda text: text)
    module = "diffusers.pipelines.wan.pipeline_wan_i2v"
    monkeypatch.setattr(f"{module}.ftfy", fake, raising=False)
    result = generate(*given, "--json", model=image_to_video_folder).json()
    assert result["request"]["image"] == "in.png"
    assert (result["sparse"]["frames"], result["sparse"]["height"]) == (5, 32)
    actions = [step["action"] for step in result["sparse"]["steps"]]
    assert actions == ["dense", "refresh", "sparse", "sparse"]
    generate(*given, "--dense", model=image_to_video_folder).fine()
    pipe = diffusers.WanImageToVideoPipeline.from_pretrained(image_to_video_folder)
    image = picture(96, 64).resize((48, 32), Image.Resampling.LANCZOS)
    expected = by_hand(pipe, seed=3, image=image, num_frames=5, guidance_scale=3.0)
    np.testing.assert_array_equal(pictures("out-*.png"), expected)


def test_what_does_not_fit_is_cut_alike_on_both_sides(workdir, image_to_video_folder):
    image = Image.new("RGB", (90, 30), "red")
    image.paste("blue", (30, 0, 60, 30))
    image.save("in.png")
    size = {"height": 32, "width": 32, "frames": 5}
    options = GenerateOptions(prompt="", output=Path("o.png"), image=Path("in.png"), **size)
    request = resolve(options, on_cpu(image_to_video_folder))
    assert request.image.size == (32, 32)
    assert np.asarray(request.image)[:, 1:-1, 2].min() > 240


def test_an_image_model_becomes_its_image_to_image_pipeline(generate, flux_folder, workdir):
    picture().save("in.png")
    given = ("-o", "out.png", "--image", "in.png", "--strength", "0.6", "--steps", "5", "--json")
    ran = generate(*given, model=flux_folder).fine()
    steps = json.loads(ran.stdout)["sparse"]["steps"]
    assert [step["action"] for step in steps] == ["dense", "refresh", "sparse"]  # the last of 5
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert "step 3 of 3 (sparse)" in ran.stderr
    result = generate(*given, "--dense", model=flux_folder).json()
    asked = result["request"]
    assert asked["pipeline_class"] == "FluxImg2ImgPipeline"
    assert (asked["strength"], len(result["dense"]["steps"])) == (0.6, 3)
    assert asked["settings"]["num_frames"] is None
    assert asked["settings"]["true_cfg_scale"] == 3.0
    pipe = tiny_flux_pipeline(diffusers.FluxImg2ImgPipeline)
    call = {"image": picture(), "strength": 0.6, "negative_prompt": "", "true_cfg_scale": 3.0}
    expected = by_hand(pipe, seed=0, num_inference_steps=5, **call)
    np.testing.assert_array_equal(pictures("out.png"), expected)
    few = generate(*given, "--strict", "--strength", "0.4", model=flux_folder).sentence()
    assert "the profile's schedule computes all 2 steps in full, so nothing is saved" in few


def plan(steps, **changes):
    config = SparsityConfig().override({f"schedule.{name}": v for name, v in changes.items()})
    return SparsityPlan(config, LAYOUT, steps)


def test_the_fewest_steps_are_named():
    """The fields that help are those of `why_nothing`, which has tests of its own."""
    for steps, changes, enough in (
        (6, {"periodic.warmup": 8}, 11),
        (2, {"actions": ["dense", "refresh", "sparse"]}, 3),
        (4, {"spread.full": 0.9}, 5),
    ):
        why = too_few_steps(plan(steps, **changes))
        assert f"all {steps} steps in full, so nothing is saved; it takes --steps {enough} " in why
        assert too_few_steps(plan(enough, **changes)) is None
        assert too_few_steps(plan(enough - 1, **changes)) is not None
    why = too_few_steps(plan(6, **{"periodic.warmup": 8}))
    assert why.endswith("lower schedule.periodic.warmup (now 8)")
    assert "the only step" in too_few_steps(plan(1))
    for quality in ("balanced", "fast", "draft"):
        why = too_few_steps(SparsityPlan(profiles.default_profile().qualities[quality], LAYOUT, 2))
        assert "all 2 steps in full, so nothing is saved; it takes --steps 3 " in why
    # What wants nothing sparse has steps enough; a pipeline may begin later.
    assert too_few_steps(plan(2, actions=["dense"])) is None
    assert too_few_steps(plan(10), lambda steps: steps - 3) is None
    assert "all 2 steps" in too_few_steps(plan(10), lambda steps: steps * 4 // 5)


def test_the_command_warns_of_too_few_steps_before_loading(generate, workdir):
    few = ("-o", "o.png", "--frames", "1", "--steps", "2")
    ran = generate(*few, "--json")
    (warning,) = ran.json()["request"]["warnings"]
    assert "computes all 2 steps in full, so nothing is saved" in warning
    first, second, *_ = ran.stderr.splitlines()
    assert (first, second) == (f"chipsparse: warning: {warning}", "loading the model")
    lines = [" ".join(line.split()) for line in generate(*few).stdout.splitlines()]
    assert "gain none: nothing ran sparse" in lines
    assert f"warning {warning}" in lines
    assert generate(*few, "--dense", "--json").json()["request"]["warnings"] == []
    refused = generate(*few, "--strict")
    assert "it takes --steps 3 or more" in refused.sentence()
    assert "loading" not in refused.stderr


def test_what_the_report_says_of_nothing_sparse_is_shown(generate, monkeypatch):
    made = clips.generate

    def generation(*arguments, **options):
        return dataclasses.replace(made(*arguments, **options), nothing_sparse="of a reason")

    monkeypatch.setattr(clips, "generate", generation)
    ran = generate("-o", "o.png", "--frames", "1", "--json")
    assert ran.json()["request"]["warnings"] == ["of a reason"]
    assert "chipsparse: warning: of a reason\n" in ran.stderr


def test_the_flow_shift_reaches_the_scheduler_and_the_record(workdir):
    small = ("--height", 32, "--width", 32, "--frames", 1, "--steps", 4, "--seed", 3)
    given = ("generate", PROMPT, *small, "--dense", "--device", "cpu", "-o", "o.png", "--json")
    request = command(*given, "--flow-shift", 6).json()["request"]
    assert (request["flow_shift"], request["scheduler"]) == (6.0, None)
    assert "--flow-shift" in request["command"]
    assert "Flow shift: 6.0" in Image.open("o.png").text["parameters"]
    made = pictures("o.png")
    pipe = diffusers.WanPipeline.from_pretrained(profiles.bundled_model(), dtype=torch.float32)
    call = {"width": 32, "num_frames": 1, "guidance_scale": 4.0, "max_sequence_length": 64}
    assert not np.array_equal(made, by_hand(pipe, seed=3, **call))
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=6.0)
    np.testing.assert_array_equal(made, by_hand(pipe, seed=3, **call))
    request = command(*given).json()["request"]
    assert (request["flow_shift"], "--flow-shift" in request["command"]) == (None, False)
    assert "Flow shift" not in Image.open("o.png").text["parameters"]


@pytest.mark.parametrize(
    ("scheduler", "asked", "made"),
    [
        (UniPCMultistepScheduler(**FLOW), None, "UniPC"),
        (UniPCMultistepScheduler(**FLOW), "deis", "DEIS"),
        (DDIMScheduler(), None, "DDIMScheduler has no flow shift"),
    ],
)
def test_the_scheduler_is_made_or_refused_before_loading(broken_model, scheduler, asked, made):
    scheduler.save_pretrained(broken_model / "scheduler")
    change_json(broken_model / INDEX, scheduler=["diffusers", type(scheduler).__name__])
    options = GenerateOptions(prompt="", output=Path("o.png"), flow_shift=6.0, scheduler=asked)
    place = on_cpu(broken_model)
    if " " in made:
        with pytest.raises(UserError, match=f"--flow-shift 6 does not go with this .*{made}"):
            resolve(options, place)
        return
    request = resolve(options, place)
    assert type(request.scheduler).__name__.startswith(made)
    assert request.load().scheduler.config.flow_shift == 6


MOST_MODULES = 18


def test_few_modules_are_on_the_way_from_the_parser_to_the_file(model_folder, workdir):
    """The modules of the command line and of experiments of which a function is entered."""
    importlib.import_module("chipsparse.cli.generate.job")  # class bodies are no functions
    entered = set()
    inside = []

    def trace(frame, event, _):
        name = frame.f_globals.get("__name__", "")
        ours = name.startswith(("chipsparse.cli.", "chipsparse.experiments."))
        if event != "call" or not ours or frame.f_code.co_name == "<module>":
            return
        if name == "chipsparse.cli.commands" and frame.f_code.co_name == "generate":
            inside.append(name)  # what was typed is read and checked by now
        if inside and "o.png" not in names(workdir):
            entered.add(name)

    words = ["generate", PROMPT, "-o", "o.png", "--frames", "1", "--model", str(model_folder)]
    sys.setprofile(trace)
    try:
        main.app(words, standalone_mode=False)
    finally:
        sys.setprofile(None)
    assert names(workdir) == ["o.png"]
    assert len(entered) <= MOST_MODULES, "\n".join(sorted(entered))


def test_the_most_frames_of_a_transformer_whose_patches_have_several():
    config = {"rope_max_seq_len": 8, "patch_size": [2, 2, 2]}
    vae = {"scale_factor_spatial": 8, "scale_factor_temporal": 4}
    model = SimpleNamespace(transformer_config=config, vae_config=vae)
    most = settings.GenerationSettings(num_inference_steps=4, num_frames=61)
    settings.check_sizes(most, model)
    with pytest.raises(UserError, match=r"--frames 65 is too large .* the largest is 61"):
        settings.check_sizes(most.model_copy(update={"num_frames": 65}), model)


def test_a_class_without_a_profile_is_refused_in_a_short_sentence():
    model = SimpleNamespace(transformer_class="OtherTransformer", location="no/where", experts=1)
    with pytest.raises(
        UserError,
        match=r"class OtherTransformer .chipsparse models lists",
    ) as error:
        choose_profile(GenerationOptions(), model)
    assert len(str(error.value)) < 250
