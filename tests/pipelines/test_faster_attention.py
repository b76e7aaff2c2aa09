"""Full attention by our kernel where it is faster, and in FP8; also where nothing is sparse.

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
from chipsparse.pipelines.model_patch import ModelPatch
from chipsparse.pipelines.sparse_model import SparseModel
from tests.pipelines import test_families as families
from tests.pipelines import test_families_gpu as on_gpu
from tests.pipelines.small_sparse import error
from tests.pipelines.test_families import BASE, FAMILIES, SPARSE, slow_unless

ACTIONS = ["dense", "dense", "skip", "dense", "skip", "dense"]
SKIPS = SparsityConfig.dense().override({"schedule.actions": ACTIONS})
PADDED = [("hunyuan video", BASE), ("hunyuan video 1.5", "padding"), ("qwen-image", "padded")]
FASTER = "chipsparse.pipelines.sparse_model.faster_than_the_library"
IN_FP8 = {"attention.precision": "fp8"}


@pytest.fixture
def ours(monkeypatch):
    """Our kernel, as it would be chosen on Hopper with many tokens."""
    kernel = Backend("gluon", lambda: library.dense_attention, library.unsupported_reason)
    monkeypatch.setattr(dense_attention, "backends", (kernel, *dense_attention.backends[1:]))
    monkeypatch.setattr(FASTER, lambda *_: True)


def generated(pipe, name, config, variant=BASE):
    with chipsparse.enable(pipe, config) as handle:
        return families.generate(pipe, name, variant), handle.report


def entries(report, part="attention"):
    return [each for record in report.steps for each in record.layers if each.part == part]


@pytest.mark.usefixtures("ours")
@slow_unless(("wan 2.1", "hunyuan video", "flux", "mochi"))
def test_where_nothing_is_sparse(name, monkeypatch):
    pipe = FAMILIES[name].make()
    output, report = generated(pipe, name, SKIPS)
    # Chroma masks within its text, and heads of Cosmos 3 share keys: no kernel of ours takes that.
    is_kept = name in ("chroma", "cosmos 3")
    assert report.backends.get("dense_attention") == (None if is_kept else "gluon")
    assert "dense_activation" not in report.backends
    assert report.fallbacks == []
    _, report = generated(pipe, name, SparsityConfig.dense())
    assert report.backends == {}  # a generation that is dense throughout is the model's own
    monkeypatch.setattr(FASTER, lambda *_: False)
    expected, report = generated(pipe, name, SKIPS)
    assert "dense_attention" not in report.backends
    assert error(output, expected) < 1e-5  # text that is cut, not masked, rounds otherwise


@pytest.mark.usefixtures("ours")
def test_layers_and_rows_that_are_never_sparse(monkeypatch):
    first = SPARSE.override({"layers": [{"index": 0, "attention": "dense", "mlp": "dense"}]})
    _, report = generated(FAMILIES["wan 2.1"].make(), "wan 2.1", first)
    assert {(each.backend, each.reason) for each in entries(report) if each.layer == 0} == {
        ("gluon", "layers names it dense"),
    }
    monkeypatch.setattr(
        ModelPatch,
        "unpatched_attention",
        lambda *_: pytest.fail("the model's own ran"),
    )
    _, report = generated(FAMILIES["minimax h3"].make(), "minimax h3", SPARSE)
    assert "sparse" in {each.action for each in entries(report)}


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("chosen", ["for the model", "in diffusers"])
def test_what_a_user_chose_stays(chosen):
    pipe = FAMILIES["wan 2.1"].make()
    with attention_backend("_native_math"):
        if chosen == "for the model":
            pipe.transformer.set_attention_backend("_native_math")
        _, report = generated(pipe, "wan 2.1", SKIPS)
    assert report.backends == {}


@pytest.mark.usefixtures("ours")
def test_a_kernel_that_cannot_run_and_a_forced_reference_leave_the_model_alone(monkeypatch):
    """The reference of full attention holds all scores at once."""
    pipe = FAMILIES["wan 2.1"].make()
    expected, _ = generated(pipe, "wan 2.1", SKIPS)
    monkeypatch.setattr(dense_attention, "backends", dense_attention.backends[1:])
    output, report = generated(pipe, "wan 2.1", SKIPS)
    assert torch.equal(output, expected)
    assert report.backends["dense_attention"] == "library"
    reference = Backend("reference", lambda: lambda _: pytest.fail("the reference ran"))
    monkeypatch.setattr(dense_attention, "backends", (reference,))
    output, _ = generated(pipe, "wan 2.1", SKIPS.override({"backend": "reference"}))
    assert torch.equal(output, expected)


@pytest.mark.parametrize(("name", "variant"), PADDED)
def test_padded_text_is_cut_and_not_masked(name, variant, monkeypatch):
    """On a GPU, where kernels that take a mask are slower; here it is said to be one."""
    pipe = FAMILIES[name].make()
    seen = set()
    stock = attention_dispatch.dispatch_attention_fn
    masked, _ = generated(pipe, name, SKIPS, variant)

    def dispatch(query, key, value, attn_mask=None, *args, **options):
        seen.add(attn_mask is not None)
        return stock(query, key, value, attn_mask, *args, **options)

    monkeypatch.setattr(attention_dispatch, "dispatch_attention_fn", dispatch)
    monkeypatch.setattr(
        SparseModel,
        "has_faster_attention",
        lambda self, _, call, *__: self.reader.masks_text(call),
    )
    cut, report = generated(pipe, name, SKIPS, variant)
    assert report.fallbacks == []
    assert seen == {False}
    assert error(cut, masked) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "variant"), PADDED)
def test_padded_text_is_cut_on_a_gpu(name, variant, monkeypatch):
    pipe = on_gpu.make(name, torch.float32)
    with chipsparse.enable(pipe, SKIPS) as handle:
        cut = on_gpu.generate(pipe, name, variant, steps=6)
    assert handle.report.fallbacks == []
    assert "dense_attention" in handle.report.backends
    monkeypatch.setattr(SparseModel, "has_faster_attention", lambda *_: False)
    with chipsparse.enable(pipe, SKIPS) as handle:
        masked = on_gpu.generate(pipe, name, variant, steps=6)
    assert "dense_attention" not in handle.report.backends
    assert error(cut, masked) < 1e-4


@pytest.mark.parametrize("name", ["wan 2.1", "flux"])
def test_fp8_changes_little_and_the_report_names_it(name):
    pipe = FAMILIES[name].make()
    stock = families.generate(pipe, name)
    expected, _ = generated(pipe, name, SPARSE)
    output, report = generated(pipe, name, SPARSE.override(IN_FP8))
    assert 0 < error(output, expected) < 2e-2
    assert {"fp8_quantization", "fp8_dense_attention"} <= report.backends.keys()
    by_action = {entry.action.value: entry.backend for entry in entries(report)}
    assert by_action["dense"] == by_action["refresh"] == "reference fp8"
    assert "fp8" not in by_action["sparse"]
    output, report = generated(pipe, name, SparsityConfig.dense().override(IN_FP8))
    assert 0 < error(output, stock) < 2e-2
    assert "fp8_dense_attention" in report.backends
    assert torch.equal(families.generate(pipe, name), stock)  # as it was
