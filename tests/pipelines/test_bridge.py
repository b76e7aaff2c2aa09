"""The bridge: attention that our op does not compute, and the op of a layer beside attention."""

from types import SimpleNamespace

import diffusers.models.attention_dispatch as dispatch
import pytest
import torch

import chipsparse
from chipsparse import SparsityConfig
from chipsparse.pipelines import bridge
from chipsparse.pipelines.feed_forward import ParallelFeedForward
from chipsparse.pipelines.feed_forward_forms import Form
from chipsparse.pipelines.patches import TAG
from tests.pipelines.families.flux2 import tiny_flux2_pipeline
from tests.pipelines.small_sparse import assert_close
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


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", ["none", "first", "second"])
@pytest.mark.parametrize("fused_rows", [0, 12])
def test_a_feed_forward_layer_beside_attention_is_the_plain_formula(bias, gate, fused_rows):
    attention, channels, neurons = 6, 8, 10
    rows = neurons * (1 if gate == "none" else 2)
    joined = random(2, 5, attention + channels, seed=1)
    first = torch.nn.Linear(channels, fused_rows + rows, bias)
    second = torch.nn.Linear(attention + neurons, channels, bias)
    block = SimpleNamespace(proj_mlp=first, act_mlp=torch.nn.SiLU(), proj_out=second)
    site = ParallelFeedForward(block)
    site.run_as(Form("silu", gate))
    with chipsparse.enable(tiny_flux2_pipeline(), SparsityConfig.dense()) as handle:
        adapter = handle._adapters[0]
        adapter.feed_forward_sites = [site, *adapter.feed_forward_sites[1:]]
        tag = bridge.make_tag(bridge.register_runner(adapter), 0)
        found = torch.ops.chipsparse.parallel_feed_forward(joined, tag, channels)
    up, out = first.weight.detach(), second.weight.detach()
    up_bias, out_bias = first.bias, second.bias
    hidden = joined[..., attention:].double() @ up[fused_rows:].double().T
    hidden = hidden + (up_bias[fused_rows:].double() if bias else 0)
    first, second = hidden.split(neurons, -1) if gate != "none" else (hidden, torch.ones(()))
    if gate == "second":
        first, second = second, first
    whole = torch.cat([joined[..., :attention].double(), first * first.sigmoid() * second], dim=-1)
    expected = whole @ out.double().T + (out_bias.double() if bias else 0)
    assert_close(found.double(), expected, 1e-5)
