import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from chipsparse.kernels import dense_attention as package
from chipsparse.kernels import triton_support
from chipsparse.kernels.dense_attention import dense_attention, library, measure
from chipsparse.kernels.dense_attention.measure import FastestKernel
from chipsparse.kernels.kinds import known_of
from tests.kernels import formulas
from tests.kernels.formulas import assert_attention, assert_close, attention_inputs, full_attention

ENOUGH = package.FASTER_FROM_TOKENS
WIDTH = package.FASTER_HEAD_DIM
SHAPES = [(1, 1, 1, 1, 64), (2, 3, 7, 9, 64), (1, 2, 131, 333, 128), (1, 1, 1337, 1337, 64)]


@formulas.backend_names(dense_attention)
@pytest.mark.parametrize("dtype", [*formulas.DTYPES, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strided", [False, True])
def test_matches_the_formula(backend, shape, dtype, strided, device):
    inputs = attention_inputs(*shape, dtype=dtype, device=device, strided=strided)
    output, lse = dense_attention(*inputs, backend=backend)
    assert output.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert lse.shape == shape[:3]
    assert_attention((output, lse), full_attention(*inputs), dtype)


@formulas.backend_names(dense_attention)
def test_large_scores_do_not_overflow(backend, device):
    query, key, value = attention_inputs(1, 1, 17, 40, 64, dtype=torch.float32, device=device)
    output, lse = dense_attention(query * 1000, key, value, backend=backend)
    expected, expected_lse = full_attention(query * 1000, key, value)
    assert_close(output, expected, 1e-3)
    assert_close(lse, expected_lse, formulas.LSE_TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", formulas.DTYPES)
@pytest.mark.parametrize("shape", [(1, 4, 333, 333, 64), (2, 3, 131, 200, 128)])
def test_library_is_bit_equal_to_pytorchs_attention_on_a_cpu(shape, dtype):
    inputs = attention_inputs(*shape, dtype=dtype, device="cpu", strided=True)
    output, _ = dense_attention(*inputs, backend="library")
    assert torch.equal(output, F.scaled_dot_product_attention(*inputs))


def test_library_is_preferred_and_the_reference_takes_over_with_a_reason():
    query, key, value = attention_inputs(1, 1, 8, 8, 64, dtype=torch.float32, device="cpu")
    assert dense_attention.choose(query, key, value).backend.name == "library"
    spread = torch.randn(1, 1, 8, 128)[..., ::2]
    choice = dense_attention.choose(spread, key, value)
    assert choice.backend.name == "reference"
    rejected = dict(choice.rejected)
    assert "the interpreter does not run Gluon" in rejected["gluon"]
    assert "not contiguous" in rejected["library"]
    expected, _ = full_attention(spread, key, value)
    assert_close(dense_attention(spread, key, value)[0], expected, torch.float32)
    with pytest.raises(ValueError, match="'library' cannot run here: the head dimension"):
        dense_attention(spread, key, value, backend="library")


class FakeTimer:
    """Tells the times that it was given, in order, and counts what it measured."""

    def __init__(self, *times):
        self.times = list(times)

    def __call__(self, run, device):
        run()
        return self.times.pop(0)


def kernels_named(*names):
    calls = []
    return {name: lambda name=name: calls.append(name) for name in names}, calls


@pytest.mark.parametrize(
    ("times", "fastest"),
    [
        ((3.0, 2.0, 1.0), "c"),
        ((3.0, 1.0, 2.0), "b"),
        ((1.0, 1.0, 1.0), "a"),
        ((2, 1, 1), "b"),
        ((1.0, 0.9, 0.95), "a"),  # about as fast: another process would measure it otherwise
        ((2.0, 1.0, 0.9), "b"),
        ((0.05, 0.01, 0.02), "a"),  # too short to measure
    ],
)
def test_the_fastest_kernel_is_picked_and_remembered(times, fastest):
    kernels = FastestKernel(FakeTimer(*times))
    runs, calls = kernels_named("a", "b", "c")
    x = torch.zeros(2, 3)
    assert [kernels.pick(runs, x) for _ in range(3)] == [fastest] * 3
    assert calls == ["a", "b", "c"]
    assert list(kernels.times.values()) == [dict(zip("abc", times, strict=True))]


def test_every_kind_of_tensors_is_measured_once():
    timer = FakeTimer(2, 1, 1, 2, 2, 1, 1, 2)
    kernels = FastestKernel(timer)
    runs, _ = kernels_named("a", "b")
    x = torch.zeros(4, 4)
    kinds = [(x, "b"), (x[:2], "a"), (x.half(), "b"), (x.T, "a")]  # a shape, a dtype, strides
    for _ in range(2):
        for tensor, fastest in kinds:
            assert kernels.pick(runs, tensor) == fastest
    assert (timer.times, len(kernels.times)) == ([], 4)
    assert FastestKernel().times == {}  # nothing is shared


def test_nothing_is_measured_where_the_host_must_not_wait(monkeypatch):
    kernels = FastestKernel(FakeTimer(2, 1))
    runs, calls = kernels_named("a", "b")
    x = torch.zeros(2)
    for busy, picked, ran in ((True, "a", []), (False, "b", ["a", "b"]), (True, "b", ["a", "b"])):
        monkeypatch.setattr(measure, "_must_not_wait", lambda _, busy=busy: busy)
        assert (kernels.pick(runs, x), calls) == (picked, ran)


@pytest.mark.parametrize(("times", "expected"), [((2, 1), 1.0), ((1, 2), 0.0)])
def test_the_library_runs_the_fastest_kernel(times, expected, monkeypatch):
    query, key, value = attention_inputs(1, 2, 7, 9, 64, dtype=torch.float32, device="cpu")
    padded_lse = torch.zeros(1, 2, 32, 1)

    def fake(number):
        return lambda query, *_, scale: (torch.full_like(query, number), padded_lse)

    monkeypatch.setattr("chipsparse.kernels.dispatch.known_of", lambda _: {})  # nothing is kept
    monkeypatch.setattr(library, "usable_kernels", lambda *_: ("zeros", "ones"))
    monkeypatch.setattr(library, "KERNELS", {"zeros": fake(0.0), "ones": fake(1.0)})
    kernels = FastestKernel(FakeTimer(*times))
    for _ in range(2):
        output, lse = dense_attention(query, key, value, kernels=kernels)
        assert (output == expected).all()
        assert lse.shape == (1, 2, 7)
    assert (dense_attention(query, key, value)[0] == 0).all()  # unmeasured: the first
    reference, _ = dense_attention(query, key, value, kernels=kernels, backend="reference")
    assert_close(reference, full_attention(query, key, value)[0], torch.float32)


def without_flash():
    return sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION])


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("setting", [torch.no_grad, deterministic, without_flash])
def test_pytorch_is_asked_once_for_its_settings(setting, monkeypatch):
    inputs = attention_inputs(1, 2, 5, 11, 64, dtype=torch.float32, device="cpu")
    asked = []
    monkeypatch.setattr(library, "usable_kernels", lambda *_: asked.append(None) or ("cpu",))
    known_of.cache_clear()
    for _ in range(3):
        dense_attention(*inputs)
    count = len(asked)
    with setting():
        dense_attention(*inputs)
    assert (count, len(asked)) == (2, 4)  # whether it can run, and with what


@pytest.mark.parametrize("names", ["bc", "cb"])
def test_a_kernel_that_was_not_there_to_be_measured_is_not_picked(names):
    """Settings of PyTorch decide which are there."""
    timer = FakeTimer(2, 1)
    x = torch.zeros(4)
    kernels = FastestKernel(timer)
    runs, _ = kernels_named("a", "b")
    assert kernels.pick(runs, x) == "b"
    runs, _ = kernels_named(*names)
    assert kernels.pick(runs, x) == "b"


@pytest.mark.gpu
def test_kernels_are_measured_on_the_device():
    kernels = FastestKernel()
    inputs = attention_inputs(1, 2, 333, 333, 64, dtype=torch.bfloat16, device="cuda", strided=True)
    usable = library.usable_kernels(*inputs)
    expected, expected_lse = full_attention(*inputs)
    for _ in range(2):
        output, lse = dense_attention(*inputs, kernels=kernels)
        assert_attention((output, lse), (expected, expected_lse), torch.bfloat16)
    assert len(usable) > 1
    (times,) = kernels.times.values()
    assert tuple(times) == usable
    assert min(times.values()) > 0


def test_our_kernel_is_preferred_where_it_is_faster(monkeypatch):
    """On Hopper, with many keys; nothing of a GPU is asked of tensors without memory."""
    monkeypatch.setattr(triton_support, "compute_capability", lambda _: (9, 0))
    gpu = torch.device("cuda")
    cpu = torch.device("cpu")
    half = torch.bfloat16
    assert package.faster_than_the_library(gpu, half, ENOUGH, WIDTH)
    assert not package.faster_than_the_library(gpu, torch.float32, ENOUGH, WIDTH)
    assert not package.faster_than_the_library(gpu, half, ENOUGH - 1, WIDTH)
    assert not package.faster_than_the_library(gpu, half, ENOUGH, WIDTH // 2)
    assert not package.faster_than_the_library(cpu, half, ENOUGH, WIDTH)
    with monkeypatch.context() as patch:
        patch.setattr(triton_support, "triton_installed", lambda: False)
        assert not package.faster_than_the_library(gpu, half, ENOUGH, WIDTH)
    monkeypatch.setattr(triton_support, "compute_capability", lambda _: (8, 9))
    assert not package.faster_than_the_library(gpu, half, ENOUGH, WIDTH)


@pytest.mark.gpu
def test_many_keys_run_on_our_kernel():
    reason = triton_support.hopper_unsupported_reason(torch.device("cuda"))
    if reason is not None:
        pytest.skip(reason)
    others = (ENOUGH - 1, WIDTH, "library"), (ENOUGH, WIDTH // 2, "library")
    for columns, head_dim, name in ((ENOUGH, WIDTH, "gluon"), *others):
        shape = (1, 1, 300, columns, head_dim)
        inputs = attention_inputs(*shape, dtype=torch.bfloat16, device="cuda", strided=True)
        assert dense_attention.choose(*inputs).backend.name == name
        found = dense_attention(*inputs)
        assert_attention(found, full_attention(*inputs), torch.bfloat16)
