import importlib.util
import sys

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.compiled_cases import HOPPER, pretended_gpu
from chipsparse.kernels import gluon_compat
from chipsparse.kernels.launch import compile_only
from tests.kernels.formulas import INTERPRETED

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forgotten():
    """No answer of another test, and none for another test."""
    gluon_compat._unsupported_reason.cache_clear()
    yield
    gluon_compat._unsupported_reason.cache_clear()


@pytest.fixture
def unknown_release(monkeypatch):
    monkeypatch.setattr(gluon_compat.triton, "__version__", "99.1.0")


def test_tested_releases_are_not_compiled(monkeypatch):
    monkeypatch.setattr(gluon_compat, "_compile_kernels", lambda *_, **__: pytest.fail("compiled"))
    for release in gluon_compat.TESTED_RELEASES:
        for version in (f"{release}.0", f"{release}.1+git1234"):
            monkeypatch.setattr(gluon_compat.triton, "__version__", version)
            assert gluon_compat.unsupported_reason(CPU) is None


def test_unknown_release_that_compiles_is_asked_once(monkeypatch, unknown_release):
    compiled = []
    monkeypatch.setattr(gluon_compat, "_compile_kernels", lambda *args, **_: compiled.append(args))
    assert gluon_compat.unsupported_reason(CPU) is None
    assert gluon_compat.unsupported_reason(CPU) is None
    assert compiled == [(CPU,)]


@pytest.mark.parametrize("message", ["no such layout\nat 12:34", "\n no such layout", ""])
def test_unknown_release_that_does_not_compile(monkeypatch, unknown_release, message):
    def fail(*_, **__):
        raise NotImplementedError(message)

    monkeypatch.setattr(gluon_compat, "_compile_kernels", fail)
    reason = gluon_compat.unsupported_reason(CPU)
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
    monkeypatch.setitem(sys.modules, moved, None)
    spec = importlib.util.spec_from_file_location("without_gluon", gluon_compat.__file__)
    without = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(without)
    reason = without.unsupported_reason(CPU)
    assert f"Triton {without.triton.__version__} lacks" in reason
    assert moved in reason


@pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the kernels")
def test_installed_release_compiles_as_an_unknown_one_would(unknown_release):
    with pretended_gpu(HOPPER), compile_only() as outer:
        assert gluon_compat.unsupported_reason(torch.device("cuda", HOPPER)) is None
    assert outer == []
