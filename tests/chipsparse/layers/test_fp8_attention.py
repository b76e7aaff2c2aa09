"""Full attention in FP8 as layers compute it: what is recorded, and where it is refused."""

from types import SimpleNamespace

import pytest
import torch

from chipsparse.cache.tensors import AttentionCache
from chipsparse.config import AttentionConfig, ConfigError
from chipsparse.kernels.dispatch import Backend, Choice
from chipsparse.layers import attention, fp8_attention
from chipsparse.layers.attention import backend_choices, dense_step, refresh_step, sparse_step
from chipsparse.layers.attention_inputs import AttentionInputs
from tests.chipsparse.layers.test_attention import (
    BUDGET,
    ROWS,
    TOKENS,
    given,
    inputs,
    row_mask,
    softmax_parts,
)

CONFIG = AttentionConfig(precision="fp8", block_size_q=ROWS)


def refreshed(config=CONFIG, **options):
    cache = AttentionCache()
    tensors = given(**options)
    dense_step(cache, tensors, precision=config.precision)
    output = refresh_step(cache, tensors, config=config, budget=BUDGET)
    return cache, output


def far(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dim", [32, 24])  # one that can be rotated, and one that cannot
def test_a_dense_step_is_rounded_and_its_lse_hardly(dim):
    cache = AttentionCache()
    output = dense_step(cache, given(dim=dim), precision="fp8")
    expected, lse = softmax_parts(*inputs(dim=dim))
    assert 1e-2 < far(output, expected) < 5e-2  # of random values, whose mean is near zero
    assert (cache.lse - lse).pow(2).mean().sqrt() < 3e-3


def test_a_refresh_keeps_much_the_same_columns():
    in_fp8, output = refreshed()
    exact, expected = refreshed(AttentionConfig(block_size_q=ROWS))
    assert 1e-2 < far(output, expected.double()) < 5e-2
    masks = row_mask(in_fp8), row_mask(exact)
    assert (masks[0] == masks[1]).double().mean() > 0.99
    assert (in_fp8.kept_mass - exact.kept_mass).abs().mean() < 1e-2


def test_heads_may_come_in_chunks(monkeypatch):
    at_once, output = refreshed()
    monkeypatch.setattr(attention, "COLUMN_SUMS_BYTES", 2 * 5 * TOKENS * 4)  # of one head
    by_head, same = refreshed()
    assert torch.equal(output, same)
    assert torch.equal(at_once.lse, by_head.lse)


def test_sparse_steps_after_it_give_its_output_where_nothing_changed():
    cache, output = refreshed()
    again = sparse_step(cache, given(), config=CONFIG)
    torch.testing.assert_close(again, output, atol=1e-5, rtol=1e-5)


def test_a_gpu_without_fp8_is_refused(monkeypatch):
    reference = Choice(Backend("reference", lambda: None), (("triton", "capability 8.0 has none"),))
    operation = SimpleNamespace(choose=lambda *_, **__: reference)
    monkeypatch.setattr(fp8_attention, "fp8_quantization", operation)
    monkeypatch.setattr(fp8_attention, "fp8_dense_attention", operation)
    on_gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    choose = fp8_attention.fp8_choices
    with pytest.raises(
        ConfigError, match=r"^attention.precision fp8 cannot run here: capability 8.0 has none$"
    ):
        choose(AttentionInputs(on_gpu, on_gpu, on_gpu), block_size_q=128)
    forced = AttentionInputs(on_gpu, on_gpu, on_gpu, backend="reference")
    assert choose(forced, block_size_q=128)


def test_the_choices_name_what_it_runs_on():
    choices = backend_choices(given(), block_size_q=ROWS, in_fp8=True)
    for name in ("fp8_quantization", "fp8_dense_attention"):
        assert choices[name].backend.name == "reference"
    assert "fp8_quantization" not in backend_choices(given(), block_size_q=ROWS)
