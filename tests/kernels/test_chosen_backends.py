"""Operations on a backend that was chosen before: the same result without another look."""

import pytest
import torch

from chipsparse.kernels import (
    column_sparse_attention,
    neuron_selection,
    sparse_mlp_down,
    sparse_mlp_up,
)
from tests.kernels.formulas import (
    attention_inputs,
    index_lists,
    mlp_inputs,
    random_mask,
    random_neurons,
)

ON_CPU = {"dtype": torch.float32, "device": "cpu"}
ROWS, GROUP_ROWS, GROUPS = 40, 16, 3


def attention_call(op):
    inputs = attention_inputs(1, 2, ROWS, ROWS, 64, **ON_CPU)
    lists = index_lists(random_mask(1, 2, ROWS, ROWS, GROUP_ROWS, device="cpu"))

    def run(backend):
        return op.column_sparse_attention(*inputs, *lists, group_rows=GROUP_ROWS, backend=backend)

    return run, op.select(*inputs, group_rows=GROUP_ROWS)


def selection_call(op):
    hidden, weight, bias, _ = mlp_inputs(2, ROWS, 24, 50, **ON_CPU)
    means = torch.zeros(2, GROUPS, 50)

    def run(backend):
        settings = {"keep_count": 7, "group_rows": GROUP_ROWS, "backend": backend}
        return op.neuron_selection(hidden, weight, bias, means.clone(), **settings)

    return run, op.select(hidden, weight, means, group_rows=GROUP_ROWS)


def up_call(op):
    hidden, weight, bias, _ = mlp_inputs(2, ROWS, 24, 50, **ON_CPU)
    neurons = random_neurons(2, GROUPS, 17, 50, device="cpu")
    cache = torch.randn(2, ROWS, 50, generator=torch.Generator().manual_seed(1))

    def run(backend):
        settings = {"activation": "gelu", "group_rows": GROUP_ROWS, "backend": backend}
        return op.sparse_mlp_up(hidden, weight, bias, neurons, cache.clone(), **settings)

    return run, op.select(hidden, weight, cache, group_rows=GROUP_ROWS)


def down_call(op):
    hidden, weight, _, _ = mlp_inputs(2, ROWS, 24, 50, **ON_CPU)
    delta, weight = hidden[..., :17], weight.t()
    neurons = random_neurons(2, GROUPS, 17, 50, device="cpu")

    def run(backend):
        settings = {"group_rows": GROUP_ROWS, "backend": backend}
        return op.sparse_mlp_down(delta, weight, neurons, hidden.clone(), **settings)

    return run, op.select(delta, weight, group_rows=GROUP_ROWS)


CALLS = {
    column_sparse_attention: attention_call,
    neuron_selection: selection_call,
    sparse_mlp_up: up_call,
    sparse_mlp_down: down_call,
}


@pytest.mark.parametrize("op", CALLS, ids=lambda op: op.__name__.rpartition(".")[2])
def test_the_same_result_without_another_look(op, monkeypatch):
    run, choice = CALLS[op](op)
    expected = run(None)
    monkeypatch.setattr(op, "select", lambda *_, **__: pytest.fail("chosen again"))
    monkeypatch.setattr(op, "_check", lambda *_, **__: pytest.fail("checked again"))
    with pytest.raises(pytest.fail.Exception, match="again"):
        run(None)
    torch.testing.assert_close(run(choice), expected, rtol=0, atol=0)
