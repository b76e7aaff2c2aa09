"""Budgets of layers from the config, numbered through all blocks of a model."""

import pytest
import torch

import chipsparse
from tests.pipelines.small_sparse import assert_close
from tests.pipelines.tiny_runs import FLUX, WAN
from tests.tiny_models import tiny_wan_pipeline, tiny_wan_transformer
from tests.variants import slow_unless


def two_experts():
    return tiny_wan_pipeline(transformer_2=tiny_wan_transformer(seed=9), boundary_ratio=0.5)


# What makes a pipeline, a call of it and how many layers it has.
MODELS = {
    "wan": (WAN, WAN.make, 3),
    "wan with two experts": (WAN, two_experts, 3),
    "flux": (FLUX, FLUX.make, 5),
}


@pytest.mark.parametrize("name", slow_unless(("wan with two experts", "flux"), MODELS))
def test_layers_have_budgets_of_their_own(name):
    """Layers that are dense or keep everything are those of the model, whatever the others do."""
    model, make, layers = MODELS[name]
    pipe = make()
    dense = model.generate(pipe)

    def generate(*budgets):
        config = model.SPARSE.override({"tile": None, "layers": list(budgets)})
        with chipsparse.enable(pipe, config) as handle:
            return model.generate(pipe), handle.report

    none = {"attention": "dense", "mlp": "dense"}
    found, report = generate({"layers": f"0-{layers - 1}", **none})
    assert torch.equal(found, dense)
    assert set(report.actions()) == {"dense"}
    assert report.cache_bytes == 0
    everything = {"layers": 1, "attention": 1.0, "mlp": 1.0}
    found, report = generate(everything, {"layers": f"0,2-{layers - 1}", **none})
    assert_close(found, dense)
    sparse = [record for record in report.steps if record.action == "sparse"]
    assert sparse
    assert all(record.fractions("mlp") == [1.0] for record in sparse)
    with pytest.raises(chipsparse.ConfigError, match=f"this model has {layers} layers"):
        generate({"layers": layers, "mlp": 0.5})
