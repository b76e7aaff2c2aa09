"""The verbs as they are used in notebooks, and with what is no pipeline or config."""

import copy
import functools
import itertools
import re
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanTransformerBlock

import chipsparse
from chipsparse import AttentionConfig, DenseWarning, FallbackError, SparsityConfig
from chipsparse.common.tensor_writes import is_compared
from chipsparse.pipelines.families.wan import WAN
from chipsparse.pipelines.patches import stock_class
from chipsparse.pipelines.runner import RUNNER
from chipsparse.profiles.profile import QUALITIES
from tests.pipelines.changes import add_lora, at_step
from tests.pipelines.model_state import actions, state_of
from tests.pipelines.small_sparse import generate
from tests.pipelines.tiny_runs import STILL
from tests.schedules import letters_of
from tests.tiny_models import PROMPT, random, tiny_wan_pipeline
from tests.variants import slow

CONFIG = STILL.SPARSE
wan = STILL.generate


@pytest.fixture(scope="module")
def shared():
    return tiny_wan_pipeline()


@pytest.fixture
def pipe(shared):
    """One pipeline for all of these tests, each of which must leave it as it was."""
    before = state_of(shared.transformer)
    yield shared
    assert type(shared) is WanPipeline
    assert not [name for name in vars(shared) if "chipsparse" in name]
    assert state_of(shared.transformer) == before


def test_the_way_back_without_the_handle_and_a_handle_that_is_used_up(pipe):
    handle = chipsparse.enable(pipe, CONFIG)
    other = type(pipe)(**pipe.components)
    assert handle.enabled
    kept = pipe.__call__
    chipsparse.disable(other)  # by the transformer that both have
    assert not handle.enabled
    handle.disable()  # may always be called
    assert torch.equal(wan(kept), wan(pipe))
    with pytest.raises(ValueError, match="this WanPipeline is not patched by chipsparse"):
        chipsparse.disable(pipe)
    with pytest.raises(RuntimeError, match="this handle is used up"), handle:
        pass


def test_running_a_cell_again_exchanges_the_patch(pipe):
    dense = wan(pipe)
    first = chipsparse.enable(pipe, CONFIG)
    with pytest.raises(ValueError, match="there is none"):
        chipsparse.enable(pipe, CONFIG, parallel=chipsparse.Parallel(ulysses=2))
    assert first.enabled
    second = chipsparse.enable(pipe, SparsityConfig.dense())
    assert (first.enabled, second.enabled) == (False, True)
    assert torch.equal(wan(pipe), dense)
    assert len(second.report.steps) == 5
    assert first.report.steps == []
    with second:
        pass


def test_a_patch_stays_where_the_new_one_is_refused(pipe):
    handle = chipsparse.enable(pipe, CONFIG)
    other = type(pipe)(**pipe.components)
    for new, config, said in (
        (pipe, "no.yaml", "cannot read"),
        (other, CONFIG, r"patched already; .* or chipsparse.disable\(pipe\), fi"),
    ):
        with pytest.raises(ValueError, match=said):
            chipsparse.enable(new, config)
        assert handle.enabled
    with handle:
        with pytest.raises(ValueError, match="patched already"):
            chipsparse.enable(pipe, CONFIG)
        with pytest.raises(RuntimeError, match="with block is open already"):
            handle.__enter__()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (type, r"got the class WanPipeline; load one with WanPipeline.from_pretrained\(...\)"),
        (lambda pipe: pipe.transformer, "got a WanTransformer3DModel; pass the pipeline that has"),
        (lambda _: None, "expected a diffusers pipeline, got None"),
        (
            lambda _: "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
            r"got 'Wan-AI/Wan2.1-T2V-1.3B-Diffusers'; load it with DiffusionPipeline.from_pretr",
        ),
        (lambda _: Path("wan"), r"got PosixPath\('wan'\); load it with DiffusionPipeline"),
        (lambda pipe: pipe.components, "expected a diffusers pipeline, got {"),
    ],
)
@pytest.mark.parametrize("verb", [chipsparse.enable, chipsparse.disable])
def test_what_is_no_pipeline_is_refused(pipe, wrong, said, verb):
    with pytest.raises(ValueError, match=said) as error:
        verb(wrong(pipe))
    assert len(str(error.value)) < 300


NO_CONFIG = "expected a SparsityConfig, a Profile or the path.*override.* makes a config of a dict"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *[({"config": each}, NO_CONFIG) for each in ({"a": 1}, 5, b"a.yaml", AttentionConfig())],
        ({"quality": "best"}, "no quality 'best'; known are faithful, balanced, fast, draft"),
        ({"quality": ["fast"]}, r"no quality \['fast'\]; known are"),
        ({"quality": np.zeros(2)}, r"no quality array\(\[0., 0.\]\); known are"),
        ({"config": "fast"}, r"no file 'fast'; a quality is .* enable\(pipe, quality=\"fast\"\)"),
        ({"config": "best"}, r"no file 'best'; a quality is .* enable\(pipe, quality=\"bal"),
        ({"strict": "yes"}, "strict: expected True or False, got 'yes'"),
        ({"strict": 1}, "strict: expected True or False, got 1"),
        ({"layer_times": None}, "layer_times: expected True or False, got None"),
        *[({"parallel": each}, "parallel: .*; Parallel.ulysses=2. has") for each in (2, True, "2")],
        ({"parallel": chipsparse.Parallel}, "parallel: expected a chipsparse.Parallel, got <class"),
        ({"static_columns": {True: 1}}, "a list of bools, got dict"),
        ({"static_columns": torch.ones(2, dtype=torch.bfloat16)}, "expected bools .* got bfloat16"),
        ({"static_columns": torch.ones(2, device="meta").bool()}, "expected bools .* on meta"),
        ({"config": CONFIG, "quality": "fast"}, "'fast' is one of a profile's, and a SparsityConf"),
        ({"config": "plain.yaml", "quality": "fast"}, "it has no qualities"),
        ({"config": "flux.yaml"}, "a profile for FluxTransformer2DModel, but the pipeline has a W"),
    ],
)
def test_what_is_no_config_or_no_quality_is_refused(pipe, arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.yaml").write_text("sparsity: {backend: reference}")
    (tmp_path / "flux.yaml").write_text("model_class: FluxTransformer2DModel")
    with pytest.raises(ValueError, match=said):
        chipsparse.enable(pipe, **arguments)
    assert RUNNER not in vars(pipe.transformer)


def test_what_is_no_scheduler_is_refused(pipe):
    with chipsparse.enable(pipe, CONFIG) as handle:
        for wrong in (5, "euler", type(pipe.scheduler), pipe):
            with pytest.raises(ValueError, match=r"^expected a scheduler, got "):
                handle.generation(wrong).__enter__()
        with handle.generation(pipe.scheduler):
            pass


def test_a_quality_is_one_of_the_profile_which_may_be_in_the_folder_of_the_pipeline(pipe, tmp_path):
    profile = chipsparse.find_profile(None, "WanTransformer3DModel")
    for arguments, name in (
        ({}, "balanced"),
        ({"quality": "fast"}, "fast"),
        ({"config": profile, "quality": "faithful"}, "faithful"),
        ({"config": profile.of_quality("chipmunk")}, "chipmunk"),
    ):
        with chipsparse.enable(pipe, **arguments) as handle:
            assert handle.config == profile.qualities[name]
            assert handle.report.to_dict()["quality"] == name
            assert f"quality     {name}" in handle.summary()
    with chipsparse.enable(pipe, CONFIG) as handle:
        assert handle.report.to_dict()["quality"] is None
        assert "quality" not in handle.summary()
    file = tmp_path / "chipsparse.yaml"
    file.write_text("model_class: FluxTransformer2DModel\nqualities: {fast: {}}")
    pipe.register_to_config(_name_or_path=str(tmp_path))
    try:
        with pytest.raises(ValueError, match=f"^{re.escape(str(file))} is a profile for FluxTrans"):
            chipsparse.enable(pipe, quality="fast")
    finally:
        pipe.register_to_config(_name_or_path="")


TILED = CONFIG.override({"tile": [2, 2, 2], "schedule.periodic.refresh_every": 3})


@torch.no_grad()
def looped(pipe, call):
    """The latents of a loop of one's own around a transformer, or around what stands for it."""
    text, _ = pipe.encode_prompt(PROMPT, do_classifier_free_guidance=False, max_sequence_length=16)
    pipe.scheduler.set_timesteps(6)
    latents = random(1, 4, 2, 4, 8, seed=1)
    for time in pipe.scheduler.timesteps:
        output, *_ = call(latents, time.expand(1), encoder_hidden_states=text, return_dict=False)
        latents = pipe.scheduler.step(output, time, latents, return_dict=False)[0]
    return latents


def test_forward_that_is_called_past_the_transformer_runs_dense_and_is_said(pipe):
    said = "called outside of a call of the transformer"
    expected = looped(pipe, pipe.transformer)
    with chipsparse.enable(pipe, TILED), pytest.warns(DenseWarning, match=said):
        assert torch.equal(looped(pipe, pipe.transformer.forward), expected)
    with chipsparse.enable(pipe, TILED, strict=True), pytest.raises(FallbackError, match=said):
        looped(pipe, pipe.transformer.forward)


def counting(forward, calls):
    def counted(self, *args, **kwargs):
        calls.append(args)
        return forward(self, *args, **kwargs)

    return counted


@pytest.mark.parametrize("patched", ["before", "after", "by the patched model's class"])
@pytest.mark.parametrize("model_class", [WanTransformer3DModel, WanTransformerBlock])
def test_a_class_with_a_wrapped_forward_computes_as_before(pipe, model_class, patched, monkeypatch):
    calls = []
    forward = model_class.forward
    with chipsparse.enable(pipe, TILED, strict=True):
        expected = wan(pipe)
    if patched == "before":
        monkeypatch.setattr(model_class, "forward", counting(forward, calls))
    with chipsparse.enable(pipe, TILED, strict=True) as handle:
        if patched != "before":
            ours = [each for each in pipe.transformer.modules() if stock_class(each) is model_class]
            owner = model_class if patched == "after" else type(ours[0])
            monkeypatch.setattr(owner, "forward", counting(owner.forward, calls))
        assert torch.equal(wan(pipe), expected)
        assert torch.equal(wan(pipe), expected)
        assert handle.report.actions()["sparse"] > 0
    calls.clear()
    wan(pipe)
    assert bool(calls) is (model_class.forward is not forward)  # what is the user's, stays
    monkeypatch.undo()
    assert model_class.forward is forward


def without_attention(self, hidden, text, temb, rotary):
    return hidden + self.ffn(self.norm3(hidden))


@pytest.mark.parametrize("change", [{}, {"mlp.density": "dense"}])
def test_blocks_that_compute_without_our_layers_are_said(pipe, change, monkeypatch):
    monkeypatch.setattr(WanTransformerBlock, "forward", without_attention)
    config = CONFIG.override(change)
    with chipsparse.enable(pipe, config) as handle:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DenseWarning)
            wan(pipe)
        said = [each for each in handle.report.fallbacks if "put in the model's place" in each]
        assert len(said) == 1
        assert said[0].startswith("attention runs dense in 3 of 3 layers (")
    with chipsparse.enable(pipe, config, strict=True), pytest.raises(FallbackError):
        wan(pipe)


COMPILED = {
    "call": lambda each: each.compile(backend="eager"),
    "forward": lambda each: setattr(each, "forward", torch.compile(each.forward, backend="eager")),
}


@pytest.mark.parametrize("compiled", COMPILED.values(), ids=COMPILED)
def test_a_transformer_that_is_compiled_in_its_own_place_is_refused(pipe, compiled):
    model = pipe.transformer
    said = r"transformer is compiled as.*compile its blocks with pipe.transformer.compile_repeated"
    refused = pytest.raises(ValueError, match=said)
    with mock.patch.dict(vars(model)):
        compiled(model)
        with refused:
            chipsparse.enable(pipe, CONFIG)
    with chipsparse.enable(pipe, CONFIG), mock.patch.dict(vars(model)):
        compiled(model)
        with refused:
            wan(pipe)


class WithAnArgument(WanTransformer3DModel):
    def forward(self, hidden_states, *args, scale=1.0, **kwargs):
        return super().forward(scale * hidden_states, *args, **kwargs)


class Wrapped(WanTransformer3DModel):
    @functools.wraps(WanTransformer3DModel.forward)
    def forward(self, *args, **kwargs):
        return WanTransformer3DModel.forward(self, *args, **kwargs)


@pytest.mark.parametrize("model_class", [WithAnArgument, Wrapped])
def test_a_subclass_is_served_as_the_class_that_it_is_of(pipe, model_class):
    with chipsparse.enable(pipe, TILED) as handle:
        expected = wan(pipe)
        with handle.generation():
            by_hand = looped(pipe, pipe.transformer)
    other = copy.copy(pipe)
    other.transformer = model_class.from_config(pipe.transformer.config)
    other.transformer.load_state_dict(pipe.transformer.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with chipsparse.enable(other, TILED, strict=True) as handle:
            assert torch.equal(wan(other), expected)
            with handle.generation():
                assert torch.equal(looped(other, other.transformer), by_hand)
            assert handle.report.pipeline.transformers == {"transformer": model_class.__name__}
    with chipsparse.enable(other, quality="faithful") as handle:  # the profile is that of Wan, too
        profile = chipsparse.find_profile(None, WAN.transformer_class)
        assert handle.config == profile.qualities["faithful"]


SKIPPED = {"listed": {"full": [0, 1, 5]}, "forecast": 0.5}
SKIPPING = SparsityConfig().override({"mlp.density": "dense", "schedule": SKIPPED})


# By the change, what does it, and the branches that start anew.
CHANGES = {
    "prompt": (lambda pipe: {"prompt_embeds": -pipe.kept}, ["cond"]),
    "prompt in place": (lambda pipe: {"prompt_embeds": pipe.kept.mul_(-1)}, ["cond"]),
    "prompt in place, then a copy of it": (
        lambda pipe: {"prompt_embeds": pipe.kept.mul_(-1).clone()},
        ["cond"],
    ),
    "equal prompt": (lambda pipe: {"prompt_embeds": pipe.kept.clone()}, []),
    "guidance": (lambda pipe: setattr(pipe, "_guidance_scale", 2.0), ["cond", "uncond"]),
    "LoRA scale": (lambda pipe: pipe.transformer.set_adapters("style", 0.3), ["cond", "uncond"]),
    "LoRA fused": (lambda pipe: pipe.transformer.fuse_lora(), ["cond", "uncond"]),
    "adapter": (lambda pipe: add_lora(pipe, "to_q"), ["cond", "uncond"]),
}


def test_every_change_is_seen_from_the_first_step_on():
    add_lora(pipe := tiny_wan_pipeline(), "to_q")
    scales = itertools.count(2)
    change = at_step(None, lambda: pipe.transformer.set_adapters("style", 1 / next(scales)))
    with chipsparse.enable(pipe, SKIPPING.override({"schedule.listed.full": [0, 4]})) as handle:
        wan(pipe, callback_on_step_end=change)
    assert [r.step for r in handle.report.steps if r.restarted] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("skips", [True, slow(False)], ids=["skipped", "sparse"])
def test_a_branch_starts_anew_where_its_conditioning_changes(name, skips):
    check_that_branches_start_anew(name, skips=skips)


@pytest.mark.parametrize("name", [name for name in CHANGES if "prompt" in name])
def test_a_branch_starts_anew_under_inference_mode_too(name):
    """PyTorch does not count there what is written to a tensor."""
    with torch.inference_mode():
        check_that_branches_start_anew(name, skips=True)


def check_that_branches_start_anew(name, *, skips):
    pipe = tiny_wan_pipeline()
    (change, branches) = CHANGES[name]
    if "LoRA" in name:
        add_lora(pipe, "to_q")
    text, negative = pipe.encode_prompt(PROMPT, max_sequence_length=16)
    pipe.kept = text.clone()
    config = SKIPPING if skips else CONFIG.override({"schedule.periodic.refresh_every": 9})
    call = {"prompt_embeds": pipe.kept, "negative_prompt_embeds": negative, "guidance_scale": 4.0}
    with chipsparse.enable(pipe, config) as handle:
        generate(
            pipe,
            {**call, "height": 32, "width": 64, "num_frames": 1},
            callback_on_step_end=lambda pipe, step, *_: (change(pipe) if step == 2 else None) or {},
            callback_on_step_end_tensor_inputs=["prompt_embeds"],
        )
    records = handle.report.steps
    assert [(r.step, r.branch) for r in records if r.restarted] == [(3, b) for b in branches]
    for branch in ("cond", "uncond"):
        of_branch = [record for record in records if record.branch == branch]
        if branch in branches:
            taken = "DDKDKD" if skips else "DRSDRS"
        else:
            taken = "DDKKKD" if skips else "DRSSSS"
        assert letters_of(actions(handle, branch)) == taken
        assert of_branch[4].forecast == (skips and branch not in branches)
    said = [each for each in handle.report.fallbacks if "was kept before is not used" in each]
    assert len(said) == bool(branches)


def test_inference_tensors_on_a_gpu_are_compared_only_where_the_user_runs_between(pipe):
    """To compare them is to wait for the GPU."""
    seen = []
    look = pipe.transformer.register_forward_pre_hook(
        lambda *_: seen.append(handle._runners[0].loop.is_undisturbed),
    )
    dense = SparsityConfig.dense()
    with chipsparse.enable(pipe, dense) as handle, torch.no_grad():
        wan(pipe, num_inference_steps=1)
        wan(pipe, num_inference_steps=1, callback_on_step_end=at_step(0, lambda: None))
        with handle.generation():
            looped(pipe, pipe.transformer)
    look.remove()
    assert seen == [True, False, *[False] * 6]
    with torch.inference_mode():
        on_gpu = torch.empty(1, device="meta")
        assert is_compared(on_gpu, undisturbed=False)
        assert not is_compared(on_gpu, undisturbed=True)
        assert is_compared(torch.empty(1), undisturbed=True)
    assert not is_compared(torch.empty(1), undisturbed=False)


def test_help_lists_every_quality_and_dir_what_is_public():
    listed = re.findall(r'``"(\w+)"``', chipsparse.enable.__doc__)
    assert set(listed) == set(QUALITIES)
    assert dir(chipsparse) == sorted([*chipsparse.__all__, "__version__"])
    assert all(hasattr(chipsparse, name) for name in dir(chipsparse))
