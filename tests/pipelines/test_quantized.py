"""Quantized weights, with LoRA and offloading: attention is sparse, MLPs dense, and it is said."""

import importlib

import pytest
import torch
from accelerate import cpu_offload_with_hook

import chipsparse
from tests.pipelines.small_sparse import EXACT, SPARSE, assert_close, generate
from tests.tiny_models import (
    PROMPT,
    tiny_flux_pipeline,
    tiny_flux_transformer,
    tiny_wan_pipeline,
    tiny_wan_transformer,
)

STEPS = 3  # dense, refresh, sparse
CALLS = {
    "wan": {
        "prompt": PROMPT,
        "height": 32,
        "width": 48,
        "num_frames": 5,
        "guidance_scale": 1.0,
        "max_sequence_length": 8,
        "num_inference_steps": STEPS,
    },
    "flux": {
        "prompt": PROMPT,
        "height": 32,
        "width": 24,
        "max_sequence_length": 8,
        "num_inference_steps": STEPS,
    },
}
BLOCKS = ("blocks", "transformer_blocks", "single_transformer_blocks")
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
MLP = ["net.0.proj", "net.2", "proj_mlp", "proj_out"]


def linears(transformer, ends=None):
    """The linears of all blocks, or those whose names end so, with what they belong to."""
    for name in BLOCKS:
        for block in getattr(transformer, name, ()):
            for inner, module in [*block.named_modules()]:
                if isinstance(module, torch.nn.Linear) and (
                    ends is None or inner.endswith(tuple(ends))
                ):
                    yield block, inner, module


def by_torchao(config):
    def quantize(transformer, ends=None):
        quantization = importlib.import_module("torchao.quantization")
        modules = [module for _, _, module in linears(transformer, ends)]
        quantization.quantize_(
            transformer,
            getattr(quantization, config)(),
            filter_fn=lambda module, _: any(module is each for each in modules),
        )

    return quantize


def by_bitsandbytes(transformer, ends=None):
    """As diffusers replaces linears, which wants a GPU; the library itself runs without."""
    nn = importlib.import_module("bitsandbytes").nn
    for block, name, linear in linears(transformer, ends):
        made = nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            compute_dtype=torch.float32,
            quant_type="nf4",
        )
        made.weight = nn.Params4bit(
            linear.weight.data, requires_grad=False, quant_type="nf4", module=made
        )
        made.bias = linear.bias
        block.set_submodule(name, made.to("cpu"))


def by_gguf(transformer, ends=None):
    """As a GGUF file is loaded."""
    gguf = importlib.import_module("gguf")
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    kind = gguf.GGMLQuantizationType.Q8_0
    for block, name, linear in linears(transformer, ends):
        packed = gguf.quants.quantize(linear.weight.detach().numpy(), kind)
        made = GGUFLinear(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            compute_dtype=torch.float32,
        )
        made.weight = GGUFParameter(torch.from_numpy(packed), quant_type=kind)
        made.bias = linear.bias
        block.set_submodule(name, made)


def by_casting(transformer, ends=None):
    transformer.enable_layerwise_casting(
        storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32
    )


# The package that each of them needs, and what the reason for a dense MLP says.
QUANTIZERS = {
    "torchao FP8": ("torchao", by_torchao("Float8WeightOnlyConfig"), "Float8Tensor"),
    "torchao INT8": ("torchao", by_torchao("Int8WeightOnlyConfig"), "Int8Tensor"),
    "torchao INT8, activations too": (
        "torchao",
        by_torchao("Int8DynamicActivationInt8WeightConfig"),
        "Int8Tensor",
    ),
    "bitsandbytes 4 bit": ("bitsandbytes", by_bitsandbytes, "Params4bit"),
    "GGUF": ("gguf", by_gguf, "GGUFParameter"),
    "layerwise casting": (None, by_casting, "torch.float8_e4m3fn"),
}
# Where activations are quantized, rounding in attention may move one of them by a whole level.
TOLERANCE = {"torchao INT8, activations too": 3e-2}


def add_lora(transformer):
    """On attention and on MLPs, with weights that change something."""
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = peft.LoraConfig(
            r=4, init_lora_weights=False, target_modules=["to_q", "to_v", "net.2"]
        )
        transformer.add_adapter(config)


def offload_model(pipe, _folder):
    """What ``enable_model_cpu_offload`` does, with the CPU in the place of the accelerator."""
    cpu_offload_with_hook(pipe.transformer, torch.device("cpu"))


def offload_groups(pipe, _folder, **options):
    pipe.transformer.enable_group_offload(
        onload_device=torch.device("cpu"),
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        **options,
    )


def offload_to_disk(pipe, folder):
    offload_groups(pipe, folder, offload_to_disk_path=str(folder))


OFFLOADS = {
    "not offloaded": lambda *_: None,
    "model": offload_model,
    "groups": offload_groups,
    "disk": offload_to_disk,
}
MAKE = {
    "wan": lambda: tiny_wan_pipeline(transformer=tiny_wan_transformer(num_layers=2)),
    "flux": lambda: tiny_flux_pipeline(
        transformer=tiny_flux_transformer(num_layers=1, num_single_layers=1)
    ),
}


def quantized(model, quantizer, *, lora=False, ends=None):
    """A pipeline whose linears, or those whose names end so, are quantized."""
    package, quantize, _ = QUANTIZERS[quantizer]
    if package is not None:
        pytest.importorskip(package)
    pipe = MAKE[model]()
    if lora and quantizer == "layerwise casting":  # an adapter that comes later is not cast
        add_lora(pipe.transformer)
    quantize(pipe.transformer, ends)
    if lora and quantizer != "layerwise casting":
        add_lora(pipe.transformer)
    return pipe


QUICK = {("torchao FP8", "wan", True, "groups"), ("GGUF", "flux", True, "not offloaded")}
COMBINATIONS = [
    pytest.param(*each, marks=[] if each in QUICK else pytest.mark.slow)
    for each in [
        (quantizer, model, lora, offload)
        for quantizer in QUANTIZERS
        for model in MAKE
        for lora in (False, True)
        for offload in OFFLOADS
    ]
]


@pytest.mark.parametrize(("quantizer", "model", "lora", "offload"), COMBINATIONS)
def test_attention_runs_sparse_and_the_report_says_why_mlps_do_not(
    quantizer, model, lora, offload, tmp_path
):
    pipe, call = quantized(model, quantizer, lora=lora), CALLS[model]
    if offload == "disk" and quantizer.startswith("torchao"):
        with pytest.raises(ValueError, match="not supported for TorchAO"):
            OFFLOADS[offload](pipe, tmp_path)
        return
    OFFLOADS[offload](pipe, tmp_path)
    expected = generate(pipe, call)
    with chipsparse.enable(pipe, EXACT) as handle:
        found = generate(pipe, call)
    assert_close(found, expected, TOLERANCE.get(quantizer, 1e-4))
    kept = [(r.attention_kept, r.mlp_kept) for r in handle.report.steps if r.action == "sparse"]
    assert kept == [(1.0, None)]
    (reason,) = handle.report.fallbacks
    assert reason.startswith("MLP runs dense in 2 of 2 layers (first: layer 0): ")
    assert QUANTIZERS[quantizer][2] in reason
    assert torch.equal(generate(pipe, call), expected)


@pytest.mark.parametrize("model", MAKE)
def test_mlps_of_plain_weights_run_sparse_beside_quantized_attention(model):
    pipe = quantized(model, "torchao INT8", ends=ATTENTION)
    expected = generate(pipe, CALLS[model])
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(generate(pipe, CALLS[model]), expected)
    assert handle.report.fallbacks == []
    (sparse,) = [record for record in handle.report.steps if record.action == "sparse"]
    assert (sparse.attention_kept, sparse.mlp_kept) == (1.0, 1.0)


def test_sparse_steps_of_quantized_weights_keep_what_they_are_told():
    pipe = quantized("wan", "torchao INT8")
    expected = generate(pipe, CALLS["wan"])
    with chipsparse.enable(pipe, SPARSE) as handle:
        found = generate(pipe, CALLS["wan"])
    (sparse,) = [record for record in handle.report.steps if record.action == "sparse"]
    assert 0.2 < sparse.attention_kept < 0.5
    assert sparse.mlp_kept is None
    assert found.isfinite().all()
    assert not torch.equal(found, expected)
