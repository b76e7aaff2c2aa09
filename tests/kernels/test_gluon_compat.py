import importlib.util
import os
import sys
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from chipsparse.kernels import gluon_compat
from chipsparse.kernels.column_sparse_attention import ColumnSparseAttention
from chipsparse.kernels.dense_attention import DenseAttention
from chipsparse.kernels.dense_attention_column_sums import DenseAttentionColumnSums
from chipsparse.kernels.sparse_mlp_down import SparseMLPDown
from chipsparse.kernels.sparse_mlp_up import SparseMLPUp
from chipsparse.kernels.token_layout import empty_token_contiguous

not_interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "0", reason="the interpreter replaces the kernels"
)


@pytest.fixture(autouse=True)
def forgotten():
    """No answer of another test, and none for another test."""
    gluon_compat._unsupported_reason.cache_clear()
    yield
    gluon_compat._unsupported_reason.cache_clear()


@pytest.fixture
def unknown_release(monkeypatch):
    monkeypatch.setattr(gluon_compat.triton, "__version__", "99.1.0")


def replace_compile(monkeypatch, replacement):
    for name in gluon_compat.__all__:
        if name.startswith("compile_") and name != "compile_kernel":
            monkeypatch.setattr(gluon_compat, name, replacement)


def test_tested_releases_are_not_compiled(monkeypatch):
    replace_compile(monkeypatch, lambda *_, **__: pytest.fail("compiled"))
    for release in gluon_compat.TESTED_RELEASES:
        for version in (f"{release}.0", f"{release}.1+git1234"):
            monkeypatch.setattr(gluon_compat.triton, "__version__", version)
            assert gluon_compat.unsupported_reason() is None


def test_unknown_release_that_compiles_is_asked_once(monkeypatch, unknown_release):
    compiled = []
    replace_compile(monkeypatch, lambda *arguments, **_: compiled.append(arguments))
    assert gluon_compat.unsupported_reason() is None
    assert gluon_compat.unsupported_reason() is None
    assert len(compiled) == 4  # one of each operation


@pytest.mark.parametrize("message", ["no such layout\nat 12:34", "\n no such layout", ""])
def test_unknown_release_that_does_not_compile(monkeypatch, unknown_release, message):
    def fail(*_, **__):
        raise NotImplementedError(message)

    replace_compile(monkeypatch, fail)
    reason = gluon_compat.unsupported_reason()
    assert "Triton 99.1.0" in reason
    assert "NotImplementedError" in reason
    assert message.strip().split("\n")[0] in reason
    assert "\n" not in reason


@pytest.mark.parametrize(
    "moved", ["triton.experimental", "triton.experimental.gluon.language.nvidia.hopper"]
)
def test_gluon_that_moved_is_a_reason(monkeypatch, moved):
    """Also in a release that was tested: some builds leave it out."""
    monkeypatch.setitem(sys.modules, moved, None)
    spec = importlib.util.spec_from_file_location("without_gluon", gluon_compat.__file__)
    without = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(without)
    reason = without.unsupported_reason()
    assert f"Triton {without.triton.__version__} lacks" in reason
    assert moved in reason


@not_interpreted
def test_installed_release_compiles_as_an_unknown_one_would(unknown_release):
    assert gluon_compat.unsupported_reason() is None


def kernel(name, is_constexpr=False):
    parameter = SimpleNamespace(name=name, is_constexpr=is_constexpr, do_not_specialize=False)
    return SimpleNamespace(params=[parameter], is_gluon=lambda: True)


def test_unknown_parameters_of_kernels_raise():
    with pytest.raises(ValueError, match="no type is known for the parameter 'stride_new'"):
        gluon_compat.compile_kernel(kernel("stride_new"), {"stride_[qkv]": "i32"}, {}, options={})
    with pytest.raises(ValueError, match="no value is known for the constant 'NEW'"):
        gluon_compat.compile_kernel(kernel("NEW", True), {}, {"OLD": 1}, options={})


class Launches:
    """Stands for a kernel and keeps the keywords of its launches."""

    def __init__(self):
        self.keywords = []

    def __getitem__(self, grid):
        return lambda *_, **keywords: self.keywords.append(keywords)


def launched(monkeypatch, operation, launch, *, function=None):
    """Keywords with which an operation launches its Gluon kernel, on tensors without memory.

    The function has the operation's name, or another one for another operation on this kernel.
    """
    module = import_module(f"chipsparse.kernels.{operation}.gluon_sm90")
    launches = Launches()
    with monkeypatch.context() as patch:
        patch.setattr(module, f"_{operation}_kernel", launches)
        patch.setattr(torch.cuda, "device", lambda _: nullcontext())
        launch(getattr(module, function or operation))
    (keywords,) = launches.keywords
    return keywords


def compiled(monkeypatch, compile_operation):
    """The constants and options with which an operation's Gluon kernel is compiled."""
    found = {}

    def keep(kernel, types, constants, *, options, half):
        names = {parameter.name for parameter in kernel.params}
        found.update({name: value for name, value in constants.items() if name in names} | options)

    with monkeypatch.context() as patch:
        patch.setattr(gluon_compat, "compile_kernel", keep)
        compile_operation()
    return found


def without_none(keywords):
    return {name: value for name, value in keywords.items() if value is not None}


@not_interpreted
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rows", [64, 128, 192])
@pytest.mark.parametrize("rule", [None, "merge"])
def test_sparse_kernel_is_compiled_as_it_is_launched(monkeypatch, head_dim, rows, rule):
    def launch(operation):
        query = torch.empty(1, 2, 2 * rows, head_dim, dtype=torch.bfloat16, device="meta")
        per_row = torch.empty(1, 2, 2 * rows, device="meta")
        call = ColumnSparseAttention(
            query,
            query,
            query,
            torch.empty(1, 2, 2, 32, dtype=torch.int32, device="meta"),
            torch.empty(1, 2, 2, dtype=torch.int32, device="meta"),
            block_size_q=rows,
            delta_rule=rule,
            residual=None if rule is None else query,
            lse_dense=per_row,
            kept_mass=per_row,
        )
        operation(call)

    expected = launched(monkeypatch, "column_sparse_attention", launch)
    found = compiled(
        monkeypatch,
        lambda: gluon_compat.compile_column_sparse_attention(head_dim, rows, rule),
    )
    assert without_none(found) == without_none(expected)


@not_interpreted
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("sums", "rows"), [(True, 64), (True, 128), (False, 128)])
def test_dense_kernel_is_compiled_as_it_is_launched(monkeypatch, head_dim, rows, sums):
    def launch(operation):
        query = torch.empty(1, 2, 256, head_dim, dtype=torch.bfloat16, device="meta")
        lse = torch.empty(1, 2, 256, device="meta")
        if sums:
            operation(DenseAttentionColumnSums(query, query, query, lse, block_size_q=rows))
        else:
            operation(DenseAttention(query, query, query))

    name = "dense_attention_column_sums" if sums else "dense_attention"
    expected = launched(monkeypatch, "dense_attention_column_sums", launch, function=name)
    found = compiled(
        monkeypatch,
        lambda: gluon_compat.compile_dense_attention_column_sums(
            head_dim, with_column_sums=sums, part_rows=rows
        ),
    )
    assert without_none(found) == without_none(expected)


def mlp_tensors(rows, channels, neurons, kept):
    """Hidden, weight, lists and counts on the meta device, in bf16."""
    half = {"dtype": torch.bfloat16, "device": "meta"}
    lists = torch.empty(1, -(-rows // 128), kept, dtype=torch.int32, device="meta")
    return (
        torch.empty(1, rows, channels, **half),
        torch.empty(neurons, channels, **half),
        lists,
        torch.empty(lists.shape[:2], dtype=torch.int32, device="meta"),
    )


@not_interpreted
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("activation", ["gelu-tanh", "silu"])
def test_up_kernel_is_compiled_as_it_is_launched(monkeypatch, activation, even):
    def launch(operation):
        rows, channels = (256, 128) if even else (257, 136)
        hidden, weight, lists, counts = mlp_tensors(rows, channels, 512, 300)
        call = SparseMLPUp(
            hidden,
            weight,
            weight[:, 0],
            lists,
            empty_token_contiguous(hidden, 1, rows, 512),
            counts=None if even else counts,
            activation=activation,
        )
        operation(call)

    expected = launched(monkeypatch, "sparse_mlp_up", launch)
    found = compiled(monkeypatch, lambda: gluon_compat.compile_sparse_mlp_up(activation, even=even))
    assert without_none(found) == without_none(expected)


@not_interpreted
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("addend", [True, False])
def test_down_kernel_is_compiled_as_it_is_launched(monkeypatch, addend, even):
    def launch(operation):
        hidden, weight, lists, counts = mlp_tensors(256, 512 if even else 520, 640, 300)
        call = SparseMLPDown(
            empty_token_contiguous(hidden, 1, 256, 300),
            weight.t(),
            lists,
            hidden,
            addend=hidden if addend else None,
            counts=None if even else counts,
        )
        operation(call)

    expected = launched(monkeypatch, "sparse_mlp_down", launch)
    found = compiled(
        monkeypatch, lambda: gluon_compat.compile_sparse_mlp_down(addend=addend, even=even)
    )
    assert without_none(found) == without_none(expected)
