"""Copies of layers, which users and adapters make of a model that is patched."""

import copy
import pickle

import pytest
import torch

import chipsparse
from tests.pipelines.small_sparse import error
from tests.pipelines.tiny_runs import WAN
from tests.tiny_models import tiny_wan_pipeline

CLOSE = 1e-5  # relative: sparse steps that keep everything, in fp32


def tripled(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3)
    return module


@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))],
)
def test_a_copy_of_a_patched_layer_is_stock_and_computes_with_its_own_weights(again):
    pipe = tiny_wan_pipeline()
    stock = copy.deepcopy(pipe.transformer.blocks[0].ffn)
    hidden = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), chipsparse.enable(pipe, WAN.SPARSE) as handle:
        WAN.generate(pipe)
        assert handle.report.steps[-1].mlp_kept is not None  # it runs as one op by now
        twin = again(pipe.transformer.blocks[0].ffn)
        assert type(twin) is type(stock)
        assert vars(twin).keys() == vars(stock).keys()
        assert torch.equal(tripled(twin)(hidden), tripled(stock)(hidden))


def add_saved_copies(pipe, name):
    """A LoRA that was trained with whole modules of this name: PEFT copies those."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2,
        target_modules=".*attn2.to_q",
        modules_to_save=[name],
        init_lora_weights=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        pipe.transformer.add_adapter(config, adapter_name="style")
    for parameter_name, parameter in pipe.transformer.named_parameters():
        if "modules_to_save" in parameter_name:
            parameter.data.mul_(1.5)
    pipe.transformer.set_adapter("style")


@pytest.mark.parametrize("name", ["ffn", "attn1"])
def test_modules_that_an_adapter_copies_compute_as_without_us(name):
    """Before enabling, while enabled, and after the model was restored."""
    pipe = tiny_wan_pipeline()
    add_saved_copies(pipe, name)
    expected = WAN.generate(pipe)
    with chipsparse.enable(pipe, WAN.EXACT):
        assert error(WAN.generate(pipe), expected) < CLOSE
    pipe = tiny_wan_pipeline()
    with chipsparse.enable(pipe, WAN.EXACT):
        WAN.generate(pipe)
        add_saved_copies(pipe, name)
        assert error(WAN.generate(pipe), expected) < CLOSE
    assert torch.equal(WAN.generate(pipe), expected)
