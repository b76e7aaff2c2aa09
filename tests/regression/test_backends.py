"""The check of `test_sparse` on a GPU, with every backend.

On the CPU a picture of a few tokens tests what these tests stand on, also with Triton's interpreter
(`tests.kernels.test_interpreted`).
"""

import functools
import itertools
from dataclasses import replace

import pytest
import torch

import chipsparse
from chipsparse.config import Action
from chipsparse.kernels import triton_support
from chipsparse.kernels.column_selection import column_selection
from chipsparse.kernels.column_sparse_attention import column_sparse_attention
from chipsparse.kernels.dense_attention_column_sums import dense_attention_column_sums
from chipsparse.kernels.fp8_rows import fp8_rows
from chipsparse.kernels.mask_packing import packed_to_indices
from chipsparse.kernels.neuron_selection import mean_preactivations, neuron_selection
from chipsparse.kernels.sparse_mlp_down import sparse_mlp_down
from chipsparse.kernels.sparse_mlp_up import dense_activation, sparse_mlp_up
from tests.pipelines.small_sparse import SPARSE
from tests.pipelines.tiny_runs import STILL
from tests.regression.cases import CASES
from tests.regression.check import closeness, violations
from tests.regression.golden import read
from tests.regression.runs import Runs
from tests.tiny_models import tiny_wan_pipeline, tiny_wan_transformer

HALF = (torch.bfloat16, torch.float16)
OPERATIONS = (
    column_selection,
    column_sparse_attention,
    dense_activation,
    dense_attention_column_sums,
    mean_preactivations,
    fp8_rows,
    neuron_selection,
    packed_to_indices,
    sparse_mlp_down,
    sparse_mlp_up,
)
ORDER = ("gluon", "triton", "reference", "library")  # fastest first; the last for no sparse step


def prefer(patch, backend):
    """Lets this backend compute every operation, as far as it has the operation."""

    def allowed(backends):
        kept = [each for each in backends if ORDER.index(each.name) >= ORDER.index(backend)]
        return tuple(
            replace(each, not_auto_reason=None) if each.name == backend else each for each in kept
        )

    for operation in OPERATIONS:
        patch.setattr(operation, "backends", allowed(operation.backends))


def sparse_backends(report, part):
    return {
        layer.backend
        for step in report.steps
        for layer in step.layers
        if layer.part == part and layer.action is Action.SPARSE
    }


@pytest.fixture(scope="module")
def gpu_runs():
    """Models and dense results on the GPU, by dtype."""
    return functools.cache(lambda dtype: Runs(torch.device("cuda"), dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("reference", torch.float32), *itertools.product(("triton", "gluon"), HALF)],
)
def test_sparse_on_a_gpu(name, backend, dtype, gpu_runs, monkeypatch):
    # Convolutions of float32 would be rounded to 10 bits otherwise, and the frames are looked at.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    case = CASES[name]
    runs = gpu_runs(dtype)
    skip_unless_it_can_run(backend)
    dense = runs.dense(case)
    prefer(monkeypatch, backend)
    config = runs.config(case)
    sparse = runs.generate(case, config)
    assert sparse.report.fallbacks == []
    assert sparse_backends(sparse.report, "attention") == {backend}
    assert sparse_backends(sparse.report, "mlp") == ({backend} if config.mlp.is_sparse else set())
    found = closeness(dense.frames, sparse.frames, read(case))
    assert violations(case, found, half=dtype in HALF) == []


def skip_unless_it_can_run(backend):
    if backend == "reference":
        return
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the kernels need compute capability 8.0")
    if backend == "gluon":
        reason = triton_support.hopper_unsupported_reason(torch.device("cuda"))
        if reason is not None:
            pytest.skip(reason)


def small_latents(config):
    """Latents of a model of random weights, whose heads have a size that the kernels take."""
    heads = {"num_attention_heads": 1, "attention_head_dim": 64}
    model = tiny_wan_transformer(num_layers=2, ffn_dim=64, **heads)
    for block in model.blocks:  # the layout that an adapter gives them on a GPU
        linear = block.ffn.net[2]
        linear.weight.data = linear.weight.data.t().contiguous().t()
    pipe = tiny_wan_pipeline(transformer=model.bfloat16())
    with chipsparse.enable(pipe, config) as handle:
        latents = STILL.generate(pipe, width=32, num_frames=5, num_inference_steps=4)
    assert handle.report.fallbacks == []
    return latents.float(), handle.report


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_preferred_backend_computes_everything(backend, monkeypatch):
    interpreted = triton_support.triton_installed() and triton_support.interpreting()
    if backend == "triton" and not interpreted:
        pytest.skip("needs Triton's interpreter")
    config = SPARSE.override({"schedule": {"listed": {"full": [1, 2], "sparse": "others"}}})
    expected, _ = small_latents(config.override({"backend": "reference"}))
    prefer(monkeypatch, backend)
    found, report = small_latents(config)
    assert sparse_backends(report, "attention") == {backend}
    assert sparse_backends(report, "mlp") == {backend}
    assert (found - expected).norm() < 0.02 * expected.norm()
