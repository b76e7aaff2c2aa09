"""The device and dtype in which a transformer computes, and what its weights will take there.

For each way in which pipelines place it. Fake tensors stand for those on GPUs, and ``meta`` for a
device; of hooks nothing is asked but where they bring the weights.
"""

from dataclasses import replace
from types import SimpleNamespace

import accelerate
import pytest
import torch
from accelerate import hooks
from torch._subclasses.fake_tensor import FakeTensorMode

import chipsparse
from chipsparse import SparsityConfig
from chipsparse.pipelines.diffusers_hooks import hooks_on
from chipsparse.pipelines.execution import Execution, autocast_bytes, execution_of, pending_bytes
from tests.pipelines.changes import offload_groups
from tests.pipelines.tiny_runs import FLUX
from tests.tiny_models import tiny_flux_pipeline, tiny_wan_transformer

CPU = torch.device("cpu")
FIRST = torch.device("cuda:0")
SECOND = torch.device("cuda:1")
DEVICE = torch.device("meta")
HIDDEN = torch.zeros(1, dtype=torch.bfloat16)


@pytest.fixture
def model():
    return tiny_wan_transformer(num_layers=6)


def device_of(model, hidden=HIDDEN):
    return execution_of(model, model.blocks[0].attn1.to_q.weight, hidden).device


def test_where_the_weights_are_and_not_the_latents(model):
    assert device_of(model) == CPU
    with FakeTensorMode():
        weight = torch.empty(2, 2, device=SECOND)
        latents = torch.empty(2, device=FIRST, dtype=torch.float16)
    assert execution_of(model, weight, latents) == Execution(SECOND, torch.float16)


def test_where_hooks_bring_the_weights(model):
    for hook in (
        hooks.CpuOffload(SECOND),  # model offload
        hooks.AlignDevicesHook(execution_device=1),  # a device map
        hooks.SequentialHook(hooks.AlignDevicesHook(), hooks.CpuOffload("cuda:1")),
    ):
        model._hf_hook = hook
        assert device_of(model) == SECOND
    del model._hf_hook
    offload_groups(model)
    for module in model.modules():
        hook = hooks_on(module).get("group_offloading")
        if hook is not None:
            hook.group.onload_device = SECOND
    assert device_of(model) == SECOND


def test_where_hooks_of_the_parts_bring_the_weights(model):
    """Sequential offloading: the weights are on meta, and the outer hook moves nothing."""
    model.to("meta")
    assert device_of(model) == CPU
    model._hf_hook = hooks.AlignDevicesHook(io_same_device=True)
    model.blocks[1].ffn.net[2]._hf_hook = hooks.AlignDevicesHook(execution_device=SECOND)
    assert device_of(model) == SECOND


def test_autocast_decides_about_the_dtype(model):
    weight = model.blocks[0].attn1.to_q.weight
    with torch.autocast("cpu", torch.float16):
        found = execution_of(model, weight, HIDDEN)
        assert found == Execution(CPU, torch.float16, autocast=True)
        assert execution_of(model, weight, HIDDEN.double()).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert execution_of(model, weight, HIDDEN) == Execution(CPU, torch.bfloat16)
    with torch.autocast("cuda", torch.float16):  # of another device
        assert execution_of(model, weight, HIDDEN) == Execution(CPU, torch.bfloat16)


@pytest.mark.parametrize(
    "places",
    [
        {"transformer_blocks": 0, "single_transformer_blocks": 1},
        {"transformer_blocks": "cuda:0", "proj_out": torch.device("cuda:1")},
    ],
    ids=str,
)
def test_a_transformer_that_is_split_is_refused(places):
    pipe = tiny_flux_pipeline()
    for whole in ({"": 0}, {"transformer_blocks": 0, "proj_out": "cpu", "norm_out": "disk"}):
        pipe.transformer.hf_device_map = whole
        chipsparse.enable(pipe, SparsityConfig()).disable()
    pipe.transformer.hf_device_map = places
    with pytest.raises(ValueError, match="is split over cuda:0, cuda:1; chipsparse runs a"):
        chipsparse.enable(pipe, SparsityConfig())
    assert not hasattr(pipe.transformer, "chipsparse_adapter")


def test_memory_is_planned_and_layers_are_timed_where_the_model_computes(monkeypatch):
    """And not where the latents are before hooks have moved them."""
    pipe = tiny_flux_pipeline()
    asked = []
    with chipsparse.enable(pipe, FLUX.SPARSE) as handle:
        (adapter,) = handle._adapters
        begin = adapter.session.begin
        pipe.transformer._hf_hook = SimpleNamespace(execution_device=DEVICE)

        def look(decision, plan, reading):
            asked.append(reading.device)
            return begin(decision, plan, replace(reading, device=CPU))

        monkeypatch.setattr(adapter.session, "begin", look)
        FLUX.generate(pipe, num_inference_steps=3)
        del pipe.transformer._hf_hook
    assert asked == [DEVICE] * 3


def nbytes(module):
    return sum(parameter.nbytes for parameter in module.parameters())


def test_a_model_comes_as_a_whole_or_is_there(model):
    assert pending_bytes(model, CPU) == 0
    assert pending_bytes(model, DEVICE) == nbytes(model)
    assert pending_bytes(model.to(DEVICE), DEVICE) == 0


@pytest.mark.parametrize("there", [True, False])
def test_the_model_before_this_one_leaves_first(model, there):
    before = tiny_wan_transformer(num_layers=9)
    before = before.to(DEVICE) if there else before
    hook = hooks.CpuOffload(DEVICE, hooks.UserCpuOffloadHook(before, hooks.CpuOffload(DEVICE)))
    hooks.add_hook_to_module(model, hook)
    assert pending_bytes(model, DEVICE) == nbytes(model) - there * nbytes(before)
    assert (pending_bytes(model, DEVICE) < 0) == there


@pytest.mark.parametrize("count", [1, 2])
def test_groups_of_blocks(model, count):
    offload_groups(model, count)
    block = nbytes(model.blocks[0])
    others = nbytes(model) - 6 * nbytes(model.blocks[0])
    largest = sorted([*[count * block] * (6 // count), others])[-3:]
    assert pending_bytes(model, DEVICE) == sum(largest) < nbytes(model)


def test_one_module_at_a_time(model):
    largest = max(
        sum(parameter.nbytes for parameter in module.parameters(recurse=False))
        for module in model.modules()
    )
    accelerate.cpu_offload(model, execution_device=CPU)
    assert next(model.blocks[0].parameters()).is_meta
    assert pending_bytes(model, torch.device("cuda")) == largest < nbytes(model) / 10


def test_copies_that_autocast_keeps(model):
    """PyTorch's cache has those of float32 weights that could be trained."""
    assert autocast_bytes(model, torch.bfloat16) == nbytes(model) // 2
    model.blocks[0].requires_grad_(False)
    assert autocast_bytes(model, torch.bfloat16) == (nbytes(model) - nbytes(model.blocks[0])) // 2
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert autocast_bytes(model, torch.bfloat16) == 0
    assert autocast_bytes(model.half(), torch.bfloat16) == 0
