"""What is timed computes what it should, and a wrong kernel is not timed."""

import pytest
import torch
import torch.nn.functional as F

from chipsparse.cli.bench import layer_times
from chipsparse.cli.bench.layer_times import WrongResultError, attention_times, mlp_times
from chipsparse.config import SparsityConfig
from chipsparse.experiments.timing import Timing
from chipsparse.kernels.column_sparse_attention import column_sparse_attention
from chipsparse.kernels.sparse_mlp_down import sparse_mlp_down
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.plan import SparsityPlan
from tests.devices import DEVICES
from tests.wrapped_backends import wrap_backends

CPU = torch.device("cpu")
KIND = LayerKind("block", 4, 96)
GATED = LayerKind("gated", 2, 64, mlp_linears=3, mlp_sees_text=False)


def plan(kinds=(KIND,), **changes):
    layout = ModelLayout(kinds, heads=2, head_dim=16, batch=1, grids=((2, 8, 10),), text_tokens=8)
    config = SparsityConfig().override(
        {"attention.density": 0.25, "attention.block_size_q": 64, "mlp.block_size": 64}
    )
    return SparsityPlan(config.override(changes), layout, 10)


@pytest.fixture
def timed(monkeypatch):
    """Outputs of the calls in the order in which they are timed; the n-th takes n ms."""
    outputs = []

    def time_call(call, _):
        call()
        outputs.append(call())  # again: the first one must not change what the others compute
        return Timing(float(len(outputs)), "clock")

    monkeypatch.setattr(layer_times, "time_call", time_call)
    return outputs


@pytest.mark.parametrize("rule", ["merge", "difference"])
def test_attention(timed, rule):
    found = attention_times(
        plan(**{"attention.delta_rule": rule}), 1, device=CPU, dtype=torch.float32
    )
    baseline, dense, refresh, sparse, again = timed
    torch.testing.assert_close(again, baseline)
    assert baseline.shape == (1, 2, 168, 16)
    for output in (dense, refresh, sparse):
        torch.testing.assert_close(output, baseline, atol=1e-5, rtol=1e-4)
    assert found.milliseconds == {"dense": 2.0, "refresh": 3.0, "sparse": 4.0}
    assert (found.baseline_ms, found.baseline) == (1.0, "scaled_dot_product_attention")
    assert found.speedup == 0.25
    assert (found.part, found.layer, found.kind) == ("attention", 1, "block")
    # A quarter of 168 columns, the text among them, and what the config adds at random.
    assert found.kept == 42 + plan().attention_random_count()
    assert found.total == 168
    assert 0 <= found.error < 1e-5
    assert found.backends["column_sparse_attention"] == "reference"


def test_the_sparse_step_reads_only_the_kept_columns(timed, monkeypatch):
    seen = []

    def watched(launch, call):
        seen.append(call.counts.float().mean().item())
        return launch(call)

    wrap_backends(monkeypatch, column_sparse_attention, watched)
    found = attention_times(plan(), 0, device=CPU, dtype=torch.float32)
    assert seen
    assert max(seen) <= found.kept


@pytest.mark.parametrize("kind", [KIND, GATED])
def test_mlp(timed, kind):
    found = mlp_times(plan((kind,)), 0, device=CPU, dtype=torch.float32)
    baseline, dense, sparse, again = timed
    torch.testing.assert_close(again, baseline)
    tokens = 168 if kind is KIND else 160
    assert baseline.shape == (1, tokens, 32)
    # The baseline is the layer at the sparse step's input, 0.1 away from the dense one's.
    moved = (baseline - dense).norm()
    assert 0.01 < moved / baseline.norm() < 0.3
    # The sparse one follows it part of the way.
    assert 0.05 * moved < (sparse - dense).norm()
    assert (sparse - baseline).norm() < moved
    assert found.milliseconds == {"dense": 2.0, "refresh": 2.0, "sparse": 3.0}
    assert (found.baseline_ms, found.total) == (1.0, kind.intermediate_size)
    assert found.kept == round(0.3 * kind.intermediate_size)
    assert 0 <= found.error < 1e-5
    assert found.baseline.startswith("two linears and " + ("GELU" if kind is KIND else "SiLU"))


@pytest.mark.parametrize("part", ["attention", "mlp"])
def test_a_wrong_result_is_not_timed(timed, monkeypatch, part):
    def wrong(launch, call):
        result = launch(call)
        if isinstance(result, tuple):
            return result[0] * (1.0 if call.delta_rule is None else 1.2), result[1]
        return result * 1.2

    wrap_backends(
        monkeypatch, column_sparse_attention if part == "attention" else sparse_mlp_down, wrong
    )
    measure = attention_times if part == "attention" else mlp_times
    with pytest.raises(WrongResultError, match=r"of layer 0 is off by 2.0e-01"):
        measure(plan(), 0, device=CPU, dtype=torch.float32)
    assert timed == []


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_real_times(where, dtype):
    device = torch.device(where)
    for measure in (attention_times, mlp_times):
        found = measure(plan(), 0, device=device, dtype=dtype)
        assert found.error <= layer_times.ERROR_LIMIT[dtype]
        assert found.baseline_ms > 0
        assert min(found.milliseconds.values()) > 0


def test_the_fastest_of_pytorchs_kernels_is_the_baseline(monkeypatch):
    from torch.nn.attention import SDPBackend

    times = {None: 3.0, SDPBackend.CUDNN_ATTENTION: None, SDPBackend.FLASH_ATTENTION: 2.0}
    libraries = {
        "": None,
        " (cuDNN)": SDPBackend.CUDNN_ATTENTION,
        " (flash)": SDPBackend.FLASH_ATTENTION,
    }
    monkeypatch.setattr(layer_times, "_libraries", lambda _: libraries)
    monkeypatch.setattr(layer_times, "_milliseconds_with", lambda backend, *_: times[backend])
    found = attention_times(plan(), 0, device=CPU, dtype=torch.float32)
    assert (found.baseline_ms, found.baseline) == (2.0, "scaled_dot_product_attention (flash)")


def test_the_baseline_is_the_faster_of_two_measurements(monkeypatch):
    """A machine that slows down or warms up must not make the others look fast."""
    for order in ([9.0, 1.0, 1.0, 1.0, 5.0], [5.0, 1.0, 1.0, 1.0, 9.0]):
        times = iter(order)
        monkeypatch.setattr(layer_times, "time_call", lambda *_, t=times: Timing(next(t), "clock"))
        assert attention_times(plan(), 0, device=CPU, dtype=torch.float32).baseline_ms == 5.0
    times = iter([5.0, 1.0, 1.0, 9.0])
    monkeypatch.setattr(layer_times, "time_call", lambda *_: Timing(next(times), "clock"))
    assert mlp_times(plan(), 0, device=CPU, dtype=torch.float32).baseline_ms == 5.0


def test_a_kernel_that_cannot_run_is_no_baseline():
    from torch.nn.attention import SDPBackend

    tensors = torch.randn(3, 1, 2, 8, 16)

    def call():
        return F.scaled_dot_product_attention(*tensors)

    assert layer_times._milliseconds_with(SDPBackend.CUDNN_ATTENTION, call, CPU) is None
    assert layer_times._milliseconds_with(None, call, CPU) > 0
