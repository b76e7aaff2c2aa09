"""Budgets of layers from the config, numbered through all blocks of a model."""

import pytest
import torch

import chipsparse
from chipsparse import SparsityConfig
from tests.pipelines.small_sparse import assert_close
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


@pytest.mark.parametrize("name", slow_unless(("wan with two experts", "flux"), MODELS))
def test_layers_have_budgets_of_their_own(name):
    """Layers that are dense or keep everything are those of the model, whatever the others do."""
    make, layers, arguments = MODELS[name]
    pipe = make()
    dense = generate(pipe, **arguments)

    def with_budgets(*budgets):
        with chipsparse.enable(pipe, CONFIG.override({"layers": list(budgets)})) as handle:
            return generate(pipe, **arguments), handle.report

    none = {"attention": "dense", "mlp": "dense"}
    output, report = with_budgets({"layers": f"0-{layers - 1}", **none})
    assert torch.equal(output, dense)
    assert set(report.actions()) == {"dense"}
    assert report.cache_bytes == 0
    everything = {"layers": 1, "attention": 1.0, "mlp": 1.0}
    output, report = with_budgets(everything, {"layers": f"0,2-{layers - 1}", **none})
    assert_close(output, dense, 2e-4)
    sparse = [record for record in report.steps if record.action == "sparse"]
    assert sparse
    assert all(record.fractions("mlp") == [1.0] for record in sparse)
    with pytest.raises(chipsparse.ConfigError, match=f"this model has {layers} layers"):
        with_budgets({"layers": layers, "mlp": 0.5})
