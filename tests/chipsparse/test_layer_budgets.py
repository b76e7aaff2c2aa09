"""Layers with budgets of their own: what each keeps, what dense ones compute, and the memory."""

import dataclasses

import pytest
import torch

from chipsparse.cache.kinds import KINDS, PARTS, kept_kinds, kind_bytes
from chipsparse.cache.memory_plan import Capacity, MemoryDemand, plan_memory
from chipsparse.kernels.mask_packing import packed_to_indices
from chipsparse.kernels.sparse_mlp_up import sparse_mlp_up
from chipsparse.layers.mlp import dense_step
from chipsparse.plan import SparsityPlan
from chipsparse.step import StepContext
from tests.chipsparse.test_session_memory import (
    CONFIG,
    HOSTED,
    TOTAL,
    call,
    equal,
    generate,
    layout_of,
    session_with,
    weights_of,
)
from tests.wrapped_backends import wrap_backends

LAYOUT = layout_of()  # two double blocks, two single ones; 63 tokens, 3 of them text
BUDGETS = {
    "layers": [
        {"layers": 0, "attention": "dense"},
        {"layers": 1, "attention": 0.5, "mlp": 0.75},
        {"layers": 2, "attention": 1.0, "mlp": "dense"},
    ]
}
COLUMNS = [None, 32, 63, 13]  # of 63; the last one as attention.density says: a fifth
NEURONS = [7, 18, None, 12]  # of 24 and 40; 30 % where nothing else is said


def test_each_layer_keeps_its_own_number(monkeypatch):
    neurons = []

    def listed(launch, call):
        neurons.append(call.neuron_indices.shape[-1])
        return launch(call)

    wrap_backends(monkeypatch, sparse_mlp_up, listed)
    session = session_with(BUDGETS)
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
        if NEURONS[layer] is None:
            assert cache.mlp.activation is None


def test_the_report_has_the_mean_of_sparse_layers():
    session = session_with(BUDGETS)
    generate(session, steps=3)
    last = session.report.steps[-1]
    assert last.attention_kept == pytest.approx((32 + 63 + 13) / 3 / 63)
    assert last.mlp_kept == pytest.approx((7 / 24 + 18 / 24 + 12 / 40) / 3)


@pytest.mark.parametrize("where", [{}, HOSTED], ids=["device", "host"])
def test_dense_layers_compute_what_the_model_does(where):
    session = session_with(BUDGETS | where)
    outputs = generate(session)
    assert session.report.fallbacks == []
    dense = session_with({"schedule.first_dense_layers": 4})
    expected = generate(dense)
    parts = 2 * LAYOUT.layers
    for place, (found, wanted) in enumerate(zip(outputs, expected, strict=True)):
        layer, part = divmod(place % parts, 2)
        if (COLUMNS, NEURONS)[part][layer] is None:
            assert torch.equal(found, wanted)
    step = outputs[parts * 4 : parts * 5]  # a sparse one: the others do differ
    assert not torch.equal(step[2], expected[parts * 4 + 2])


def test_caches_in_host_memory_give_the_same_bits():
    assert equal(generate(session_with(BUDGETS | HOSTED)), generate(session_with(BUDGETS)))


@pytest.mark.parametrize("rule", ["merge", "difference"])
def test_the_plan_counts_what_is_allocated(rule):
    session = session_with(BUDGETS | {"attention.delta_rule": rule, **HOSTED})
    generate(session, steps=3, branches=("cond",), known=1)
    config = session.config
    plan = SparsityPlan(config, LAYOUT, TOTAL)
    memory = plan_memory(plan, Capacity(1 << 40, 1 << 40), MemoryDemand())
    expected = {
        (layer, kind)
        for part, counts in zip(PARTS, (COLUMNS, NEURONS), strict=True)
        for kind in kept_kinds(config, part)
        for layer in range(LAYOUT.layers)
        if counts[layer] is not None
    }
    assert set(memory.placement.host) == expected
    for (layer, kind), size in memory.placement.host.items():
        assert size == kind_bytes(kind, layer, layout=LAYOUT, config=config, dtype=torch.float32)
        place = session._pool._opened.places["cond", layer, kind]
        assert place.form.nbytes <= place.memory.numel() == size
        if not KINDS[kind].rewritten:
            assert place.form.nbytes == size
    assert memory.host_bytes == memory.wanted == sum(memory.placement.host.values())


def test_a_layer_that_does_not_exist_ends_the_first_call():
    session = session_with({"layers": [{"layers": "3-4", "mlp": "dense"}]})
    with pytest.raises(ValueError, match=r"layers\[0\].layers: names layer 4, .* has 4 layers"):
        generate(session)
    larger = layout_of(layers=6)
    outputs = generate(session, layout=larger)
    assert len(outputs) == 2 * 2 * larger.layers * 8  # two branches, a skipped step


@pytest.mark.parametrize("bias", [False, True])
def test_a_dense_layer_is_added_to_what_it_is_given(bias):
    session = session_with(BUDGETS)
    weights = weights_of(2, 40)
    down_bias = torch.randn(16) if bias else None
    weights = dataclasses.replace(weights, down_bias=down_bias)
    hidden, addend = torch.randn(2, 1, LAYOUT.tokens, 16)
    generate(session, steps=2)
    session.begin(StepContext(1, 2, "cond", TOTAL), LAYOUT, torch.device("cpu"))
    found = session.mlp[2](session.state, hidden, weights, addend=addend.clone)
    layer = dense_step(None, hidden, weights, config=CONFIG.mlp, backend=None)
    torch.testing.assert_close(found, layer + addend)
    assert len(call(session, session.state.context, LAYOUT)) == 8
