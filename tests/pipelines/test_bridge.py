"""The bridge: attention that our op does not compute."""

import diffusers.models.attention_dispatch as dispatch
import pytest
import torch

import chipsparse
from chipsparse import SparsityConfig
from chipsparse.pipelines.patches import TAG
from tests.tiny_models import random, tiny_flux_pipeline

MATH = dispatch.AttentionBackendName._NATIVE_MATH


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
