"""The operations in compiled code: one graph, the same results, the checks still at work."""

import functools

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from chipsparse.kernels.column_selection import column_selection
from chipsparse.kernels.column_sparse_attention import column_sparse_attention
from chipsparse.kernels.dense_attention import dense_attention
from chipsparse.kernels.dense_attention_column_sums import dense_attention_column_sums
from chipsparse.kernels.mask_packing import pack_mask, packed_to_indices, unpack_mask
from chipsparse.kernels.neuron_selection import mean_preactivations, neuron_selection
from chipsparse.kernels.sparse_mlp_down import sparse_mlp_down
from chipsparse.kernels.sparse_mlp_up import dense_activation, sparse_mlp_up
from tests.kernels.formulas import (
    attention_inputs,
    gate_inputs,
    groups_of,
    index_lists,
    mlp_inputs,
    random_mask,
    random_neurons,
    token_contiguous,
)

ROWS, GROUP_ROWS, HEADS, HEAD_DIM = 40, 16, 2, 8
MEBIBYTE = 1 << 20

compiled = functools.partial(torch.compile, fullgraph=True)


@pytest.fixture(autouse=True)
def fresh_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layouts():
    """Query, key and value as dense tensors, as the model has them, and as parts of one tensor."""
    contiguous = attention_inputs(2, 2, ROWS, 33, HEAD_DIM, dtype=torch.float32, device="cpu")
    strided = attention_inputs(
        1, 3, ROWS, ROWS, HEAD_DIM, dtype=torch.bfloat16, device="cpu", strided=True
    )
    fused = torch.randn(2, ROWS, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4).unbind()
    return {"contiguous": contiguous, "strided": strided, "fused": fused}


def lists_for(query, key):
    mask = random_mask(*query.shape[:3], key.shape[2], GROUP_ROWS, device="cpu")
    return index_lists(mask)


def op_calls():
    """Arguments of every op, as `torch.ops.chipsparse` takes them."""
    for layout, (query, key, value) in layouts().items():
        lse = torch.randn(query.shape[:3])
        for backend in (None, "reference"):
            name = f"{layout}-{backend}"
            yield name, "dense_attention", (query, key, value, None, backend)
            yield (
                name,
                "dense_attention_column_sums",
                (query, key, value, lse, GROUP_ROWS, None, MEBIBYTE, backend),
            )
        attention = (query, key, value, *lists_for(query, key), GROUP_ROWS, None)
        plain = (None, None, None, None, MEBIBYTE, False, None)
        merge = ("merge", torch.randn_like(value[:, :, :1].expand_as(query)), lse, lse.sigmoid())
        yield f"{layout}-plain", "column_sparse_attention", (*attention, *plain)
        yield (
            f"{layout}-merge",
            "column_sparse_attention",
            (*attention, *merge, MEBIBYTE, True, "reference"),
        )
    sums = torch.rand(2, 3, 4, 37)
    static = torch.zeros(4, 37, dtype=torch.bool).fill_diagonal_(True).expand_as(sums)
    yield "static", "column_selection", (sums, static, 5, 2, 7, None)
    yield "bf16", "column_selection", (sums.bfloat16(), None, 5, 0, -1, "reference")
    for columns in (0, 1, 37, 64):
        mask = torch.rand(2, 3, columns) < 0.5
        packed = pack_mask(mask)
        yield f"{columns}", "pack_mask", (mask, None)
        yield f"{columns}", "unpack_mask", (packed, columns, None)
        yield f"{columns}", "packed_to_indices", (packed, columns, columns, None)


def mlp_op_calls():
    """Likewise the ops of the MLP, with and without a gate, on caches of either layout."""
    hidden, weight, bias, down = mlp_inputs(2, ROWS, 24, 18, dtype=torch.float32, device="cpu")
    lists = random_neurons(2, 3, 7, 18, device="cpu")
    counts = torch.tensor([[7, 0, 3], [2, 7, 1]], dtype=torch.int32)
    cache = torch.randn(2, ROWS, 18)
    delta, output = torch.randn(2, ROWS, 7), torch.randn(2, ROWS, 24)
    up = (hidden, weight, bias, lists)
    for gate in (None, weight):
        name = "plain" if gate is None else "gated"
        activation = ("silu", gate, None, GROUP_ROWS, None)
        yield name, "dense_activation", (hidden, weight, bias, *activation)
        yield name, "sparse_mlp_up", (*up, cache.clone(), counts, *activation)
        yield f"{name}-turned", "sparse_mlp_up", (*up, token_contiguous(cache), None, *activation)
        means = (gate, None, "silu", GROUP_ROWS, None)
        yield name, "mean_preactivations", (hidden, weight, None, *means)
        selected = (hidden, weight, bias, torch.randn(2, 3, 18))
        yield name, "neuron_selection", (*selected, 5, *means)
        yield f"{name}-all", "neuron_selection", (*selected, 50, *means)
    for addend in (None, output.bfloat16()):
        arguments = (delta, down, lists, output.clone(), addend, counts, GROUP_ROWS, None)
        yield f"{'plain' if addend is None else 'addend'}", "sparse_mlp_down", arguments


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param(op, arguments, id=f"{op}-{name}")
        for name, op, arguments in (*op_calls(), *mlp_op_calls())
    ],
)
def test_fakes_and_schemas_tell_the_truth(name, arguments):
    op = getattr(torch.ops.chipsparse, name).default
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


class Layer(torch.nn.Module):
    """Column-sparse self-attention with static lists, as a model would write it."""

    def __init__(self, rule):
        super().__init__()
        self.rule = rule
        self.project = torch.nn.Linear(HEADS * HEAD_DIM, 3 * HEADS * HEAD_DIM)
        self.out = torch.nn.Linear(HEADS * HEAD_DIM, HEADS * HEAD_DIM)

    def forward(self, hidden, indices, counts, cache):
        heads = self.project(hidden).unflatten(-1, (3, HEADS, HEAD_DIM))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()
        output, lse = column_sparse_attention(
            query, key, value, indices, counts, group_rows=GROUP_ROWS, delta_rule=self.rule, **cache
        )
        return self.out(output.transpose(1, 2).flatten(2)), lse


def layer_inputs(rows, rule, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = random_mask(2, HEADS, rows, rows, GROUP_ROWS, device="cpu", seed=seed)
    mask[..., -6:] = True  # so that every list keeps something
    cache = {}
    if rule is not None:
        cache["residual"] = torch.randn(2, HEADS, rows, HEAD_DIM, generator=generator)
    if rule == "merge":
        cache["lse_dense"] = torch.randn(2, HEADS, rows, generator=generator)
        cache["kept_mass"] = torch.rand(2, HEADS, rows, generator=generator)
    hidden = torch.randn(2, rows, HEADS * HEAD_DIM, generator=generator)
    return hidden, *index_lists(mask), cache


@torch.no_grad()
@pytest.mark.parametrize("rule", ["merge", "difference", None])
def test_a_layer_compiles_into_one_graph(rule):
    counter = CompileCounterWithBackend("aot_eager")
    layer = Layer(rule)
    together = compiled(layer, backend=counter)
    graphs = []
    for rows in (40, 75, 131, 64):
        inputs = layer_inputs(rows, rule, seed=rows)
        for found, expected in zip(together(*inputs), layer(*inputs), strict=True):
            torch.testing.assert_close(found, expected)
        graphs.append(counter.frame_count)
    # One more graph when the size is first seen to change, and none after.
    assert graphs[0] == 1
    assert graphs[1] <= 2
    assert graphs[-1] == graphs[1]
    assert (
        sum("column_sparse_attention" in str(n.target) for n in counter.graphs[0].graph.nodes) == 1
    )


def refresh(query, key, value, lse, static, keep_count, seed):
    """All ops one after the other, as a refresh and a sparse step run them."""
    _, dense_lse = dense_attention(query, key, value)
    output, _, sums = dense_attention_column_sums(query, key, value, lse, group_rows=GROUP_ROWS)
    packed = column_selection(
        sums, keep_count=keep_count, static_columns=static, random_count=2, seed=seed
    )
    packed = pack_mask(unpack_mask(packed, key.shape[2]))
    indices, counts = packed_to_indices(packed, key.shape[2], capacity=keep_count + 2)
    kept, kept_lse = column_sparse_attention(
        query, key, value, indices, counts, group_rows=GROUP_ROWS, check_indices=True
    )
    return output - kept, kept_lse - dense_lse, indices, counts


@torch.no_grad()
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_all_ops_compile_into_one_graph(backend):
    together = compiled(refresh, backend=backend)
    for seed, (query, key, value) in enumerate(layouts().values()):
        lse = torch.randn(query.shape[:3])
        static = torch.zeros(groups_of(ROWS, GROUP_ROWS), key.shape[2], dtype=torch.bool)
        static[:, -3:] = True
        arguments = (query, key, value, lse, static, 9, seed + (1 << 32))
        for found, expected in zip(together(*arguments), refresh(*arguments), strict=True):
            torch.testing.assert_close(found, expected)


def mlp_steps(hidden, weights, gate, turned):
    """A dense and two sparse steps of an MLP, as a model would run them."""
    up, bias, down = weights
    options = {"activation": "silu", "group_rows": GROUP_ROWS, "gate_weight": gate}
    activation = dense_activation(hidden, up, bias, **options)
    if turned:
        activation = token_contiguous(activation)
    output = torch.nn.functional.linear(activation, down)
    means = mean_preactivations(hidden, up, bias, **options)
    results = [output.clone()]
    for _ in range(2):
        hidden = hidden * 1.5 + 0.1
        neurons = neuron_selection(hidden, up, bias, means, keep_count=7, **options)
        delta = sparse_mlp_up(hidden, up, bias, neurons, activation, **options)
        results.append(
            sparse_mlp_down(delta, down, neurons, output, addend=hidden, group_rows=GROUP_ROWS)
        )
    return results, activation, output, means, delta


@torch.no_grad()
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("gated", [False, True])
def test_mlp_ops_compile_into_one_graph(gated, backend):
    counter = CompileCounterWithBackend(backend)
    together = torch.compile(mlp_steps, fullgraph=True, backend=counter)
    for turned, rows in ((False, 40), (True, 40), (True, 75), (True, 131)):
        hidden, up, bias, down = mlp_inputs(2, rows, 24, 18, dtype=torch.float32, device="cpu")
        gate = gate_inputs(24, 18, dtype=torch.float32, device="cpu")[0] if gated else None
        arguments = (hidden, (up, bias, down), gate, turned)
        found, expected = together(*arguments), mlp_steps(*arguments)
        torch.testing.assert_close(found, expected)
        assert found[-1].stride() == expected[-1].stride()
    ops = [str(node.target) for node in counter.graphs[0].graph.nodes]
    for name, times in (("sparse_mlp_up", 2), ("sparse_mlp_down", 2), ("neuron_selection", 2)):
        assert sum(name in op for op in ops) == times


@pytest.mark.parametrize(
    ("rows", "backend", "strides"),
    [
        (40, "reference", (720, 18, 1)),
        (40, "triton", (720, 1, 40)),
        (43, "triton", (864, 1, 48)),
    ],
)
def test_the_fake_dense_activation_knows_the_layout(rows, backend, strides, monkeypatch):
    monkeypatch.setattr("chipsparse.kernels.triton_support.interpreting", lambda: True)
    with FakeTensorMode():
        hidden, weight = torch.empty(1, rows, 24).half(), torch.empty(18, 24).half()
        arguments = (hidden, weight, None, "gelu", None, None, GROUP_ROWS, backend)
        assert torch.ops.chipsparse.dense_activation(*arguments).stride() == strides


def test_seeds_of_any_size_compile():
    sums = torch.rand(1, 2, 3, 50)
    for seed in (-1, 2**63, 2**64 - 1, 2**64 + 5):
        draw = functools.partial(column_selection, keep_count=0, random_count=5, seed=seed)
        assert torch.equal(compiled(draw, backend="eager")(sums), draw(sums))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": torch.zeros(1, 2, 3, 4)}, "indices must be torch.int32, got torch.float32"),
        ({"counts": torch.zeros(1, 2, 2, dtype=torch.int32)}, r"counts must be \[1, 2, 3\]"),
        ({"delta_rule": "difference"}, "'difference' needs residual; residual is None"),
        ({"delta_rule": "add"}, "delta_rule must be merge, difference or None, got 'add'"),
        ({"group_rows": 0}, "group_rows must be at least 1, got 0"),
        ({"backend": "cuda"}, "unknown backend 'cuda'; it has gluon, triton, reference"),
    ],
)
def test_mistakes_in_compiled_code_are_named(change, message):
    query, key, value = attention_inputs(1, 2, ROWS, 9, 8, dtype=torch.float32, device="cpu")
    lists = {
        "indices": torch.zeros(1, 2, 3, 4, dtype=torch.int32),
        "counts": torch.zeros(1, 2, 3, dtype=torch.int32),
    }
    together = compiled(column_sparse_attention, backend="aot_eager")
    with pytest.raises(ValueError, match=message):
        together(query, key, value, **{**lists, "group_rows": GROUP_ROWS, **change})


def test_compiled_code_must_give_a_capacity():
    packed = pack_mask(torch.rand(3, 20) < 0.5)
    with pytest.raises(Unsupported, match="compiled code must give a capacity, got None"):
        compiled(packed_to_indices, backend="eager")(packed, 20)


# `check_indices` of column_sparse_attention.


def checked(indices, counts, run=column_sparse_attention):
    query, key, value = attention_inputs(1, 2, 20, 9, 8, dtype=torch.float32, device="cpu")
    return run(query, key, value, indices, counts, group_rows=10, check_indices=True)


def good_lists():
    """Two heads with two groups each, of up to three of nine columns."""
    indices = torch.tensor([[[[0, 4, 8], [7, 0, 0]], [[2, 1, 0], [3, 3, 3]]]], dtype=torch.int32)
    return indices, torch.tensor([[[3, 1], [3, 0]]], dtype=torch.int32)


def test_good_lists_pass():
    indices, counts = good_lists()
    query, key, value = attention_inputs(1, 2, 20, 9, 8, dtype=torch.float32, device="cpu")
    expected = column_sparse_attention(query, key, value, indices, counts, group_rows=10)
    found = checked(indices, counts)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    checked(indices[..., :0], torch.zeros_like(counts))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((0, 0, 0, 2), 9, r"indices\[0, 0, 0, 2\] is 9, not within \[0, 9\)"),
        ((0, 1, 0, 1), -1, r"indices\[0, 1, 0, 1\] is -1, not within \[0, 9\)"),
        ((0, 1, 0, 2), 2, r"the list indices\[0, 1, 0\] repeats column 2"),
        ((0, 0, 0, 1), 0, r"the list indices\[0, 0, 0\] repeats column 0"),
    ],
)
def test_bad_indices_are_named(place, value, message):
    indices, counts = good_lists()
    indices[place] = value
    with pytest.raises(ValueError, match=f"column_sparse_attention: {message}"):
        checked(indices, counts)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((0, 0, 1), 4, r"counts\[0, 0, 1\] is 4, not within \[0, 3\]"),
        ((0, 1, 0), -2, r"counts\[0, 1, 0\] is -2, not within \[0, 3\]"),
        ((0, 1, 1), 2, r"the list indices\[0, 1, 1\] repeats column 3"),
    ],
)
def test_bad_counts_are_named(place, value, message):
    indices, counts = good_lists()
    counts[place] = value
    with pytest.raises(ValueError, match=f"column_sparse_attention: {message}"):
        checked(indices, counts)


def test_compiled_code_checks_indices_too():
    indices, counts = good_lists()
    indices[0, 0, 0, 0] = 9
    with pytest.raises(ValueError, match=r"indices\[0, 0, 0, 0\] is 9"):
        checked(indices, counts, compiled(column_sparse_attention, backend="eager"))


def test_a_call_of_another_thread_is_not_compiled(monkeypatch):
    """PyTorch tells all threads of the process that it compiles, while one of them does."""
    query, key, value = attention_inputs(
        1, HEADS, ROWS, ROWS, HEAD_DIM, dtype=torch.float32, device="cpu"
    )
    packed = pack_mask(random_mask(1, 1, ROWS, ROWS, GROUP_ROWS, device="cpu"))
    expected = dense_attention(query, key, value), packed_to_indices(packed, ROWS)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True, raising=False)
    found = dense_attention(query, key, value), packed_to_indices(packed, ROWS)
    for ours, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))
