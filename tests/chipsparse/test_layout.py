"""Layers of several kinds and tokens of several grids."""

import pytest

from chipsparse.layout import LayerKind, ModelLayout


def test_counts_tokens_and_numbers_layers_kind_after_kind():
    layout = ModelLayout(
        kinds=(LayerKind("double", 19, 12288), LayerKind("single", 38, 6000)),
        heads=24,
        head_dim=128,
        batch=1,
        grids=((1, 48, 80), (1, 10, 10)),
        text_tokens=512,
        text_first=True,
    )
    assert (layout.layers, layout.grid_tokens, layout.tokens) == (57, 3940, 4452)
    names = [layout.kind(layer).name for layer in range(57)]
    assert names == ["double"] * 19 + ["single"] * 38
    for layer in (-1, 57):
        with pytest.raises(ValueError, match=f"from 0 to 56, got {layer}"):
            layout.kind(layer)
