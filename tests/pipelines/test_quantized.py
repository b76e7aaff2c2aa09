"""Quantized weights, with LoRA and offloading: attention is sparse, MLPs where they are in FP8.

Of the others the report says why they are dense.
"""

import importlib
import itertools
import re

import pytest
import torch
from accelerate import cpu_offload_with_hook

import chipsparse
from tests import tiny_models
from tests.pipelines.changes import add_lora, offload_groups, rounded_by_rows
from tests.pipelines.families.flux2 import PICTURE, tiny_flux2_pipeline, tiny_flux2_transformer
from tests.pipelines.families.hunyuan_video import KINDS, VIDEO
from tests.pipelines.families.hunyuan_video import pipeline as tiny_hunyuan_pipeline
from tests.pipelines.small_sparse import EXACT, SPARSE, assert_close, generate
from tests.variants import DEVICES, slow, slow_unless

ACTIONS = ("dense", "refresh", "sparse")
STEPS = len(ACTIONS)
TEXT = {"prompt": tiny_models.PROMPT, "max_sequence_length": 8, "height": 32}
CALLS = {
    "wan": {**TEXT, "width": 48, "num_frames": 5, "guidance_scale": 1.0},
    "flux": {**TEXT, "width": 24},
    "flux2": PICTURE,
    "hunyuan": VIDEO,
}
BLOCKS = ("blocks", "transformer_blocks", "single_transformer_blocks")
MLP = ["net.0.proj", "net.2", "proj_mlp", "proj_out"]
MLP += ["linear_in", "linear_out", "to_qkv_mlp_proj", "attn.to_out"]  # of FLUX.2


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
    for _, _, linear in linears(transformer, ends):
        weight = rounded_by_rows(linear.weight.data)
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)


def by_bitsandbytes(transformer, ends=None):
    """Replaces linears like diffusers, which wants a GPU; the library itself runs without."""
    nn = importlib.import_module("bitsandbytes").nn
    for block, name, linear in linears(transformer, ends):
        sizes = linear.in_features, linear.out_features, linear.bias is not None
        made = nn.Linear4bit(*sizes, compute_dtype=torch.float32, quant_type="nf4")
        made.weight = nn.Params4bit(
            linear.weight.data,
            requires_grad=False,
            quant_type="nf4",
            module=made,
        )
        made.bias = linear.bias
        block.set_submodule(name, made.to("cpu"))


def by_gguf(transformer, ends=None):
    gguf = importlib.import_module("gguf")
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    kind = gguf.GGMLQuantizationType.Q8_0
    for block, name, linear in linears(transformer, ends):
        packed = gguf.quants.quantize(linear.weight.detach().numpy(), kind)
        sizes = linear.in_features, linear.out_features, linear.bias is not None
        made = GGUFLinear(*sizes, compute_dtype=torch.float32)
        made.weight = GGUFParameter(torch.from_numpy(packed), quant_type=kind)
        made.bias = linear.bias
        block.set_submodule(name, made)


IN_INT8 = "Int8DynamicActivationInt8WeightConfig"
# The package that each of them needs, and what the reason for a dense MLP says.
QUANTIZERS = {
    "torchao FP8": ("torchao", by_torchao("Float8WeightOnlyConfig"), "Float8Tensor"),
    "torchao FP8, activations too": ("torchao", by_torchao_with_activations, "Float8Tensor"),
    "torchao INT8": ("torchao", by_torchao("Int8WeightOnlyConfig"), "Int8Tensor"),
    "torchao INT8, activations too": ("torchao", by_torchao(IN_INT8), "Int8Tensor"),
    "bitsandbytes 4 bit": ("bitsandbytes", by_bitsandbytes, "Params4bit"),
    "GGUF": ("gguf", by_gguf, "GGUFParameter"),
    "layerwise casting": (
        None,
        lambda model, _: model.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32),
        "torch.float8_e4m3fn",
    ),
}
RUNS_DENSE = r"MLP runs dense in (\d) of 2 layers \(first: layer \d\): "
LORA = "(to_q|to_v|net.2)"  # on attention and on MLPs
# Where activations are quantized, rounding in attention may move one of them by a whole level.
TOLERANCE = {"torchao INT8, activations too": 3e-2, "torchao FP8, activations too": 6e-2}


def call_of(model, where="cpu"):
    """The arguments of a model's call, their tensors where it computes and in its precision."""
    call = {**CALLS[model], "num_inference_steps": STEPS}
    for name, value in call.items() if where != "cpu" else ():
        if isinstance(value, torch.Tensor):
            call[name] = value.to(where, torch.bfloat16 if value.is_floating_point() else None)
    return call


# Each with the CPU in the place of the accelerator.
OFFLOADS = {
    "not offloaded": lambda *_: None,
    "model": lambda model, _: cpu_offload_with_hook(model, torch.device("cpu")),
    "groups": lambda model, _: offload_groups(model),
    "disk": lambda model, folder: offload_groups(model, offload_to_disk_path=str(folder)),
}
MAKE = {
    "wan": lambda: tiny_models.tiny_wan_pipeline(
        transformer=tiny_models.tiny_wan_transformer(num_layers=2),
    ),
    "flux": lambda: tiny_models.tiny_flux_pipeline(
        transformer=tiny_models.tiny_flux_transformer(num_layers=1, num_single_layers=1),
    ),
    "flux2": lambda: tiny_flux2_pipeline(
        transformer=tiny_flux2_transformer(num_layers=1, num_single_layers=2),
    ),
    "hunyuan": lambda: tiny_hunyuan_pipeline(num_layers=1, num_single_layers=2),
}


def quantized(model, quantizer, *, lora=False, ends=None, where="cpu"):
    """A pipeline whose linears, or those whose names end so, are quantized; in bf16 on a GPU."""
    package, quantize, _ = QUANTIZERS[quantizer]
    if package is not None:
        pytest.importorskip(package)
    pipe = MAKE[model]()
    if where != "cpu":
        pipe.to(where, torch.bfloat16)
    if lora and quantizer == "layerwise casting":  # an adapter that comes later is not cast
        add_lora(pipe, LORA)
    quantize(pipe.transformer, ends)
    if lora and quantizer != "layerwise casting":
        add_lora(pipe, LORA)
    return pipe


QUICK = {
    ("torchao FP8", "flux", False, "groups"),
    ("torchao FP8, activations too", "wan", False, "not offloaded"),
    ("GGUF", "flux", True, "not offloaded"),
}
COMBINATIONS = itertools.product(QUANTIZERS, ("wan", "flux"), (False, True), OFFLOADS)


@pytest.mark.parametrize(
    ("quantizer", "model", "lora", "offload"),
    [each if each in QUICK else slow(*each) for each in COMBINATIONS],
)
def test_sparse_attention_and_the_reasons_for_dense_mlps(quantizer, model, lora, offload, tmp_path):
    pipe = quantized(model, quantizer, lora=lora)
    call = call_of(model)
    if offload == "disk" and quantizer.startswith("torchao"):
        with pytest.raises(ValueError, match="not supported for TorchAO"):
            OFFLOADS[offload](pipe.transformer, tmp_path)
        return
    OFFLOADS[offload](pipe.transformer, tmp_path)
    expected = generate(pipe, call)
    with chipsparse.enable(pipe, EXACT) as handle:
        found = generate(pipe, call)
    assert_close(found, expected, TOLERANCE.get(quantizer, 1e-4))
    # A LoRA is on the second linears of feed-forward layers, but on none of a single block.
    sparse = 0 if "FP8" not in quantizer else 2 if not lora else 1 if model == "flux" else 0
    kept = [(r.attention_kept, r.mlp_kept) for r in handle.report.steps if r.action == "sparse"]
    assert kept == [(1.0, 1.0 if sparse else None)]
    dense = 0
    for reason in handle.report.fallbacks:
        dense += int(re.match(RUNS_DENSE, reason)[1])
        assert QUANTIZERS[quantizer][2] in reason or (lora and "an active adapter" in reason)
    assert dense == 2 - sparse
    assert torch.equal(generate(pipe, call), expected)


IN_FP8 = ["torchao FP8", "torchao FP8, activations too"]


@pytest.mark.parametrize("quantizer", IN_FP8)
@pytest.mark.parametrize("model", slow_unless(("wan", "flux"), MAKE))
def test_sparse_steps_of_fp8_weights_compute_the_neurons_given(model, quantizer):
    """Near what the same numbers give in 32 bits, and the report names what read them.

    In inference mode torchao cannot slice its tensors.
    """
    pipe = quantized(model, quantizer, ends=MLP)
    call = call_of(model)
    with torch.inference_mode(), chipsparse.enable(pipe, SPARSE) as handle:
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
    pipe = quantized("wan", "torchao FP8", ends=["net.0.proj"])
    call = call_of("wan")
    expected = generate(pipe, call)
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(generate(pipe, call), expected)
    assert [text.split(": ")[-1] for text in handle.report.fallbacks] == [
        "its weights are not all in FP8, or not all in the same way",
    ]


@pytest.mark.parametrize("model", ["wan", "flux", "flux2"])
@pytest.mark.parametrize("quantizer", IN_FP8)
def test_weights_alone_in_fp8_run_dense_under_autocast(model, quantizer):
    pipe = quantized(model, quantizer, ends=MLP)
    call = call_of(model)
    alone = quantizer == "torchao FP8"
    with torch.autocast("cpu", torch.bfloat16), chipsparse.enable(pipe, EXACT) as handle:
        found = generate(pipe, call)
    with torch.autocast("cpu", torch.bfloat16):
        expected = generate(pipe, call)
    assert (found - expected).norm() < 2e-2 * expected.norm()
    assert [("torch.autocast" in text) for text in handle.report.fallbacks] == [True] * alone
    assert (handle.report.steps[-1].mlp_kept is None) == alone


LONGER = {"num_inference_steps": 7}  # dense, refresh, sparse, sparse, refresh, sparse, sparse
GRAPHS = {"wan": 1, "flux": 2, "flux2": 2, "hunyuan": KINDS}  # as many as of 16-bit weights


@pytest.mark.slow
@pytest.mark.parametrize("model", MAKE)
def test_compiled_blocks_of_fp8_weights(model):
    pipe = quantized(model, "torchao FP8", ends=MLP)
    call = call_of(model)
    with chipsparse.enable(pipe, SPARSE):
        expected = generate(pipe, call)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    with chipsparse.enable(pipe, SPARSE) as handle:
        found = generate(pipe, call)
    assert handle.report.fallbacks == []
    assert counters["stats"]["unique_graphs"] == GRAPHS[model]
    assert not counters["graph_break"]
    (sparse,) = [record for record in handle.report.steps if record.action == "sparse"]
    assert 0.2 < sparse.mlp_kept < 0.5
    assert_close(found, expected, 1e-3)


@pytest.mark.usefixtures("first_dense_kernel")
@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("quantizer", IN_FP8)
def test_recorded_steps_of_fp8_weights_give_the_same(quantizer, where, request):
    pipe = quantized("flux", quantizer, where=where)
    call = {**call_of("flux"), **LONGER}
    with chipsparse.enable(pipe, SPARSE.override({"cuda_graphs": "never"})):
        expected = generate(pipe, call)
    if where == "cpu":
        request.getfixturevalue("recorder")
    with chipsparse.enable(pipe, SPARSE.override({"cuda_graphs": "always"})) as handle:
        assert torch.equal(generate(pipe, call), expected)
    assert [record.step for record in handle.report.steps if record.replayed] == [3, 5, 6]
