"""Full attention by our kernel where it is faster, also where nothing is sparse but steps skipped.

No CPU has that kernel, so PyTorch's takes its place, under its name: on a CPU that is what the
model calls itself.
"""

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend

import chipsparse
from chipsparse import SparsityConfig
from chipsparse.kernels.dense_attention import dense_attention, library
from chipsparse.kernels.dispatch import Backend
from tests.pipelines import test_families as families
from tests.pipelines.test_families import FAMILIES, SPARSE

ACTIONS = ["dense", "dense", "skip", "dense", "skip", "dense"]
SKIPS = SparsityConfig.dense().override({"schedule.actions": ACTIONS})
NAMES = ["wan 2.1", "hunyuan video", "flux", "qwen-image", "mochi"]


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    """Our kernel, as it would be chosen on Hopper with many tokens."""
    kernel = Backend("gluon", lambda: library.dense_attention, library.unsupported_reason)
    others = dense_attention.backends[1:]
    monkeypatch.setattr(dense_attention, "backends", (kernel, *others))
    monkeypatch.setattr("chipsparse.session.faster_than_the_library", lambda *_: True)


def generated(pipe, name, config):
    with chipsparse.enable(pipe, config) as handle:
        return families.generate(pipe, name, steps=6), handle.report


def entries(report, part):
    return [each for record in report.steps for each in record.layers if each.part == part]


def far(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", NAMES)
def test_where_nothing_is_sparse(name, monkeypatch):
    pipe = FAMILIES[name].make()
    output, report = generated(pipe, name, SKIPS)
    assert report.backends["dense_attention"] == "gluon"
    assert report.fallbacks == []
    monkeypatch.setattr("chipsparse.session.faster_than_the_library", lambda *_: False)
    expected, report = generated(pipe, name, SKIPS)
    assert "dense_attention" not in report.backends
    assert far(output, expected) < 1e-5  # text that is cut, not masked, rounds otherwise


def test_layers_that_are_never_sparse():
    pipe, name = FAMILIES["wan 2.1"].make(), "wan 2.1"
    _, report = generated(pipe, name, SPARSE.override({"schedule.first_dense_layers": 1}))
    firsts = [each for each in entries(report, "attention") if each.layer == 0]
    assert {each.backend for each in firsts} == {"gluon"}
    assert {each.reason for each in firsts} == {"schedule.first_dense_layers is 1"}


def test_feed_forward_layers_are_left_alone():
    pipe, name = FAMILIES["wan 2.1"].make(), "wan 2.1"
    _, report = generated(pipe, name, SKIPS)
    assert "dense_activation" not in report.backends


@pytest.mark.parametrize("name", NAMES)
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
