"""Two pipelines in two threads do not know of each other, and leave the process as it was."""

import threading
import warnings

import pytest
import torch

import chipsparse
from chipsparse.graphs.step_graph import StepGraphs
from chipsparse.kernels.dense_attention.measure import FastestKernel
from chipsparse.session import Session
from tests.devices import DEVICES
from tests.graph_stand_in import TapeRecorder
from tests.pipelines import test_flux, test_wan
from tests.tiny_models import tiny_flux_pipeline, tiny_wan_pipeline
from tests.variants import slow

GENERATIONS = 2
STEPS = 5  # one of them recorded
OF_LIBRARIES = ("tqdm_monitor", "InductorSubproc", "subproc_worker_timer")
FAMILIES = {
    "flux": (tiny_flux_pipeline, test_flux),
    "wan": (tiny_wan_pipeline, test_wan),
}


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == "cuda":
        monkeypatch.setattr(FastestKernel, "pick", lambda _, kernels, *inputs: next(iter(kernels)))
        return "cuda"

    def session(*args, **kwargs):
        return Session(*args, **kwargs, graphs=StepGraphs(TapeRecorder()))

    monkeypatch.setattr("chipsparse.api.Session", session)
    return "cpu"


def process_state():
    generators = [torch.default_generator]
    if torch.cuda.is_available():
        generators += torch.cuda.default_generators
    return (
        [generator.get_state().tolist() for generator in generators],
        list(warnings.filters),
        warnings.showwarning,
        warnings._showwarnmsg_impl,
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.cuda.get_sync_debug_mode() if torch.cuda.is_available() else 0,
        [each.name for each in threading.enumerate() if each.name not in OF_LIBRARIES],
    )


def in_threads(*runs):
    """Runs all at once; the first exception of any is raised."""
    together, errors = threading.Barrier(len(runs)), []

    def guarded(run):
        try:
            together.wait(timeout=60)
            run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def generations(pipe, module):
    return [
        module.generate(pipe, seed=seed, num_inference_steps=STEPS) for seed in range(GENERATIONS)
    ]


@pytest.mark.parametrize("names", [slow(("flux", "wan")), ("flux", "flux")], ids="+".join)
def test_bits_are_those_of_one_after_the_other(names, device):
    pipes, modules = [], []
    for name in names:
        make, module = FAMILIES[name]
        pipe = make().to(device)
        if device == "cuda":
            pipe.to(torch.bfloat16)
        pipes.append(pipe)
        modules.append(module)
    expected = []
    for pipe, module in zip(pipes, modules, strict=True):
        with chipsparse.enable(pipe, module.SPARSE):
            expected.append(generations(pipe, module))
    handles = [
        chipsparse.enable(pipe, module.SPARSE) for pipe, module in zip(pipes, modules, strict=True)
    ]
    before = process_state()
    found = [None, None]

    def run(number):
        found[number] = generations(pipes[number], modules[number])

    in_threads(lambda: run(0), lambda: run(1))
    assert process_state() == before
    for name, handle, pictures, own in zip(names, handles, found, expected, strict=True):
        assert all(map(torch.equal, pictures, own)), name
        assert handle.report.actions()["sparse"] > 0
        handle.disable()
