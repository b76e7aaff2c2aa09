"""Quantized weights, with LoRA and offloading: attention is sparse, MLPs where they are in FP8.

Of the others, and of linears that attention and neurons share, the report says why they are dense.
"""

import importlib
import re

import pytest
import torch
from accelerate import cpu_offload_with_hook

import chipsparse
from chipsparse.layers.mlp_weights import fp8_form
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


def by_torchao_with_activations(transformer, ends=None):
    """As ``Float8DynamicActivationFloat8WeightConfig`` does, which itself wants a GPU."""
    tensors = importlib.import_module(
        "torchao.quantization.quantize_.workflows.float8.float8_tensor"
    )
    granularity = importlib.import_module("torchao.quantization").PerRow()
    inference = importlib.import_module("torchao.float8.inference")
    for _, _, linear in linears(transformer, ends):
        weight = tensors.Float8Tensor.from_hp(
            linear.weight.data,
            granularity=granularity,
            mm_config=inference.Float8MMConfig(use_fast_accum=True),
            act_quant_kwargs=tensors.QuantizeTensorToFloat8Kwargs(granularity=granularity),
        )
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)


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
    "torchao FP8, activations too": ("torchao", by_torchao_with_activations, "Float8Tensor"),
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
TOLERANCE = {"torchao INT8, activations too": 3e-2, "torchao FP8, activations too": 6e-2}


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


QUICK = {
    ("torchao FP8", "flux", False, "groups"),
    ("torchao FP8, activations too", "wan", False, "not offloaded"),
    ("GGUF", "flux", True, "not offloaded"),
}
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
    # The second linear of a feed-forward layer has a LoRA where there is any; single blocks of FLUX
    # share theirs with the attention.
    sparse = 0 if lora or "FP8" not in quantizer else 1 if model == "flux" else 2
    kept = [(r.attention_kept, r.mlp_kept) for r in handle.report.steps if r.action == "sparse"]
    assert kept == [(1.0, 1.0 if sparse else None)]
    dense = 0
    for reason in handle.report.fallbacks:
        dense += int(
            re.match(r"MLP runs dense in (\d) of 2 layers \(first: layer \d\): ", reason)[1]
        )
        assert QUANTIZERS[quantizer][2] in reason or (lora and "an active adapter" in reason)
    assert dense == 2 - sparse
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


def test_sparse_steps_of_quantized_weights_keep_what_is_asked():
    pipe = quantized("wan", "torchao INT8")
    expected = generate(pipe, CALLS["wan"])
    with chipsparse.enable(pipe, SPARSE) as handle:
        found = generate(pipe, CALLS["wan"])
    (sparse,) = [record for record in handle.report.steps if record.action == "sparse"]
    assert 0.2 < sparse.attention_kept < 0.5
    assert sparse.mlp_kept is None
    assert found.isfinite().all()
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("quantizer", ["torchao FP8", "torchao FP8, activations too"])
def test_sparse_steps_of_fp8_weights_compute_the_neurons_given(quantizer):
    """Near what the same numbers give in 32 bits, and the report names what read them."""
    pipe, call = quantized("wan", quantizer, ends=MLP), CALLS["wan"]
    with chipsparse.enable(pipe, SPARSE) as handle:
        found = generate(pipe, call)
    (sparse,) = [record for record in handle.report.steps if record.action == "sparse"]
    assert 0.2 < sparse.mlp_kept < 0.5
    assert handle.report.fallbacks == []
    assert handle.report.backends["fp8_dequantization"] == "reference"
    for _, _, linear in linears(pipe.transformer, MLP):
        linear.weight = torch.nn.Parameter(linear.weight.dequantize(), requires_grad=False)
    with chipsparse.enable(pipe, SPARSE):
        expected = generate(pipe, call)
    assert_close(found, expected, TOLERANCE.get(quantizer, 1e-4))
    assert not torch.equal(found, generate(pipe, call))


def test_an_mlp_of_which_a_part_is_in_fp8_runs_dense():
    pipe, call = quantized("wan", "torchao FP8", ends=["net.0.proj"]), CALLS["wan"]
    expected = generate(pipe, call)
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(generate(pipe, call), expected)
    assert [text.split(": ")[-1] for text in handle.report.fallbacks] == [
        "its weights are not all in FP8, or not all in the same way"
    ]


def test_scales_of_blocks_are_not_read():
    quantize = pytest.importorskip("torchao.quantization")
    pipe = quantized("wan", "torchao FP8")
    weight = pipe.transformer.blocks[0].ffn.net[2].weight
    assert fp8_form(weight) == "weights"
    assert fp8_form(weight.dequantize()) is None
    columns = quantize.PerRow(dim=0)
    assert fp8_form(type(weight).from_hp(weight.dequantize(), granularity=columns)) is None
    whole = type(weight).from_hp(weight.dequantize(), granularity=quantize.PerTensor())
    assert fp8_form(whole) == "weights"


@pytest.mark.slow
def test_compiled_blocks_of_fp8_weights():
    """One graph for all blocks, as without FP8."""
    pipe, call = quantized("wan", "torchao FP8", ends=MLP), CALLS["wan"]
    with chipsparse.enable(pipe, SPARSE):
        expected = generate(pipe, call)
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    with chipsparse.enable(pipe, SPARSE) as handle:
        found = generate(pipe, call)
    (sparse,) = [record for record in handle.report.steps if record.action == "sparse"]
    assert 0.2 < sparse.mlp_kept < 0.5
    assert_close(found, expected, 1e-3)
