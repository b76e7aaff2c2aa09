"""Full attention by our kernel where it is faster, also where nothing is sparse but steps skipped.

No CPU has that kernel, so PyTorch's takes its place, under its name: on a CPU that is what the
model calls itself.
"""

import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import attention_backend

import chipsparse
from chipsparse import SparsityConfig
from chipsparse.kernels.dense_attention import dense_attention, library
from chipsparse.kernels.dispatch import Backend
from chipsparse.pipelines.adapter import ModelAdapter
from tests.pipelines import test_families as families
from tests.pipelines import test_families_gpu as on_gpu
from tests.pipelines.test_families import BASE, FAMILIES, SPARSE, slow_unless

ACTIONS = ["dense", "dense", "skip", "dense", "skip", "dense"]
SKIPS = SparsityConfig.dense().override({"schedule.actions": ACTIONS})
PADDED = [("hunyuan video", BASE), ("hunyuan video 1.5", "padding"), ("qwen-image", "padded")]
QUICK = ("wan 2.1", "hunyuan video", "flux", "qwen-image", "mochi", "z-image")


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    """Our kernel, as it would be chosen on Hopper with many tokens."""
    kernel = Backend("gluon", lambda: library.dense_attention, library.unsupported_reason)
    others = dense_attention.backends[1:]
    monkeypatch.setattr(dense_attention, "backends", (kernel, *others))
    monkeypatch.setattr("chipsparse.pipelines.adapter.faster_than_the_library", lambda *_: True)


def generated(pipe, name, config, variant=BASE):
    with chipsparse.enable(pipe, config) as handle:
        return families.generate(pipe, name, variant, steps=6), handle.report


def entries(report, part):
    return [each for record in report.steps for each in record.layers if each.part == part]


def far(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


@slow_unless(QUICK)
def test_where_nothing_is_sparse(name, monkeypatch):
    pipe = FAMILIES[name].make()
    output, report = generated(pipe, name, SKIPS)
    # Chroma masks within its text, and heads of Cosmos 3 share keys: no kernel of ours takes that.
    is_kept = name in ("chroma", "cosmos 3")
    assert report.backends.get("dense_attention") == (None if is_kept else "gluon")
    assert report.fallbacks == []
    monkeypatch.setattr("chipsparse.pipelines.adapter.faster_than_the_library", lambda *_: False)
    expected, report = generated(pipe, name, SKIPS)
    assert "dense_attention" not in report.backends
    assert far(output, expected) < 1e-5  # text that is cut, not masked, rounds otherwise


def test_layers_that_are_never_sparse():
    pipe, name = FAMILIES["wan 2.1"].make(), "wan 2.1"
    _, report = generated(pipe, name, SPARSE.override({"schedule.first_dense_layers": 1}))
    firsts = [each for each in entries(report, "attention") if each.layer == 0]
    assert {each.backend for each in firsts} == {"gluon"}
    assert {each.reason for each in firsts} == {"schedule.first_dense_layers is 1"}


@slow_unless(QUICK)
def test_a_generation_that_is_dense_throughout_is_the_models_own(name):
    pipe = FAMILIES[name].make()
    stock = families.generate(pipe, name, steps=6)
    output, report = generated(pipe, name, SparsityConfig.dense())
    assert torch.equal(output, stock)
    assert report.backends == {}


@pytest.mark.parametrize("chosen", ["for the model", "in diffusers"])
def test_what_a_user_chose_stays(chosen):
    pipe, name = FAMILIES["wan 2.1"].make(), "wan 2.1"
    with attention_backend("_native_math"):
        if chosen == "for the model":
            pipe.transformer.set_attention_backend("_native_math")
        _, report = generated(pipe, name, SKIPS)
    assert report.backends == {}


def test_a_kernel_that_cannot_run_leaves_the_model_alone(monkeypatch):
    pipe, name = FAMILIES["wan 2.1"].make(), "wan 2.1"
    expected, _ = generated(pipe, name, SKIPS)
    monkeypatch.setattr(dense_attention, "backends", dense_attention.backends[1:])
    output, report = generated(pipe, name, SKIPS)
    assert torch.equal(output, expected)
    assert report.backends["dense_attention"] == "library"


def dispatched(monkeypatch):
    """The keys of every attention that diffusers dispatches, and whether it was masked."""
    seen = set()
    stock = attention_dispatch.dispatch_attention_fn

    def dispatch(query, key, value, attn_mask=None, *args, **options):
        seen.add((key.shape[1], attn_mask is not None))
        return stock(query, key, value, attn_mask, *args, **options)

    monkeypatch.setattr(attention_dispatch, "dispatch_attention_fn", dispatch)
    return seen


@pytest.mark.parametrize(("name", "variant"), PADDED)
def test_padded_text_is_cut_and_not_masked(name, variant, monkeypatch):
    """On a GPU, where kernels that take a mask are slower; here it is said to be one."""
    pipe = FAMILIES[name].make()
    monkeypatch.setattr("chipsparse.pipelines.adapter.faster_than_the_library", lambda *_: False)
    monkeypatch.setattr(dense_attention, "backends", dense_attention.backends[1:])
    masked, _ = generated(pipe, name, SKIPS, variant)
    monkeypatch.setattr(
        ModelAdapter, "_has_faster_attention", lambda self, _, call: self.masks_text(call)
    )
    seen = dispatched(monkeypatch)
    cut, report = generated(pipe, name, SKIPS, variant)
    assert report.fallbacks == []
    assert {is_masked for _, is_masked in seen} == {False}
    assert far(cut, masked) < 1e-5


def test_a_forced_backend_leaves_unrecorded_attention_alone(monkeypatch):
    """The reference of full attention holds all scores at once."""
    pipe, name = FAMILIES["wan 2.1"].make(), "wan 2.1"
    expected, _ = generated(pipe, name, SKIPS)
    reference = Backend("reference", lambda: lambda _: pytest.fail("the reference ran"))
    monkeypatch.setattr(dense_attention, "backends", (reference,))
    output, _ = generated(pipe, name, SKIPS.override({"backend": "reference"}))
    assert torch.equal(output, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "variant"), PADDED)
def test_padded_text_is_cut_on_a_gpu(name, variant, monkeypatch):
    monkeypatch.undo()  # its own kernels
    pipe = on_gpu.make(name, torch.float32)
    with chipsparse.enable(pipe, SKIPS) as handle:
        cut = on_gpu.generate(pipe, name, variant, steps=6)
    assert handle.report.fallbacks == []
    assert "dense_attention" in handle.report.backends
    monkeypatch.setattr(ModelAdapter, "_has_faster_attention", lambda *_: False)
    with chipsparse.enable(pipe, SKIPS) as handle:
        masked = on_gpu.generate(pipe, name, variant, steps=6)
    assert "dense_attention" not in handle.report.backends
    assert far(cut, masked) < 1e-4
