"""Layers of several kinds and tokens of several grids."""

import pytest

from chipsparse import SparsityConfig
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.plan import SparsityPlan

FLUX = ModelLayout(
    kinds=(LayerKind("double", 19, 12288), LayerKind("single", 38, 6000)),
    heads=24,
    head_dim=128,
    batch=1,
    grids=((1, 48, 80), (1, 10, 10)),
    text_tokens=512,
    text_first=True,
)


def test_counts_layers_and_tokens():
    assert FLUX.layers == 57
    assert FLUX.grid_tokens == 3940
    assert FLUX.tokens == 4452


def test_layers_are_numbered_kind_after_kind():
    names = [FLUX.kind(layer).name for layer in range(57)]
    assert names == ["double"] * 19 + ["single"] * 38
    for layer in (-1, 57):
        with pytest.raises(ValueError, match=f"from 0 to 56, got {layer}"):
            FLUX.kind(layer)


def test_the_plan_keeps_neurons_of_each_kind():
    plan = SparsityPlan(SparsityConfig().override({"mlp.density": 0.25}), FLUX)
    assert [plan.mlp_keep_count(layer) for layer in (0, 18, 19, 56)] == [3072, 3072, 1500, 1500]
