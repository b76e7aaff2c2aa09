import importlib.util
import os
import sys
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from itertools import product
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


def launched(patch, operation, function, call):
    """Keywords with which a function launches an operation's Gluon kernel, without memory."""
    module = import_module(f"chipsparse.kernels.{operation}.gluon_sm90")
    launches = Launches()
    patch.setattr(module, f"_{operation}_kernel", launches)
    patch.setattr(torch.cuda, "device", lambda _: nullcontext())
    getattr(module, function)(call)
    (keywords,) = launches.keywords
    return keywords


def compiled(patch, compile_operation):
    """The constants and options with which an operation's Gluon kernel is compiled."""
    found = {}

    def keep(kernel, types, constants, *, options, half):
        names = {parameter.name for parameter in kernel.params}
        found.update({name: value for name, value in constants.items() if name in names} | options)

    patch.setattr(gluon_compat, "compile_kernel", keep)
    compile_operation()
    return found


def on_meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def sparse_attention(head_dim, rows, rule):
    query, per_row = on_meta(1, 2, 2 * rows, head_dim), on_meta(1, 2, 2 * rows, dtype=torch.float)
    call = ColumnSparseAttention(
        *[query] * 3,
        on_meta(1, 2, 2, 32, dtype=torch.int32),
        on_meta(1, 2, 2, dtype=torch.int32),
        block_size_q=rows,
        delta_rule=rule,
        residual=None if rule is None else query,
        lse_dense=per_row,
        kept_mass=per_row,
    )
    name = "column_sparse_attention"
    arguments = (head_dim, rows, rule)
    return name, name, call, partial(gluon_compat.compile_column_sparse_attention, *arguments)


def dense_attention(head_dim, sums, rows):
    query, name = on_meta(1, 2, 256, head_dim), "dense_attention_column_sums"
    lse = on_meta(1, 2, 256, dtype=torch.float)
    call = DenseAttention(*[query] * 3)
    if sums:
        call = DenseAttentionColumnSums(*[query] * 3, lse, block_size_q=rows)
    compile_operation = partial(
        gluon_compat.compile_dense_attention_column_sums,
        head_dim,
        with_column_sums=sums,
        part_rows=rows,
    )
    return name, name if sums else "dense_attention", call, compile_operation


def mlp_tensors(rows, channels, neurons):
    """Hidden, weight, lists of 300 neurons and counts."""
    lists = on_meta(1, -(-rows // 128), 300, dtype=torch.int32)
    counts = on_meta(*lists.shape[:2], dtype=torch.int32)
    return on_meta(1, rows, channels), on_meta(neurons, channels), lists, counts


def mlp_up(activation, even):
    rows, channels = (256, 128) if even else (257, 136)
    hidden, weight, lists, counts = mlp_tensors(rows, channels, 512)
    call = SparseMLPUp(
        hidden,
        weight,
        weight[:, 0],
        lists,
        empty_token_contiguous(hidden, 1, rows, 512),
        counts=None if even else counts,
        activation=activation,
    )
    name = "sparse_mlp_up"
    return name, name, call, partial(gluon_compat.compile_sparse_mlp_up, activation, even=even)


def mlp_down(addend, even):
    hidden, weight, lists, counts = mlp_tensors(256, 512 if even else 520, 640)
    call = SparseMLPDown(
        empty_token_contiguous(hidden, 1, 256, 300),
        weight.t(),
        lists,
        hidden,
        addend=hidden if addend else None,
        counts=None if even else counts,
    )
    options = {"addend": addend, "even": even}
    name = "sparse_mlp_down"
    return name, name, call, partial(gluon_compat.compile_sparse_mlp_down, **options)


@not_interpreted
@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        *((sparse_attention, each) for each in product([64, 128], [64, 128, 192], [None, "merge"])),
        *(
            (dense_attention, (head_dim, *each))
            for head_dim in (64, 128)
            for each in ((True, 64), (True, 128), (False, 128))
        ),
        *((mlp_up, each) for each in product(["gelu-tanh", "silu"], [True, False])),
        *((mlp_down, each) for each in product([True, False], [True, False])),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_kernel_is_compiled_as_it_is_launched(monkeypatch, make, arguments):
    *launch, compile_operation = make(*arguments)
    with monkeypatch.context() as patch:
        expected = launched(patch, *launch)
    with monkeypatch.context() as patch:
        found = compiled(patch, compile_operation)
    for keywords in (found, expected):
        for name in [name for name, value in keywords.items() if value is None]:
            del keywords[name]
    assert found == expected
