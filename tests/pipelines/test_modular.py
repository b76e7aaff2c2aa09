"""Modular pipelines: the position in their loop, their guiders' branches, and what is left."""

import copy

import diffusers
import pytest
import torch
from diffusers.hooks import SmoothedEnergyGuidanceConfig
from diffusers.modular_pipelines import SequentialPipelineBlocks

import chipsparse
from chipsparse import FallbackError, SparsityConfig
from chipsparse.pipelines.denoising_loop import denoising_loops
from tests.pipelines.model_state import actions, state_of
from tests.pipelines.modular_families import FAMILIES
from tests.pipelines.test_families import EXACT, SPARSE, assert_close
from tests.variants import slow_unless

SCORES = diffusers.LayerSkipConfig(
    [1],
    skip_attention=False,
    skip_attention_scores=True,
    skip_ff=False,
)


class CountedEnergyGuidance(diffusers.SmoothedEnergyGuidance):
    """The guider as it was meant: in diffusers 0.42 it counts no branches, and never hooks."""

    def prepare_models(self, denoiser):
        self._count_prepared += 1
        super().prepare_models(denoiser)


# Guiders that change the model for a branch: a family that they can run, their class and options,
# and which branch it is.
HOOKING = {
    "perturbed attention": (
        "qwen-image",
        diffusers.PerturbedAttentionGuidance,
        {"perturbed_guidance_config": SCORES, "perturbed_guidance_stop": 0.9},
        "cond_skip",
    ),
    "skipped layers": (
        "wan",
        diffusers.SkipLayerGuidance,
        {"skip_layer_config": diffusers.LayerSkipConfig([1]), "skip_layer_guidance_stop": 0.9},
        "cond_skip",
    ),
    "smoothed energy": (
        "qwen-image",
        CountedEnergyGuidance,
        {"seg_guidance_config": SmoothedEnergyGuidanceConfig([0]), "seg_guidance_stop": 0.9},
        "cond_seg",
    ),
    "a worse model": (
        "qwen-image",
        diffusers.AutoGuidance,
        {"auto_guidance_config": SCORES},
        "uncond",
    ),
}
QWEN = FAMILIES["qwen-image"]
generate = QWEN.generate


def taken(report):
    return [(record.step, record.action.value) for record in report.steps]


@pytest.fixture
def pipe():
    return QWEN.modular()


@pytest.mark.parametrize("name", slow_unless({"flux"}, FAMILIES))
def test_a_modular_pipeline_computes_what_the_plain_one_does(name):
    family = FAMILIES[name]
    plain = family.make()
    modular = family.modular(plain)
    with chipsparse.enable(plain, SPARSE) as handle:
        expected = family.generate(plain)
        as_plain = handle.report
    with chipsparse.enable(modular, SPARSE, strict=True) as handle:
        found = family.generate(modular)
        assert torch.equal(family.generate(modular), found)
    branches = {record.branch for record in handle.report.steps}
    assert branches == ({"cond"} if family.guidance is None else {"cond", "uncond"})
    if family.same:
        assert torch.equal(found, expected)
        assert taken(handle.report) == taken(as_plain)
    else:
        assert set(actions(handle)) == {"dense", "refresh", "sparse", "skip"}
    assert handle.report.pipeline.class_name == type(modular).__name__


@pytest.mark.parametrize("guider", slow_unless({"perturbed attention"}, HOOKING))
def test_a_branch_for_which_a_guider_changes_the_model_is_the_models_own(guider):
    name, guider_class, options, hooked = HOOKING[guider]
    family = FAMILIES[name]
    pipe = family.modular()
    pipe.update_components(guider=diffusers.ClassifierFreeGuidance(guidance_scale=3.0))
    unhooked = family.generate(pipe)
    pipe.update_components(guider=guider_class(guidance_scale=3.0, **options))
    dense = family.generate(pipe)
    assert not torch.equal(unhooked, dense)
    other = "cond" if hooked == "uncond" else "uncond"
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(family.generate(pipe), dense)
        assert "sparse" in actions(handle, other)
        assert set(actions(handle, hooked)) == {"dense"}
        assert any(f"branch {hooked} run" in sentence for sentence in handle.report.fallbacks)
    with chipsparse.enable(pipe, SPARSE) as handle:
        family.generate(pipe)
        assert set(actions(handle, hooked)) == {"dense", "skip"}
        assert set(actions(handle, other)) == {"dense", "refresh", "sparse", "skip"}
    with chipsparse.enable(pipe, EXACT, strict=True), pytest.raises(FallbackError, match=hooked):
        family.generate(pipe)
    assert torch.equal(family.generate(pipe), dense)
    # Guiders catch calls of PyTorch's attention, which none of ours makes.
    in_fp8 = SparsityConfig.dense().override({"attention.precision": "fp8"})
    with chipsparse.enable(pipe, in_fp8) as handle:
        found = family.generate(pipe)
    assert "fp8_dense_attention" in handle.report.backends
    near, far = ((found - each).norm() for each in (dense, unhooked))
    assert near < far / 5


def test_a_guider_may_be_exchanged_and_end_before_the_last_step(pipe):
    with chipsparse.enable(pipe, SPARSE) as handle:
        first = generate(pipe)
        pipe.update_components(guider=diffusers.ClassifierFreeGuidance(guidance_scale=3, stop=0.7))
        generate(pipe)
        assert len(actions(handle, "uncond")) == 4
        assert len(actions(handle, "cond")) == 6
        assert handle._runners[0].sparse.session.cache_bytes() == 0
        pipe.update_components(guider=diffusers.ClassifierFreeGuidance(guidance_scale=3.0))
        assert torch.equal(generate(pipe), first)


def test_nothing_is_left_on_blocks_guiders_and_models(pipe):
    generate(pipe)  # diffusers itself leaves word of a call on them
    inner = [pipe.guider, *denoising_loops(pipe._blocks)]

    def state(objects):
        return [(type(each), set(vars(each))) for each in objects]

    before = state_of(pipe.transformer), state([pipe, *inner])
    with chipsparse.enable(pipe, SPARSE):
        generate(pipe)
        assert state(inner) == before[1][1:]
        assert isinstance(pipe, diffusers.QwenImageModularPipeline)
        with pytest.raises(TypeError, match="cannot copy"):
            copy.copy(pipe)
    assert before == (state_of(pipe.transformer), state([pipe, *inner]))


def test_a_call_that_breaks_off_leaves_a_pipeline_that_works(pipe):
    with chipsparse.enable(pipe, SPARSE) as handle:
        expected = generate(pipe)

        def breaks(*_):
            if len(handle.report.steps) == 9:
                raise KeyboardInterrupt

        hook = pipe.transformer.register_forward_pre_hook(breaks)
        with pytest.raises(KeyboardInterrupt):
            generate(pipe)
        hook.remove()
        assert len(handle.report.steps) == 9
        assert handle._runners[0].sparse.session.cache_bytes() == 0
        assert not any("loop_step" in vars(each) for each in denoising_loops(pipe._blocks))
        assert torch.equal(generate(pipe), expected)


def test_a_pipeline_without_a_denoising_loop_or_its_model_is_refused():
    blocks = diffusers.QwenImageAutoBlocks()
    parts = {name: blocks.sub_blocks[name] for name in ("text_encoder", "decode")}
    for refused, said in (
        (
            SequentialPipelineBlocks.from_blocks_dict(parts),
            r"no denoising loop \(its blocks: text_encoder, decode\)",
        ),
        (blocks, "has not loaded its transformer yet; call load_comp"),
        (blocks.sub_blocks["decode"], "has no denoising loop"),
    ):
        with pytest.raises(ValueError, match=said):
            chipsparse.enable(refused.init_pipeline())
