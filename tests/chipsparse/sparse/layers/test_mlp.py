"""One feed-forward layer over its steps, on the reference."""

import pytest
import torch
import torch.nn.functional as F

import chipsparse.sparse.layers.mlp
from chipsparse.kernels.token_layout import empty_token_contiguous
from chipsparse.sparse.cache.tensors import MLPCache
from chipsparse.sparse.layers.mlp import dense_step, sparse_step
from chipsparse.sparse.layers.mlp_weights import MLPWeights

BATCH = 2
TOKENS = 37
CHANNELS = 16
NEURONS = 40
ROWS = 8  # of a block


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights_of(gate, bias=True):
    wide = NEURONS if gate == "none" else 2 * NEURONS
    up = normal(wide, CHANNELS, seed=1)
    up_bias = normal(wide, seed=2) if bias else None
    down = normal(CHANNELS, NEURONS, seed=3)
    down_bias = normal(CHANNELS, seed=4) if bias else None
    apart = ()
    if gate == "apart":  # the same numbers as of "second", in two linears
        (up, own) = up.chunk(2)
        biases = up_bias.chunk(2) if bias else (None, None)
        up_bias = biases[0]
        apart = (own, biases[1])
    return MLPWeights.from_linears(up, up_bias, down, down_bias, "silu", gate, *apart)


def expected(hidden, gate, bias=True):
    """The layer as models write it."""
    wide = NEURONS if gate == "none" else 2 * NEURONS
    up_bias = normal(wide, seed=2) if bias else None
    up = F.linear(hidden, normal(wide, CHANNELS, seed=1), up_bias)
    if gate == "none":
        activation = F.silu(up)
    else:
        first, second = up.chunk(2, dim=-1)
        activation = F.silu(first) * second if gate == "first" else first * F.silu(second)
    down_bias = normal(CHANNELS, seed=4) if bias else None
    return F.linear(activation, normal(CHANNELS, NEURONS, seed=3), down_bias)


def dense(cache, hidden, weights, **options):
    return dense_step(cache, hidden, weights, block_size=ROWS, backend=None, **options)


def sparse(cache, hidden, weights, keep_count=NEURONS, **options):
    options = {"block_size": ROWS, "keep_count": keep_count, "backend": None, **options}
    return sparse_step(cache, hidden, weights, **options)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gate", ["none", "first", "second", "apart"])
@pytest.mark.parametrize("cached", [True, False])
def test_a_dense_step_is_the_layer(gate, bias, cached):
    hidden = normal(BATCH, TOKENS, CHANNELS)
    cache = MLPCache() if cached else None
    addend = normal(BATCH, TOKENS, CHANNELS, seed=9)
    weights = weights_of(gate, bias)
    made = dense(cache, hidden, weights)
    torch.testing.assert_close(made, expected(hidden, gate, bias), atol=1e-4, rtol=1e-4)
    assert not cached or cache.output.data_ptr() != made.data_ptr()
    summed = dense(cache, hidden, weights, addend=addend.clone)
    torch.testing.assert_close(summed, made + addend)
    if cached:
        torch.testing.assert_close(cache.output, made)  # without the addend
        assert cache.output.data_ptr() != summed.data_ptr()


@pytest.mark.parametrize("gate", ["none", "first", "second"])
@pytest.mark.parametrize("adds", [False, True])
def test_sparse_steps_with_all_neurons_are_the_layer_and_without_any_its_last_output(gate, adds):
    cache = MLPCache()
    weights = weights_of(gate)
    before = normal(BATCH, TOKENS, CHANNELS)
    made = dense(cache, before, weights)
    addend = normal(BATCH, TOKENS, CHANNELS, seed=19) if adds else None
    given = addend.clone if adds else None
    output = sparse(cache, 2 * before, weights, 0, addend=given)
    torch.testing.assert_close(output, made + (addend if adds else 0))
    for seed in (5, 6):
        hidden = normal(BATCH, TOKENS, CHANNELS, seed=seed)
        output = sparse(cache, hidden, weights, addend=given)
        wanted = expected(hidden, gate) + (addend if adds else 0)
        torch.testing.assert_close(output, wanted, atol=2e-4, rtol=2e-4)
        output.fill_(torch.nan)  # what the caller does to its result is nobody else's business
        assert cache.output.isfinite().all()


@pytest.mark.parametrize("gate", ["none", "second"])
def test_what_rounding_to_fp8_loses_does_not_add_up(gate):
    """All neurons are computed anew, so their rounding is all that is lost, however often."""
    cache = MLPCache(in_fp8=True)
    weights = weights_of(gate)
    before = normal(BATCH, TOKENS, CHANNELS)
    made = dense(cache, before, weights)
    assert cache.activation.dtype == torch.float8_e4m3fn
    assert cache.token_scale.shape == (BATCH, TOKENS, 1)
    torch.testing.assert_close(made, expected(before, gate), atol=1e-4, rtol=1e-4)
    errors = []
    for seed in range(5, 35):
        hidden = normal(BATCH, TOKENS, CHANNELS, seed=seed)
        wanted = expected(hidden, gate)
        errors.append(float((sparse(cache, hidden, weights) - wanted).norm() / wanted.norm()))
    assert 0.01 < sorted(errors)[15] < 0.05  # the median: outputs may be small by chance
    assert sum(errors[-10:]) < 1.2 * sum(errors[:10])


@pytest.mark.parametrize("tokens", [5, 37, 40])
def test_the_second_linear_takes_token_contiguous_activations(tokens, monkeypatch):
    """As kernels on a GPU leave them: the same numbers in other strides."""
    plain = chipsparse.sparse.layers.mlp.dense_activation

    def token_contiguous(*args, **kwargs):
        activation = plain(*args, **kwargs)
        return empty_token_contiguous(activation, *activation.shape).copy_(activation)

    hidden = normal(BATCH, tokens, CHANNELS)
    monkeypatch.setattr(chipsparse.sparse.layers.mlp, "dense_activation", token_contiguous)
    for bias in (True, False):
        cache = MLPCache()
        with torch.no_grad():
            output = dense(cache, hidden, weights_of("none", bias))
        assert cache.activation.stride(1) == 1
        torch.testing.assert_close(output, expected(hidden, "none", bias), atol=1e-4, rtol=1e-4)
        assert output.is_contiguous()
