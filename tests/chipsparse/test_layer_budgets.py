"""Layers with budgets of their own: how much each keeps, and the results of dense ones."""

import pytest
import torch

from chipsparse.kernels.mask_packing import packed_to_indices
from chipsparse.kernels.sparse_mlp_up import sparse_mlp_up
from tests.chipsparse.sessions import (
    generate,
    layout_of,
    session_with,
)
from tests.chipsparse.test_session_memory import DENSE_LAYERS
from tests.wrapped_backends import wrap_backends

LAYOUT = layout_of()  # two double blocks, two single ones; 63 tokens, 3 of them text
COLUMNS = [None, 32, 63, 13]  # of 63; the last one as attention.density says: a fifth
NEURONS = [7, 18, None, 12]  # of 24 and 40; 30 % where nothing else is said


def test_each_layer_keeps_its_own_number(monkeypatch):
    neurons = []

    def listed(launch, call):
        neurons.append(call.neuron_indices.shape[-1])
        return launch(call)

    wrap_backends(monkeypatch, sparse_mlp_up, listed)
    session = session_with(DENSE_LAYERS)
    generate(session, steps=3)  # up to the first sparse step
    assert neurons == 2 * [count for count in NEURONS if count is not None]  # of both branches
    for layer in range(LAYOUT.layers):
        cache = session._caches["cond", layer]
        if COLUMNS[layer] is None:
            assert cache.attention.columns is None
        else:
            assert cache.attention.capacity == COLUMNS[layer]
            _, counts = packed_to_indices(cache.attention.columns, LAYOUT.tokens, capacity=None)
            assert (counts == COLUMNS[layer]).all()
        assert (cache.mlp.activation is None) == (NEURONS[layer] is None)
    last = session.report.steps[-1]
    assert last.attention_kept == pytest.approx((32 + 63 + 13) / 3 / 63)
    assert last.mlp_kept == pytest.approx((7 / 24 + 18 / 24 + 12 / 40) / 3)


def test_dense_layers_compute_what_the_model_does():
    session = session_with(DENSE_LAYERS)
    outputs = generate(session)
    expected = generate(session_with({"schedule.first_dense_layers": 4}))
    assert session.report.fallbacks == []
    parts = 2 * LAYOUT.layers
    for place, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        layer, part = divmod(place % parts, 2)
        if (COLUMNS, NEURONS)[part][layer] is None:
            assert torch.equal(output, wanted)
    step = outputs[parts * 4 : parts * 5]  # a sparse one: the others do differ
    assert not torch.equal(step[2], expected[parts * 4 + 2])
