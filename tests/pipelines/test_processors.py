"""Models whose processors call PyTorch's attention themselves: ours, theirs, and other ones."""

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.attention_processor import (
    CogVideoXAttnProcessor2_0,
    JointAttnProcessor2_0,
    MochiAttnProcessor2_0,
)

import chipsparse
from chipsparse import SparsityConfig
from chipsparse.pipelines.cogvideox import CogVideoXProcessor
from chipsparse.pipelines.mochi import MochiProcessor
from chipsparse.pipelines.stable_diffusion3 import JointProcessor
from tests.pipelines.families import cogvideox, mochi, stable_diffusion3
from tests.pipelines.model_state import state_of
from tests.pipelines.small_sparse import EXACT, SPARSE, assert_close, generate
from tests.variants import slow

MODELS = {
    "cogvideox": (
        lambda: cogvideox.tiny_pipeline(**cogvideox.ROTARY),
        {**cogvideox.VIDEO, **cogvideox.GUIDED},
        (CogVideoXAttnProcessor2_0, CogVideoXProcessor),
    ),
    "mochi": (
        mochi.tiny_pipeline,
        {**mochi.VIDEO, **mochi.prompts(7, negative=[3]), "guidance_scale": 4.5},
        (MochiAttnProcessor2_0, MochiProcessor),
    ),
    "sd3": (
        stable_diffusion3.tiny_pipeline,
        {**stable_diffusion3.PICTURE, **stable_diffusion3.GUIDED},
        (JointAttnProcessor2_0, JointProcessor),
    ),
}
each_model = pytest.mark.parametrize("model", MODELS)


def attentions(pipe):
    blocks = pipe.transformer.transformer_blocks
    return [block.attn if hasattr(block, "attn") else block.attn1 for block in blocks]


def processors(pipe):
    return [module.processor for module in attentions(pipe)]


class Other:
    """A user's own processor: it computes what another one does, and less."""

    def __init__(self, stock, share=0.5):
        self.stock = stock
        self.share = share

    def __call__(
        self,
        attn,
        hidden_states,
        encoder_hidden_states=None,
        attention_mask=None,
        image_rotary_emb=None,
    ):
        rotary = {} if image_rotary_emb is None else {"image_rotary_emb": image_rotary_emb}
        outputs = self.stock(attn, hidden_states, encoder_hidden_states, attention_mask, **rotary)
        return tuple(self.share * output for output in outputs)


def call_arguments(pipe, call):
    """What the pipeline passes to its transformer at the first step."""
    seen = []
    hook = pipe.transformer.register_forward_pre_hook(
        lambda _module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    generate(pipe, call, num_inference_steps=2)
    hook.remove()
    return seen[0]


@each_model
def test_stock_processors_come_back(model):
    make, call, (stock, ours) = MODELS[model]
    pipe = make()
    before, objects = state_of(pipe.transformer), processors(pipe)
    with chipsparse.enable(pipe, SPARSE):
        assert {type(processor) for processor in processors(pipe)} == {ours}
        generate(pipe, call)
    assert {type(processor) for processor in processors(pipe)} == {stock}
    assert all(now is was for now, was in zip(processors(pipe), objects, strict=True))
    assert state_of(pipe.transformer) == before


@each_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ours_compute_the_same_bits(model, dtype):
    make, call, _ = MODELS[model]
    pipe = make()
    arguments = call_arguments(pipe, call)
    pipe.transformer.to(dtype)
    arguments = {
        name: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in arguments.items()
    }
    with torch.no_grad():
        expected = pipe.transformer(**arguments)[0]
        with chipsparse.enable(pipe, SparsityConfig.dense()):
            assert torch.equal(pipe.transformer(**arguments)[0], expected)


@each_model
def test_gradients_are_those_of_the_stock_processors(model):
    make, call, _ = MODELS[model]
    pipe = make()
    arguments = call_arguments(pipe, call)
    weight = attentions(pipe)[0].to_k.weight

    def gradient():
        weight.grad = None
        pipe.transformer(**arguments)[0].square().mean().backward()
        return weight.grad

    expected = gradient()
    assert expected.abs().max() > 0
    with chipsparse.enable(pipe, SPARSE):
        assert torch.equal(gradient(), expected)


@each_model
def test_a_processor_of_the_users_own_is_left_alone(model):
    make, call, _ = MODELS[model]
    pipe = make()
    module = attentions(pipe)[1]
    other = module.processor = Other(module.processor)
    expected = generate(pipe, call)
    assert not torch.equal(expected, generate(make(), call))
    with chipsparse.enable(pipe, SparsityConfig.dense()):
        assert module.processor is other
        assert torch.equal(generate(pipe, call), expected)
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(generate(pipe, call), expected)
        assert handle.report.fallbacks == [
            f"attention runs dense in 1 of {len(attentions(pipe))} layers (first: layer 1): "
            "its processor Other does not dispatch its attention"
        ]
        last = handle.report.steps[-1]
        assert len(last.fractions("attention")) == len(attentions(pipe)) - 1
        assert len(last.fractions("mlp")) == len(attentions(pipe))
    assert module.processor is other
    assert set(vars(other)) == {"stock", "share"}


@each_model
@pytest.mark.parametrize("back", [slow(False), True], ids=["own", "stock"])
def test_a_processor_that_is_replaced_later_runs_dense_and_stays(model, back):
    make, call, (stock, _) = MODELS[model]
    pipe = make()
    module = attentions(pipe)[0]
    new = stock() if back else Other(module.processor)
    with chipsparse.enable(pipe, EXACT) as handle:
        module.processor = new
        found = generate(pipe, call)
        assert handle.report.fallbacks == [
            f"attention runs dense in 1 of {len(attentions(pipe))} layers (first: layer 0): "
            "its processor was replaced"
        ]
    assert module.processor is new
    assert_close(found, generate(pipe, call))
    others = processors(pipe)[1:]
    assert {type(processor) for processor in others} == {stock}


@each_model
def test_another_backend_is_that_of_the_dense_attention_without_records(model):
    make, call, _ = MODELS[model]
    pipe = make()
    expected = generate(pipe, call)
    dense_layers = EXACT.override({"schedule.first_dense_layers": len(attentions(pipe))})
    # diffusers sets it globally, too: restore it
    with attention_backend("native"), chipsparse.enable(pipe, dense_layers) as handle:
        pipe.transformer.set_attention_backend("_native_math")
        backends = {str(backend.value) for backend in handle._adapters[0]._unpatched_backends}
        assert backends == {"_native_math"}
        assert_close(generate(pipe, call), expected)
        pipe.transformer.reset_attention_backend()
        assert handle._adapters[0]._unpatched_backends[0] is None
        assert handle.report.fallbacks == []
    assert_close(generate(pipe, call), expected, 1e-6)


@pytest.mark.parametrize("model", ["cogvideox", "sd3"])
def test_fused_projections_run_dense_and_come_apart_again(model):
    make, call, (stock, _) = MODELS[model]
    pipe = make()
    expected = generate(pipe, call)
    pipe.transformer.fuse_qkv_projections()
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(generate(pipe, call), expected)
        (sentence,) = handle.report.fallbacks
        layers = len(attentions(pipe))
        assert sentence.startswith(f"attention runs dense in {layers} of {layers} layers")
        assert sentence.endswith("AttnProcessor2_0 does not dispatch its attention")
        assert handle.report.steps[-1].attention_kept is None
        assert handle.report.steps[-1].mlp_kept == 1
        with_room_for_mlp = handle.report.cache_bytes
    with chipsparse.enable(pipe, EXACT.override({"attention.density": "dense"})) as handle:
        generate(pipe, call)
        assert handle.report.cache_bytes == with_room_for_mlp
    pipe.transformer.unfuse_qkv_projections()
    assert {type(processor) for processor in processors(pipe)} == {stock}
    assert_close(generate(pipe, call), expected)
