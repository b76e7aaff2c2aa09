"""Wan: nothing of a call shows in another, and what else diffusers does to a model."""

import gc
import weakref

import pytest
import torch
from accelerate import cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module

import chipsparse
from chipsparse.pipelines.adapter import ADAPTER
from tests.pipelines.changes import offload_groups
from tests.pipelines.model_state import state_of
from tests.pipelines.tiny_runs import STEPS, WAN
from tests.tiny_models import tiny_wan_pipeline, tiny_wan_transformer
from tests.variants import slow

SPARSE, generate = WAN.SPARSE, WAN.generate
CPU = torch.device("cpu")


@pytest.fixture
def pipe():
    return tiny_wan_pipeline()


@pytest.fixture(scope="module")
def dense():
    return generate(tiny_wan_pipeline())


@pytest.fixture(scope="module")
def sparse():
    pipe = tiny_wan_pipeline()
    with chipsparse.enable(pipe, SPARSE):
        return generate(pipe)


@pytest.mark.parametrize("offload", ["never", "always"])
def test_the_order_of_calls_does_not_matter(offload, pipe):
    changes = [
        {},
        {"height": 32, "width": 48},
        {"num_frames": 5, "num_inference_steps": STEPS - 2},
        {"prompt": "a green square moves up", "guidance_scale": 1.0},
        {"prompt": ["a red circle", "a blue square moves right"]},
    ]
    other, config = tiny_wan_pipeline(), SPARSE.override({"memory.offload": offload})
    with chipsparse.enable(pipe, SPARSE), chipsparse.enable(other, config):
        forward = [generate(pipe, **change) for change in changes]
        backward = [generate(other, **change) for change in reversed(changes)]
    assert all(map(torch.equal, forward, reversed(backward)))


def test_a_failing_enable_leaves_the_pipeline_as_it_was():
    pipe = tiny_wan_pipeline(transformer_2=tiny_wan_transformer(seed=9), boundary_ratio=0.5)
    del pipe.transformer_2.blocks[1].attn1.processor
    before = state_of(pipe.transformer)
    with pytest.raises(AttributeError):
        chipsparse.enable(pipe, SPARSE)
    assert state_of(pipe.transformer) == before
    assert ADAPTER not in vars(pipe.transformer_2)


def test_nothing_keeps_a_dropped_pipeline_alive():
    pipe = tiny_wan_pipeline()
    chipsparse.enable(pipe, SPARSE)
    generate(pipe, num_inference_steps=2)
    transformer = weakref.ref(pipe.transformer)
    del pipe
    gc.collect()
    assert transformer() is None


def test_group_offload_by_block(pipe, sparse):
    with chipsparse.enable(pipe, SPARSE) as handle:
        offload_groups(pipe.transformer)
        assert torch.equal(generate(pipe), sparse)
    assert handle.report.fallbacks == []


@pytest.mark.parametrize("enable_first", [True, slow(False)])
def test_model_offload_hooks_may_come_and_go(pipe, sparse, dense, enable_first):
    """`enable_model_cpu_offload` with the CPU in the place of the accelerator."""
    handle = chipsparse.enable(pipe, SPARSE) if enable_first else None
    for _ in range(2):
        cpu_offload_with_hook(pipe.transformer, CPU)
        handle = handle or chipsparse.enable(pipe, SPARSE)
        assert torch.equal(generate(pipe), sparse)
        remove_hook_from_module(pipe.transformer, recurse=True)
    cpu_offload_with_hook(pipe.transformer, CPU)
    handle.disable()
    assert torch.equal(generate(pipe), dense)
    assert hasattr(pipe.transformer, "_hf_hook")
