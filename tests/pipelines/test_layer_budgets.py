"""Budgets of layers and dense steps from the config, in every model."""

import pytest
import torch

import chipsparse
from chipsparse import SparsityConfig
from tests.schedules import listed
from tests.tiny_models import (
    PROMPT,
    tiny_chroma_pipeline,
    tiny_flux_pipeline,
    tiny_wan_pipeline,
    tiny_wan_transformer,
)
from tests.variants import slow_unless

CONFIG = SparsityConfig().override(
    {
        "attention.density": 0.25,
        "block_size": 16,
        "mlp.density": 0.25,
        "tile": None,  # another order rounds differently
    }
)


def two_experts():
    return tiny_wan_pipeline(transformer_2=tiny_wan_transformer(seed=9), boundary_ratio=0.5)


MODELS = {
    "wan": (tiny_wan_pipeline, 3, {"num_frames": 5}),
    "wan with two experts": (two_experts, 3, {"num_frames": 5}),
    "flux": (tiny_flux_pipeline, 5, {}),
    "chroma": (tiny_chroma_pipeline, 5, {}),
}


def generate(pipe, *, steps=5, **arguments):
    return pipe(
        PROMPT,
        height=32,
        width=64,
        num_inference_steps=steps,
        max_sequence_length=16,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
        **arguments,
    )[0]


@pytest.fixture(
    params=slow_unless(("wan with two experts", "flux"), MODELS),
    ids=lambda name: name.replace(" ", "-"),
)
def model(request):
    make, layers, arguments = MODELS[request.param]
    return make(), layers, arguments


def test_a_model_of_dense_layers_is_the_model_bit_for_bit(model):
    pipe, layers, arguments = model
    dense = generate(pipe, **arguments)
    budgets = [{"layers": f"0-{layers - 1}", "attention": "dense", "mlp": "dense"}]
    with chipsparse.enable(pipe, CONFIG.override({"layers": budgets})) as handle:
        assert torch.equal(generate(pipe, **arguments), dense)
        assert set(handle.report.actions()) == {"dense"}
        assert handle.report.cache_bytes == 0
    with chipsparse.enable(pipe, CONFIG):
        assert not torch.equal(generate(pipe, **arguments), dense)


def test_steps_are_dense_where_the_config_says_so(model):
    pipe, _, arguments = model
    with chipsparse.enable(pipe, CONFIG.override(listed("DDRSDSD"))) as handle:
        generate(pipe, steps=7, **arguments)
    taken = {record.step: record.action.value for record in handle.report.steps}
    expected = ["dense", "dense", "refresh", "sparse", "dense", "sparse", "dense"]
    if getattr(pipe, "transformer_2", None) is not None:
        expected[5] = "dense"  # the second expert's first step
    assert list(taken.values()) == expected
    for record in handle.report.steps:
        assert (record.mlp_kept is None) == (record.action != "sparse")


def test_a_budget_for_one_layer(model):
    """As full keep everywhere is dense to rounding, so is a model whose other layers are dense."""
    pipe, layers, arguments = model
    dense = generate(pipe, **arguments)
    budgets = [
        {"layers": 1, "attention": 1.0, "mlp": 1.0},
        {"layers": f"0,2-{layers - 1}", "attention": "dense", "mlp": "dense"},
    ]
    with chipsparse.enable(pipe, CONFIG.override({"layers": budgets})) as handle:
        found = generate(pipe, **arguments)
    torch.testing.assert_close(found, dense, atol=2e-4, rtol=2e-4)
    sparse = [record for record in handle.report.steps if record.action == "sparse"]
    assert sparse
    for record in sparse:
        assert record.fractions("mlp") == [1.0]


def test_a_layer_that_the_model_does_not_have(model):
    pipe, layers, arguments = model
    budgets = [{"layers": layers, "mlp": 0.5}]
    with (
        chipsparse.enable(pipe, CONFIG.override({"layers": budgets})),
        pytest.raises(chipsparse.ConfigError, match=f"this model has {layers} layers"),
    ):
        generate(pipe, **arguments)
