import importlib.util
import sys
import types
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.compiled_cases import HOPPER, pretended_gpu
from chipsparse.kernels import gluon_compat, triton_support
from chipsparse.kernels.dispatch import gluon_unsupported_reason, imported
from chipsparse.kernels.launch import compile_only
from tests.kernels.formulas import INTERPRETED

CPU = torch.device("cpu")


WITH_GLUON = (
    "column_sparse_attention",
    "dense_attention_column_sums",
    "sparse_mlp_down",
    "sparse_mlp_up",
)


@pytest.fixture(autouse=True)
def forgotten():
    """No answer of another test, and none for another test."""
    gluon_compat._not_compiled_reason.cache_clear()
    yield
    gluon_compat._not_compiled_reason.cache_clear()


@pytest.fixture
def unknown_release(monkeypatch):
    monkeypatch.setattr(gluon_compat.triton, "__version__", "99.1.0")


def test_tested_releases_are_not_compiled(monkeypatch):
    for release in gluon_compat.TESTED_RELEASES:
        for version in (f"{release}.0", f"{release}.1+git1234"):
            monkeypatch.setattr(gluon_compat.triton, "__version__", version)
            never = partial(pytest.fail, "compiled")
            assert gluon_compat.not_compiled_reason(CPU, never) is None


def test_unknown_release_that_compiles_is_asked_once_for_each_module(unknown_release):
    compiled = []

    def load():
        return compiled.append

    assert gluon_compat.not_compiled_reason(CPU, load) is None
    assert gluon_compat.not_compiled_reason(CPU, load) is None
    assert compiled == [CPU]
    assert gluon_compat.not_compiled_reason(CPU, lambda: compiled.append) is None
    assert compiled == [CPU, CPU]


@pytest.mark.parametrize("message", ["no such layout\nat 12:34", "\n no such layout", ""])
def test_unknown_release_that_does_not_compile(unknown_release, message):
    def fail(device):
        raise NotImplementedError(message)

    reason = gluon_compat.not_compiled_reason(CPU, lambda: fail)
    assert "Triton 99.1.0" in reason
    assert "NotImplementedError" in reason
    assert message.strip().split("\n")[0] in reason
    assert "\n" not in reason


@pytest.mark.parametrize(
    "moved",
    ["triton.experimental", "triton.experimental.gluon.language.nvidia.hopper"],
)
def test_gluon_that_moved_is_a_reason(monkeypatch, moved):
    """Also in a release that was tested: some builds leave it out."""
    assert gluon_compat.missing_reason() is None
    monkeypatch.setitem(sys.modules, moved, None)
    spec = importlib.util.spec_from_file_location("without_gluon", gluon_compat.__file__)
    without = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(without)
    reason = without.missing_reason()
    assert f"Triton {without.triton.__version__} lacks" in reason
    assert moved in reason


@pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the kernels")
@pytest.mark.parametrize("module", WITH_GLUON)
def test_installed_release_compiles_as_an_unknown_one_would(unknown_release, module):
    device = torch.device("cuda", HOPPER)
    load = imported(f"chipsparse.kernels.{module}.gluon_sm90", "compile_one")
    with pretended_gpu(HOPPER), compile_only() as outer:
        assert gluon_compat.not_compiled_reason(device, load) is None
    assert outer == []


def test_a_kernel_that_does_not_compile_leaves_the_others(monkeypatch, unknown_release):
    """Each module is asked for itself: plain Triton runs in place of what does not compile."""
    monkeypatch.setattr(triton_support, "compute_capability", lambda _: (9, 0))
    device = torch.device("cuda")
    fails = types.ModuleType("fails")
    compiles = types.ModuleType("compiles")
    fails.compile_one = lambda device: 1 / 0
    compiles.compile_one = lambda device: None
    monkeypatch.setitem(sys.modules, "fails", fails)
    monkeypatch.setitem(sys.modules, "compiles", compiles)
    assert "ZeroDivisionError" in gluon_unsupported_reason("fails", device)
    assert gluon_unsupported_reason("compiles", device) is None
