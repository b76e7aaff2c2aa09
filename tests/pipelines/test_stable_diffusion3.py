"""The Stable Diffusion 3 adapter: further pipelines, two attentions in a block, skipped layers."""

import pytest
import torch
from diffusers import (
    SD3ControlNetModel,
    StableDiffusion3ControlNetPipeline,
    StableDiffusion3InpaintPipeline,
    StableDiffusion3PAGPipeline,
    StableDiffusion3Pipeline,
)
from PIL import Image

import chipsparse
from chipsparse.pipelines.stable_diffusion3 import StableDiffusion3Adapter
from tests.pipelines.changes import with_an_effect
from tests.pipelines.families.stable_diffusion3 import (
    DUAL,
    GUIDED,
    IMAGE,
    MEDIUM,
    PICTURE,
    TEXT,
    TRANSFORMER,
    random,
    tiny_pipeline,
)
from tests.pipelines.model_state import actions
from tests.pipelines.small_sparse import EXACT, SPARSE, STEPS, assert_close, generate
from tests.tiny_models import seeded

TOKENS = 8 * 12
MASK = Image.new("L", (48, 32), 0)
MASK.paste(255, (8, 8, 32, 24))


def with_controlnet():
    controlnet = seeded(SD3ControlNetModel, **{**TRANSFORMER, "num_layers": 2})
    components = {"controlnet": with_an_effect(controlnet)}
    return tiny_pipeline(StableDiffusion3ControlNetPipeline, components)


PIPELINES = {
    "inpainting": (
        lambda: tiny_pipeline(StableDiffusion3InpaintPipeline),
        {**PICTURE, **IMAGE, "mask_image": MASK},
    ),
    "controlnet": (
        with_controlnet,
        {**PICTURE, "control_image": random(1, 3, 32, 48, seed=2).sigmoid()},
    ),
}


@pytest.mark.parametrize(("name", "guidance_scale"), [*zip(PIPELINES, [1.0, 5.0], strict=True)])
def test_further_pipelines_keep_their_result(name, guidance_scale):
    make, call = PIPELINES[name]
    pipe, call = make(), {**call, "guidance_scale": guidance_scale}
    expected = generate(pipe, call)
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(generate(pipe, call), expected)
        assert handle.report.fallbacks == []
        assert {record.branch for record in handle.report.steps} == {"call0"}
        assert actions(handle, "call0")[:3] == ["dense", "refresh", "sparse"]


def test_the_control_has_an_effect():
    make, call = PIPELINES["controlnet"]
    other = {**call, "controlnet_conditioning_scale": 0.5}
    assert (generate(make(), other) - generate(make(), call)).abs().max() > 0.01


def test_a_mask_that_the_stock_processor_does_not_read_changes_nothing():
    pipe = tiny_pipeline()
    call = {**PICTURE, "joint_attention_kwargs": {"attention_mask": torch.zeros(1, TOKENS + TEXT)}}
    assert torch.equal(generate(pipe, call), generate(pipe, PICTURE))
    with chipsparse.enable(pipe, SPARSE):
        assert torch.equal(generate(pipe, call), generate(pipe, PICTURE))


def test_the_second_attention_of_dual_layers_is_dense_and_the_report_says_so_once():
    pipe = tiny_pipeline(**MEDIUM)
    stock = [block.attn2.processor for block in pipe.transformer.transformer_blocks[:2]]
    seen = []
    with chipsparse.enable(pipe, SPARSE) as handle:
        for block, processor in zip(pipe.transformer.transformer_blocks, stock, strict=False):
            assert block.attn2.processor is processor
            assert block.attn.processor is not processor
            block.attn2.to_q.register_forward_hook(lambda *_: seen.append(None))
        generate(pipe, PICTURE)
        assert len(seen) == 2 * STEPS
        assert handle.report.notes == [f"{DUAL}: only the joint one is sparse"]
        assert handle.report.fallbacks == []
        last = handle.report.steps[-1]
        assert (
            len(last.fractions("attention")) == len(last.fractions("mlp")) == MEDIUM["num_layers"]
        )
        seen.clear()
    with chipsparse.enable(pipe, SPARSE.override({"attention.density": "dense"})) as handle:
        generate(pipe, PICTURE)
        assert not [note for note in handle.report.notes if note.startswith(DUAL)]
        assert handle.report.fallbacks == []


def test_dual_layers_are_a_kind_of_their_own():
    config = {**TRANSFORMER, "patch_size": 2, "num_layers": 24}
    medium = {**config, "dual_attention_layers": tuple(range(13))}
    for each, expected in (
        (config | {"dual_attention_layers": ()}, [("joint", 24, 4)]),
        (medium, [("dual", 13, 8), ("joint", 11, 4)]),
    ):
        layout = StableDiffusion3Adapter.planned_layout(each, latents=(1, 128, 128))
        kinds = [(kind.name, kind.layers, kind.projections) for kind in layout.kinds]
        assert kinds == expected
        assert layout.layers == 24
        assert layout.grid_tokens == 64 * 64


SKIPPING = {
    **PICTURE,
    **GUIDED,
    "num_inference_steps": 10,
    "skip_guidance_layers": [1],
    "skip_layer_guidance_start": 0.15,
    "skip_layer_guidance_stop": 0.75,
}


def test_what_the_enabled_pipeline_did_before_says_nothing_of_another_one():
    """Which may be guided or not: of its batches nobody knows whether halves belong together."""
    guided, found = {**PICTURE, **GUIDED, "num_inference_steps": STEPS}, []
    for before in (PICTURE, GUIDED):
        pipe = tiny_pipeline()
        other = StableDiffusion3Pipeline(**pipe.components)
        with chipsparse.enable(pipe, SPARSE):
            generate(pipe, {**PICTURE, **before, "num_inference_steps": 2})
            found.append(generate(other, guided))
    assert torch.equal(*found)


def test_skip_layer_guidance_is_known_beforehand():
    branches = StableDiffusion3Adapter.further_branches
    assert branches(SKIPPING.get) == 1
    assert branches({**SKIPPING, "guidance_scale": 1.0}.get) == 0
    assert branches(GUIDED.get) == 0


def test_skip_layer_guidance_is_a_branch_of_its_own():
    """Its calls have one sample and pass a layer over, between calls with two samples."""
    pipe = tiny_pipeline()
    expected = generate(pipe, SKIPPING)
    assert not torch.equal(expected, generate(pipe, {**SKIPPING, "skip_guidance_layers": None}))
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(generate(pipe, SKIPPING), expected)
        assert handle.report.fallbacks == []
        whole, skipping = (
            {record.step: record for record in handle.report.steps if record.branch == branch}
            for branch in ("call0", "call1")
        )
        assert list(whole) == list(range(10))
        assert list(skipping) == list(range(2, 8))
        assert [whole[step].action.value for step in range(4)] == [
            "dense",
            "refresh",
            "sparse",
            "sparse",
        ]
        assert [skipping[step].action.value for step in range(2, 6)] == [
            "dense",
            "dense",  # the next step is a refresh anyway
            "refresh",
            "sparse",
        ]
        assert len(whole[5].fractions("attention")) == TRANSFORMER["num_layers"]
        assert len(skipping[5].fractions("attention")) == TRANSFORMER["num_layers"] - 1
        assert handle._adapters[0].session.cache_bytes() == 0  # the pipeline says when it is done
    with chipsparse.enable(pipe, SPARSE):
        sparse = generate(pipe, SKIPPING)
        assert sparse.isfinite().all()
        assert torch.equal(generate(pipe, SKIPPING), sparse)


def test_perturbed_attention_guidance_keeps_its_processors():
    pipe = tiny_pipeline(StableDiffusion3PAGPipeline, {"pag_applied_layers": ["blocks.1"]})
    call = {**PICTURE, **GUIDED, "pag_scale": 2.0}
    expected = generate(pipe, call)
    with chipsparse.enable(pipe, EXACT) as handle:
        ours = [block.attn.processor for block in pipe.transformer.transformer_blocks]
        assert_close(generate(pipe, call), expected)
        assert handle.report.fallbacks == [
            "attention runs dense in 1 of 3 layers (first: layer 1): its processor was replaced"
        ]
        assert [block.attn.processor for block in pipe.transformer.transformer_blocks] == ours
    assert torch.equal(generate(pipe, call), expected)


@pytest.mark.parametrize("dim", [0, 1])
def test_feed_forward_layers_in_chunks_run_dense_and_say_so(dim):
    pipe = tiny_pipeline()
    call = {**PICTURE, **GUIDED}
    expected = generate(pipe, call)
    pipe.transformer.enable_forward_chunking(chunk_size=2, dim=dim)
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(generate(pipe, call), expected)
        assert handle.report.fallbacks == [
            "MLP runs dense in 3 of 3 layers (first: layer 0): its block runs it in chunks"
        ]
        pipe.transformer.disable_forward_chunking()
        generate(pipe, call)
        assert handle.report.fallbacks == []
