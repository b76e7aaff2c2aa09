"""Real pipelines whose full attention is computed in FP8, by the references."""

import pytest
import torch

import chipsparse
from chipsparse import SparsityConfig
from tests.pipelines import test_families as families
from tests.pipelines.test_families import FAMILIES, SPARSE

IN_FP8 = {"attention.precision": "fp8"}


def latents(pipe, name, config):
    """What a generation gives, and its report."""
    with chipsparse.enable(pipe, config) as handle:
        return families.generate(pipe, name, steps=6), handle.report


def far(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", ["wan 2.1", "flux"])
def test_it_changes_little_and_the_report_names_it(name):
    pipe = FAMILIES[name].make()
    stock = families.generate(pipe, name, steps=6)
    expected, _ = latents(pipe, name, SPARSE)
    output, report = latents(pipe, name, SPARSE.override(IN_FP8))
    assert 0 < far(output, expected) < 2e-2
    assert {"fp8_quantization", "fp8_dense_attention"} <= report.backends.keys()
    by_action = {
        entry.action.value: entry.backend
        for record in report.steps
        for entry in record.layers
        if entry.part == "attention"
    }
    assert by_action["dense"] == by_action["refresh"] == "reference fp8"
    assert "fp8" not in by_action["sparse"]
    assert torch.equal(families.generate(pipe, name, steps=6), stock)  # as it was


def test_refreshes_alone_in_the_precision_of_the_model():
    pipe, name = FAMILIES["wan 2.1"].make(), "wan 2.1"
    config = SPARSE.override({**IN_FP8, "attention.refresh_precision": "bf16"})
    _, report = latents(pipe, name, config)
    fp8 = {
        entry.action.value: "fp8" in entry.backend
        for record in report.steps
        for entry in record.layers
        if entry.part == "attention"
    }
    assert fp8 == {"dense": True, "refresh": False, "sparse": False}


def test_where_nothing_is_sparse():
    pipe, name = FAMILIES["wan 2.1"].make(), "wan 2.1"
    stock = families.generate(pipe, name, steps=6)
    output, report = latents(pipe, name, SparsityConfig.dense().override(IN_FP8))
    assert 0 < far(output, stock) < 2e-2
    assert "fp8_dense_attention" in report.backends
    assert {record.action.value for record in report.steps} == {"dense"}
    again, _ = latents(pipe, name, SparsityConfig.dense().override(IN_FP8))
    assert torch.equal(output, again)
