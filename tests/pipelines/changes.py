"""Changes that users make to a model, for tests of any of them."""

import importlib

import pytest
import torch

from tests.tiny_models import random


class Packed(torch.nn.Parameter):
    """A parameter of another class, like those of quantizers."""


class Adapted(torch.nn.Linear):
    """A linear of another class, like an adapter's."""


def rounded_by_rows(weight):
    """A weight in FP8, whose linear also rounds its input by rows; torchao's config wants a GPU."""
    module = "torchao.quantization.quantize_.workflows.float8.float8_tensor"
    tensors, inference = map(importlib.import_module, (module, "torchao.float8.inference"))
    granularity = importlib.import_module("torchao.quantization").PerRow()
    return tensors.Float8Tensor.from_hp(
        weight,
        granularity=granularity,
        mm_config=inference.Float8MMConfig(use_fast_accum=True),
        act_quant_kwargs=tensors.QuantizeTensorToFloat8Kwargs(granularity=granularity),
    )


def at_step(number, act):
    """A pipeline's callback: `act` is called behind the step of this number, or of every one."""

    def behind_step(_pipe, step, _time, tensors):
        if number in (step, None):
            act()
        return tensors

    return behind_step


def add_lora(pipe, target, *, name="style", rank=2):
    """A LoRA on the modules whose name ends so, as `load_lora_weights` adds it."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=4 * rank,
        target_modules=f".*{target}",
        init_lora_weights=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        pipe.transformer.add_adapter(config, adapter_name=name)


def offload_groups(model, count=1, **options):
    """Offloads blocks by groups, with the CPU in the place of the accelerator."""
    cpu = torch.device("cpu")
    groups = {"offload_type": "block_level", "num_blocks_per_group": count, **options}
    model.enable_group_offload(onload_device=cpu, offload_device=cpu, **groups)


def with_an_effect(controlnet):
    """A ControlNet whose outputs are not zero, as they are at first."""
    for index, (name, parameter) in enumerate(controlnet.named_parameters()):
        if "controlnet" in name or "pos_embed_input" in name:
            parameter.data = 0.3 * random(*parameter.shape, seed=index)
    return controlnet
