"""Transformers in wrappers, and with sharded weights, are refused with what would help."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import chipsparse
from chipsparse.pipelines.patches import stock_class
from tests.pipelines.model_state import state_of
from tests.pipelines.tiny_runs import STILL
from tests.tiny_models import tiny_wan_pipeline

CPU = torch.device("cpu")


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def in_peft(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["to_q"]))


WRAPPED = {
    "PEFT": (in_peft, "PeftModel", "get_base_model(), or with its adapters merged pipe"),
    "data parallel": (torch.nn.DataParallel, "DataParallel", "module"),
    "DDP": (torch.nn.parallel.DistributedDataParallel, "DistributedDataParallel", "module"),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_a_wrapper_is_refused_and_runs_once_taken_off_as_the_sentence_says(wrapper, mesh):
    wrap, kind, remedy = WRAPPED[wrapper]
    pipe = tiny_wan_pipeline()
    expected = STILL.generate(pipe, num_inference_steps=3)
    pipe.transformer = wrap(pipe.transformer)
    said = f"transformer is in a {kind}, .*take it out: pipe.transformer = pipe.transformer."
    with pytest.raises(ValueError, match=said + re.escape(remedy)) as error:
        chipsparse.enable(pipe)
    assert "\n" not in str(error.value)
    accessor = remedy.partition(",")[0]
    exec(f"pipe.transformer = pipe.transformer.{accessor}", {"pipe": pipe})
    with chipsparse.enable(pipe, STILL.EXACT) as handle:
        found = STILL.generate(pipe, num_inference_steps=3)
    assert handle.report.actions()["sparse"] > 0
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def by_blocks(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)


def by_fsdp1(model, mesh):
    for number, block in enumerate(model.blocks):
        model.blocks[number] = FullyShardedDataParallel(block, device_id=CPU)


SHARDED = {
    "FSDP2": lambda model, mesh: fully_shard(model, mesh=mesh),
    "FSDP2 by blocks": by_blocks,
    "FSDP1 by blocks": by_fsdp1,
    "tensor parallelism": lambda model, mesh: parallelize_module(
        model,
        mesh,
        {"blocks.0.attn1.to_q": ColwiseParallel()},
    ),
}


@pytest.mark.filterwarnings("ignore:FSDP is switching to use:UserWarning")
@pytest.mark.parametrize("way", SHARDED)
def test_sharded_weights_are_refused(way, mesh):
    pipe = tiny_wan_pipeline()
    SHARDED[way](pipe.transformer, mesh)
    STILL.generate(pipe, num_inference_steps=1)  # leaves some weights in whole
    with pytest.raises(ValueError, match=r"weights of transformer are sharded .*full_state_dict"):
        chipsparse.enable(pipe)
    assert not [name for name in vars(pipe) if "chipsparse" in name]


def test_a_model_that_is_sharded_while_it_is_patched_is_refused_at_its_call(mesh):
    pipe = tiny_wan_pipeline()
    before = state_of(pipe.transformer)
    handle = chipsparse.enable(pipe, STILL.SPARSE)
    block = pipe.transformer.blocks[0]
    fully_shard(block.attn2, mesh=mesh)
    with pytest.raises(ValueError, match="the weights of transformer are sharded"):
        STILL.generate(pipe)
    handle.disable()
    assert stock_class(pipe.transformer) is type(pipe.transformer)
    assert state_of(pipe.transformer).keys() == before.keys()
