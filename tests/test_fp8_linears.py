"""Whole transformers with linears in FP8: a dry run, baseline and all."""

import importlib

import pytest
import torch

from benchmarks import transformer_step
from benchmarks.__main__ import main
from benchmarks.fp8_linears import linears, to_fp8
from benchmarks.full_models import MODELS
from benchmarks.full_size import FP8_LIMIT
from benchmarks.records import read
from chipsparse.layers.mlp_weights import fp8_form
from tests.variants import slow_unless

pytest.importorskip("torchao")


def tiny(case):
    model = MODELS[case]
    return model, model.make(model.layers_of(0.1), True, torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize("case", ["hunyuan_720p", "wan1b_480p", "flux_1280x768", "h3_5s"])
def test_all_linears_of_the_blocks_are_rounded_and_no_others(case):
    model, transformer = tiny(case)
    to_fp8(transformer, model.blocks)
    found = linears(transformer, model.blocks)
    assert {fp8_form(linear.weight) for linear in found} == {"weights and inputs"}
    inside = {name for name, each in transformer.named_modules() if each in found}
    assert inside == {
        name
        for name, module in transformer.named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith(model.blocks)
    }
    for name, module in transformer.named_modules():
        if isinstance(module, torch.nn.Linear) and name not in inside:
            assert fp8_form(module.weight) is None


def test_weights_are_those_of_the_config_that_users_name(monkeypatch):
    """Which looks for a GPU, and does nothing else that depends on one."""
    api = importlib.import_module("torchao.quantization.quant_api")
    monkeypatch.setattr(api, "_check_hardware_support", lambda _: None)
    (model, ours), (_, users) = tiny("wan1b_480p"), tiny("wan1b_480p")
    to_fp8(ours, model.blocks)
    config = api.Float8DynamicActivationFloat8WeightConfig(
        granularity=api.PerRow(), set_inductor_config=False
    )
    api.quantize_(users.blocks, config)
    pairs = zip(linears(ours, model.blocks), linears(users, model.blocks), strict=True)
    for weight, expected in ((one.weight, other.weight) for one, other in pairs):
        assert torch.equal(weight.qdata.float(), expected.qdata.float())
        assert torch.equal(weight.scale, expected.scale)
        for name in ("act_quant_kwargs", "mm_config", "block_size", "kernel_preference", "dtype"):
            assert getattr(weight, name) == getattr(expected, name)


@pytest.mark.parametrize("case", slow_unless(("wan1b_480p", "flux_1280x768"), [*MODELS]))
def test_records_of_a_small_model(case, monkeypatch, tmp_path):
    """Blocks are compiled in one piece; sparse steps read the weights of their neurons."""
    monkeypatch.setitem(transformer_step.COMPILE_OPTIONS, "backend", "aot_eager")
    file = tmp_path / "records.json"
    options = ["--device", "cpu", "--small", "--depth", "0.1", "--case", case, "--json", str(file)]
    options += ["--fp8-linears", "--precision", "fp8", "--schedules", "balanced,published"]
    assert main(["--op", "full_size", *options]) == 0
    records = read(file)
    assert [record["schedule"] for record in records] == ["balanced", "published"]
    for record in records:
        assert (record["linears"], record["precision"]) == ("fp8", "fp8")
        assert record["baseline"].endswith("linears in fp8")
        assert record["graph_breaks"] == 0
        assert record["rel_error"] < FP8_LIMIT / 2
        assert record["fallbacks"] == []
    assert records[1]["backends"]["fp8_dequantization"] == "reference"
    assert records[1]["mlp_kept"] < 1
