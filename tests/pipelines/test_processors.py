"""Processors of attention: ours in place of stock ones, users' own, shared and fused ones."""

import diffusers.models.attention_dispatch as dispatch
import pytest
import torch
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor

import chipsparse
from chipsparse import SparsityConfig
from chipsparse.pipelines.patches import TAG
from tests.pipelines.families import ltx, stable_diffusion3
from tests.pipelines.model_state import state_of
from tests.pipelines.small_sparse import EXACT, SPARSE, assert_close, generate
from tests.pipelines.tiny_runs import FLUX
from tests.tiny_models import random, tiny_flux_pipeline

MATH = dispatch.AttentionBackendName._NATIVE_MATH
CALL = {**stable_diffusion3.PICTURE, **stable_diffusion3.GUIDED}
LAYERS = 3


@pytest.fixture
def pipe():
    """A model whose processors call PyTorch's attention themselves."""
    return stable_diffusion3.tiny_pipeline()


def processors(pipe):
    return [block.attn.processor for block in pipe.transformer.transformer_blocks]


class Other:
    """A user's own processor: it computes what another one does, and less."""

    def __init__(self, stock, share=0.5):
        self.stock = stock
        self.share = share

    def __call__(self, *args, **kwargs):
        return tuple(self.share * output for output in self.stock(*args, **kwargs))


def test_a_processor_of_the_users_own_is_left_alone(pipe):
    module = pipe.transformer.transformer_blocks[1].attn
    other = module.processor = Other(module.processor)
    expected = generate(pipe, CALL)
    with chipsparse.enable(pipe, SparsityConfig.dense()):
        assert module.processor is other
        assert torch.equal(generate(pipe, CALL), expected)
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(generate(pipe, CALL), expected)
    assert handle.report.fallbacks == [
        f"attention runs dense in 1 of {LAYERS} layers (first: layer 1): "
        "its processor Other does not dispatch its attention",
    ]
    last = handle.report.steps[-1]
    assert len(last.fractions("attention")) == LAYERS - 1
    assert len(last.fractions("mlp")) == LAYERS
    assert module.processor is other
    assert set(vars(other)) == {"stock", "share"}


def test_fused_projections_run_dense_and_come_apart_again(pipe):
    stock = processors(pipe)
    expected = generate(pipe, CALL)
    pipe.transformer.fuse_qkv_projections()
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(generate(pipe, CALL), expected)
    (sentence,) = handle.report.fallbacks
    assert sentence.startswith(f"attention runs dense in {LAYERS} of {LAYERS} layers")
    assert sentence.endswith("AttnProcessor2_0 does not dispatch its attention")
    assert (handle.report.steps[-1].attention_kept, handle.report.steps[-1].mlp_kept) == (None, 1)
    with_room_for_mlp = handle.report.cache_bytes
    with chipsparse.enable(pipe, EXACT.override({"attention.density": "dense"})) as handle:
        generate(pipe, CALL)
    assert handle.report.cache_bytes == with_room_for_mlp
    pipe.transformer.unfuse_qkv_projections()
    assert list(map(type, processors(pipe))) == list(map(type, stock))
    assert_close(generate(pipe, CALL), expected)


def test_fused_projections_of_flux_run_sparse():
    pipe = tiny_flux_pipeline()
    expected = FLUX.generate(pipe)
    pipe.transformer.fuse_qkv_projections()
    with chipsparse.enable(pipe, FLUX.EXACT) as handle:
        assert_close(FLUX.generate(pipe), expected)
    assert handle.report.fallbacks == []


def test_modules_may_share_one_processor_and_one_that_was_kept_is_the_models_own_again():
    """Cross-attention, too: it has no tag."""
    pipe = ltx.tiny_ltx_pipeline()
    dense = generate(pipe, ltx.VIDEO)
    with chipsparse.enable(pipe, SPARSE):
        sparse = generate(pipe, ltx.VIDEO)
        kept = dict(pipe.transformer.attn_processors)
    shared = LTXVideoAttnProcessor()
    pipe.transformer.set_attn_processor(shared)
    before = state_of(pipe.transformer)
    with chipsparse.enable(pipe, SPARSE) as handle:
        assert torch.equal(generate(pipe, ltx.VIDEO), sparse)
    assert handle.report.fallbacks == []
    assert state_of(pipe.transformer) == before
    block = pipe.transformer.transformer_blocks[1]
    assert block.attn1.processor is block.attn2.processor is shared
    pipe.transformer.set_attn_processor(kept)
    assert torch.equal(generate(pipe, ltx.VIDEO), dense)


@pytest.mark.parametrize("how", ["masked", "untagged", "causal"])
def test_what_our_op_does_not_compute_goes_to_the_processors_own_backend(how, monkeypatch):
    """And not to the one that is active in all of diffusers."""
    masks = []

    def count(*args, attn_mask, **kwargs):
        masks.append(attn_mask)
        return dispatch._native_math_attention(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setitem(dispatch._AttentionBackendRegistry._backends, MATH, count)
    pipe = tiny_flux_pipeline()
    module = pipe.transformer.transformer_blocks[0].attn
    module.processor._attention_backend = MATH
    query = random(1, 9, 2, 8, seed=0)
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool) if how == "masked" else None
    options = {"attn_mask": mask}
    with chipsparse.enable(pipe, SparsityConfig()), torch.no_grad():
        if how == "causal":
            options = {"attn_mask": getattr(module, TAG), "is_causal": True}
        backend = module.processor._attention_backend
        assert backend != MATH
        dispatch.dispatch_attention_fn(query, query, query, **options, backend=backend)
    assert len(masks) == 1
    assert masks[0] is mask
    assert module.processor._attention_backend == MATH
