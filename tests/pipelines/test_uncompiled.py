"""A model without compilation for a while, and no other one."""

import threading

import pytest
import torch

import chipsparse
from chipsparse.pipelines.uncompiled import uncompiled
from tests.pipelines.families import qwen_image21
from tests.pipelines.small_sparse import SPARSE, generate


class Doubling(torch.nn.Module):
    def forward(self, value):
        return 2 * value


@pytest.fixture
def compiled():
    """Names of what was compiled, by a backend that computes as PyTorch does."""
    names = []

    def backend(graph, _inputs):
        names.append(threading.current_thread().name)
        return graph.forward

    torch._dynamo.reset()
    yield names, backend
    torch._dynamo.reset()


def call_compiled(block, backend):
    block.compile(backend=backend)
    return block


def wrapped(block, backend):
    return torch.compile(block, backend=backend)


def forward_compiled(block, backend):
    block.forward = torch.compile(block.forward, backend=backend)
    return block


@pytest.mark.parametrize("how", [call_compiled, wrapped, forward_compiled])
def test_compiled_modules_run_as_they_are_written(how, compiled):
    names, backend = compiled
    model = torch.nn.Sequential(how(Doubling(), backend))
    with uncompiled(model):
        assert model(torch.ones(1)) == 2
    assert names == []
    assert model(torch.ones(1)) == 2
    assert len(names) == 1


def test_what_another_thread_compiles_is_compiled_while_a_model_is_observed(compiled):
    names, backend = compiled
    (family, *_) = qwen_image21.FAMILIES  # its first step runs as it is written
    pipe, other = family.make(), Doubling()
    other.compile(backend=backend)

    def run_other(*_):
        thread = threading.Thread(target=lambda: other(torch.ones(1, 3)), name="other")
        thread.start()
        thread.join()

    with chipsparse.enable(pipe, SPARSE):
        hook = pipe.transformer.transformer_blocks[0].register_forward_hook(run_other)
        generate(pipe, family.call, branches=("cond",), num_inference_steps=1)
        hook.remove()
    assert names == ["other"]
