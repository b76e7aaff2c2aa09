"""Patched pipelines whose caches live in host memory, on whatever device the tests run on.

With the caches there the results are the same bits as without, whatever else is going on.
"""

import pytest
import torch

import chipsparse
from chipsparse.sparse.cache.memory_plan import BudgetError
from tests.pipelines.changes import Packed, at_step
from tests.pipelines.tiny_runs import WAN
from tests.tiny_models import tiny_wan_pipeline, tiny_wan_transformer

HOSTED = {"memory.offload": "always"}
IN_FULL = {"memory.cache_precision": "model"}


@pytest.fixture
def pipe(device):
    return tiny_wan_pipeline().to(device)


def memory_of(handle):
    (runner, *_) = handle._runners
    return runner.sparse.session._pool.host


def test_two_experts_use_the_same_host_memory_one_after_the_other(device):
    experts = {"transformer_2": tiny_wan_transformer(seed=9), "boundary_ratio": 0.9}
    pipe = tiny_wan_pipeline(**experts).to(device)
    held = []
    with chipsparse.enable(pipe, WAN.SPARSE):
        expected = WAN.generate(pipe)
    with chipsparse.enable(pipe, WAN.SPARSE.override(HOSTED)) as handle:
        sessions = [runner.sparse.session for runner in handle._runners]

        def look():
            caches = [session.cache_bytes() > 0 for session in sessions]
            held.append((memory_of(handle).nbytes, caches))

        assert torch.equal(WAN.generate(pipe, callback_on_step_end=at_step(None, look)), expected)
    assert {step.transformer for step in handle.report.steps} == {"transformer", "transformer_2"}
    assert len({nbytes for nbytes, _ in held}) == 1
    assert held[1][1] == [True, False]
    assert [caches for _, caches in held[-2:]] == [[False, True], [False, False]]


def test_disable_while_copies_are_under_way(pipe):
    """In the middle of a generation, straight after a refresh queued its write-backs."""
    expected = WAN.generate(pipe)
    handle = chipsparse.enable(pipe, WAN.SPARSE.override(HOSTED))
    memory = memory_of(handle)
    held = []

    def stop():
        held.append(memory.nbytes)
        handle.disable()
        held.append(memory.nbytes)

    WAN.generate(pipe, callback_on_step_end=at_step(1, stop))
    assert held[0] > held[1] == 0
    assert torch.equal(WAN.generate(pipe), expected)


def test_layers_that_cannot_run_sparse_take_no_memory(pipe):
    linear = pipe.transformer.blocks[1].ffn.net[2]
    linear.weight = Packed(linear.weight.data)
    placements = []
    with chipsparse.enable(pipe, WAN.SPARSE.override(HOSTED)) as handle:
        branches = handle._runners[0].sparse.session._caches._branches

        def look():
            placements.extend(branch.memory.placement for branch in branches.values())

        WAN.generate(pipe, num_inference_steps=4, callback_on_step_end=at_step(None, look))
    assert all(not placement.dense for placement in placements)
    assert {layer for layer, part in placements[0].host if part == "mlp"} == {0, 2}
    assert {layer for layer, part in placements[0].host if part == "attention"} == {0, 1, 2}


def test_a_budget_for_nothing_is_refused_before_the_first_step(pipe):
    config = WAN.SPARSE.override({"memory.vram": 1, "memory.ram": 1})
    with chipsparse.enable(pipe, config) as handle:
        hook = pipe.transformer.blocks[0].register_forward_pre_hook(lambda *_: pytest.fail("ran"))
        with pytest.raises(BudgetError, match="not one layer's caches fit: all of them need"):
            WAN.generate(pipe)
        hook.remove()
        assert handle.report.cache_bytes == 0
    dense = {"attention.density": "dense", "mlp.density": "dense"}
    with chipsparse.enable(pipe, config.override(dense)):
        WAN.generate(pipe, num_inference_steps=3)  # needs no caches
