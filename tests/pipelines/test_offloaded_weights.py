"""What weights will take of a device, for each way in which pipelines keep them elsewhere.

The device is ``meta``, the weights are on the CPU: nothing of it is asked but where it is.
"""

import accelerate
import pytest
import torch
from accelerate.hooks import CpuOffload, UserCpuOffloadHook, add_hook_to_module
from diffusers.hooks import apply_group_offloading

from chipsparse.pipelines.offloaded_weights import autocast_bytes, pending_bytes
from tests.tiny_models import tiny_wan_transformer

DEVICE = torch.device("meta")
CPU = torch.device("cpu")


def nbytes(module):
    return sum(parameter.nbytes for parameter in module.parameters())


@pytest.fixture
def model():
    return tiny_wan_transformer(num_layers=6)


def test_weights_that_are_there_are_not_pending(model):
    assert pending_bytes(model, CPU) == 0
    assert pending_bytes(model.to(DEVICE), DEVICE) == 0


def test_a_model_that_comes_as_a_whole(model):
    assert pending_bytes(model, DEVICE) == nbytes(model)


@pytest.mark.parametrize("there", [True, False])
def test_the_model_before_this_one_leaves_first(model, there):
    before = tiny_wan_transformer(num_layers=9)
    if there:
        before = before.to(DEVICE)
    hook = CpuOffload(DEVICE, UserCpuOffloadHook(before, CpuOffload(DEVICE)))
    add_hook_to_module(model, hook)
    leaving = nbytes(before) if there else 0
    assert pending_bytes(model, DEVICE) == nbytes(model) - leaving
    assert (pending_bytes(model, DEVICE) < 0) == there


@pytest.mark.parametrize("count", [1, 2])
def test_groups_of_blocks(model, count):
    apply_group_offloading(
        model,
        onload_device=CPU,
        offload_device=CPU,
        offload_type="block_level",
        num_blocks_per_group=count,
    )
    block, others = nbytes(model.blocks[0]), nbytes(model) - 6 * nbytes(model.blocks[0])
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
    """Of float32 weights that could be trained, as PyTorch's cache does."""
    assert autocast_bytes(model, torch.bfloat16) == nbytes(model) // 2
    model.blocks[0].requires_grad_(False)
    assert autocast_bytes(model, torch.bfloat16) == (nbytes(model) - nbytes(model.blocks[0])) // 2
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert autocast_bytes(model, torch.bfloat16) == 0
    assert autocast_bytes(model.half(), torch.bfloat16) == 0
