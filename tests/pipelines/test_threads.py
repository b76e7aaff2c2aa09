"""Two pipelines in two threads do not know of each other, and leave the process as it was."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import chipsparse
from tests.pipelines.model_state import process_state
from tests.pipelines.tiny_runs import FLUX, WAN
from tests.variants import DEVICES, slow


@pytest.fixture(params=DEVICES)
def device(request):
    request.getfixturevalue("recorder" if request.param == "cpu" else "first_dense_kernel")
    return request.param


@pytest.mark.parametrize("second", [slow(WAN), FLUX], ids=["wan", "flux"])
def test_bits_are_those_of_one_after_the_other(second, device):
    models = [FLUX, second]
    together = threading.Barrier(2)
    pipes = [model.make().to(device) for model in models]
    for pipe in pipes if device == "cuda" else ():
        pipe.to(torch.bfloat16)

    def generations(model, pipe):
        # Of five steps one is recorded.
        return [model.generate(pipe, seed=seed, num_inference_steps=5) for seed in range(2)]

    def at_once(model, pipe):
        together.wait(timeout=60)
        return generations(model, pipe)

    expected = []
    for model, pipe in zip(models, pipes, strict=True):
        with chipsparse.enable(pipe, model.SPARSE):
            expected.append(generations(model, pipe))
    handles = [chipsparse.enable(pipe, m.SPARSE) for m, pipe in zip(models, pipes, strict=True)]
    before = process_state()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(at_once, models, pipes))
    assert process_state() == before
    for handle, pictures, own in zip(handles, found, expected, strict=True):
        assert all(map(torch.equal, pictures, own))
        assert handle.report.actions()["sparse"] > 0
        handle.disable()
