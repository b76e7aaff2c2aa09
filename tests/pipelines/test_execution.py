"""Where a transformer computes, and in which dtype, for each way in which pipelines place it.

Fake tensors stand for those on GPUs; of hooks nothing is asked but where they bring the weights.
"""

from types import SimpleNamespace

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, CpuOffload, SequentialHook, add_hook_to_module
from diffusers.hooks import apply_group_offloading
from torch._subclasses.fake_tensor import FakeTensorMode

import chipsparse
from chipsparse import SparsityConfig
from chipsparse.pipelines.diffusers_hooks import hooked_modules
from chipsparse.pipelines.execution import Execution, execution_of
from tests.pipelines import test_flux as flux
from tests.tiny_models import tiny_flux_pipeline, tiny_wan_transformer

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")
HIDDEN = torch.zeros(1, dtype=torch.bfloat16)


@pytest.fixture
def model():
    return tiny_wan_transformer(num_layers=2)


def device_of(model, hidden=HIDDEN):
    return execution_of(model, model.blocks[0].attn1.to_q.weight, hidden).device


def test_modules_with_hooks_are_found_as_by_looking_at_all_of_them(model):
    assert list(hooked_modules(model)) == []
    apply_group_offloading(
        model, onload_device=CPU, offload_type="block_level", num_blocks_per_group=1
    )
    add_hook_to_module(model.blocks[1].attn1.to_q, AlignDevicesHook(CPU))
    model.unused = None  # a module may hold nothing in a place
    expected = [
        module
        for module in model.modules()
        if hasattr(module, "_hf_hook") or hasattr(module, "_diffusers_hook")
    ]
    assert len(expected) > 2
    assert {*map(id, hooked_modules(model))} == {*map(id, expected)}


def test_where_the_weights_are_and_not_the_latents(model):
    assert device_of(model) == CPU
    with FakeTensorMode():
        weight = torch.empty(2, 2, device=SECOND)
        latents = torch.empty(2, device=FIRST, dtype=torch.float16)
    assert execution_of(model, weight, latents) == Execution(SECOND, torch.float16)


@pytest.mark.parametrize(
    "hook",
    [
        CpuOffload(SECOND),
        AlignDevicesHook(execution_device=1),
        SequentialHook(AlignDevicesHook(), CpuOffload("cuda:1")),
    ],
    ids=["model offload", "device map", "several in one"],
)
def test_where_a_hook_brings_the_weights(model, hook):
    model._hf_hook = hook
    assert device_of(model) == SECOND


def test_where_hooks_of_the_parts_bring_the_weights(model):
    """As in sequential offloading: the weights are on meta, and the outer hook moves nothing."""
    model.to("meta")
    assert device_of(model, HIDDEN) == CPU
    model._hf_hook = AlignDevicesHook(io_same_device=True)
    model.blocks[1].ffn.net[2]._hf_hook = AlignDevicesHook(execution_device=SECOND)
    assert device_of(model, HIDDEN) == SECOND


def test_where_groups_are_brought_to(model):
    options = {"offload_type": "block_level", "num_blocks_per_group": 1}
    apply_group_offloading(model, onload_device=CPU, offload_device=CPU, **options)
    for module in model.modules():
        registry = getattr(module, "_diffusers_hook", None)
        hook = None if registry is None else registry.get_hook("group_offloading")
        if hook is not None:
            hook.group.onload_device = SECOND
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
    ("places", "refused"),
    [
        ({"": 0}, False),
        ({"transformer_blocks": 0, "proj_out": "cuda:0"}, False),
        ({"transformer_blocks": 0, "proj_out": "cpu", "norm_out": "disk"}, False),
        ({"transformer_blocks": "cpu"}, False),
        ({"transformer_blocks": 0, "single_transformer_blocks": 1}, True),
        ({"transformer_blocks": "cuda:0", "proj_out": torch.device("cuda:1")}, True),
    ],
    ids=str,
)
def test_a_transformer_that_is_split_is_refused(places, refused):
    pipe = tiny_flux_pipeline()
    pipe.transformer.hf_device_map = places
    if not refused:
        chipsparse.enable(pipe, SparsityConfig()).disable()
        return
    with pytest.raises(ValueError, match="is split over cuda:0, cuda:1; chipsparse runs a"):
        chipsparse.enable(pipe, SparsityConfig())
    assert not hasattr(pipe.transformer, "chipsparse_adapter")


def test_memory_is_planned_and_layers_are_timed_where_the_model_computes(monkeypatch):
    """And not where the latents are before hooks have moved them."""
    pipe = tiny_flux_pipeline()
    asked = []
    with chipsparse.enable(pipe, flux.SPARSE) as handle:
        (adapter,) = handle._adapters
        begin = adapter.session.begin
        pipe.transformer._hf_hook = SimpleNamespace(execution_device=torch.device("meta"))

        def look(context, layout, device, *rest, **options):
            asked.append(device)
            return begin(context, layout, CPU, *rest, **options)

        monkeypatch.setattr(adapter.session, "begin", look)
        flux.generate(pipe, num_inference_steps=3)
        del pipe.transformer._hf_hook
    assert asked == [torch.device("meta")] * 3
