"""The error guard on whole pipelines: a layer that jumps, host memory, compiled blocks."""

import pytest
import torch

import chipsparse
from chipsparse.plan import Action
from tests.pipelines import test_flux as flux
from tests.pipelines import test_wan as wan
from tests.tiny_models import tiny_flux_pipeline, tiny_wan_pipeline

BOUND = 0.5
LAST, JUMP = 2, 4  # layer and step; what comes after a layer that jumps would follow it
WAN = wan.SPARSE.override({"schedule.refresh_every": 6})
GUARDED = WAN.override({"guard.bound": BOUND})


@pytest.fixture
def pipe():
    """Its last layer's values turn around at a step, in both branches."""
    pipe = tiny_wan_pipeline()
    calls = []

    def turn_around(_module, _args, output):
        calls.append(None)
        return -output if (len(calls) - 1) % (2 * wan.STEPS) >= 2 * JUMP else None

    pipe.transformer.blocks[LAST].attn1.to_v.register_forward_hook(turn_around)
    return pipe


def test_the_layer_that_jumps_is_refreshed_at_the_next_step_and_only_it(pipe):
    with chipsparse.enable(pipe, GUARDED) as handle:
        first = wan.generate(pipe)
        assert torch.equal(wan.generate(pipe), first)
        records = handle.report.steps
        assert handle.report.guard_summary().startswith("2 early refreshes of attention (most")
    assert all(torch.isfinite(first.flatten()))
    for record in records:
        assert record.early_refreshes == ([LAST] if record.step == JUMP + 1 else [])
        errors = {layer: float(error) for layer, error in record.guard_errors.items()}
        assert len(errors) == (
            0 if record.action is not Action.SPARSE else 2 if record.step == JUMP + 1 else 3
        )
        over = [layer for layer, error in errors.items() if error > BOUND]
        assert over == ([LAST] if record.step == JUMP else [])


def test_a_bound_that_is_never_passed_gives_the_bits_of_no_guard(pipe):
    with chipsparse.enable(pipe, WAN):
        expected = wan.generate(pipe)
    with chipsparse.enable(pipe, WAN.override({"guard.bound": 100.0})) as handle:
        assert torch.equal(wan.generate(pipe), expected)
        assert all(len(r.guard_errors) == 3 for r in handle.report.steps if r.action == "sparse")


def test_early_refreshes_with_caches_in_host_memory_give_the_same_bits(pipe):
    with chipsparse.enable(pipe, GUARDED):
        expected = wan.generate(pipe)
    with chipsparse.enable(pipe, GUARDED.override({"memory.offload": "always"})) as handle:
        assert torch.equal(wan.generate(pipe), expected)
        assert [r.early_refreshes for r in handle.report.steps].count([LAST]) == 2


def test_early_refreshes_with_text_in_the_sequence():
    """A bound of 0 refreshes every layer at every other step."""
    pipe = tiny_flux_pipeline()
    with chipsparse.enable(pipe, flux.SPARSE.override({"guard.bound": 0.0})) as handle:
        assert torch.isfinite(flux.generate(pipe)).all()
        sparse = [r.early_refreshes for r in handle.report.steps if r.action is Action.SPARSE]
    assert sparse[:2] == [[], [0, 1, 2, 3, 4]]


def test_compiled_blocks_still_share_one_graph():
    """The guard works behind the custom op."""
    config = GUARDED.override({"guard.bound": 0.0})
    plain, compiled = tiny_wan_pipeline(), tiny_wan_pipeline()
    with chipsparse.enable(plain, config):
        expected = wan.generate(plain)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with chipsparse.enable(compiled, config) as handle:
        compiled.transformer.compile_repeated_blocks(backend="eager", fullgraph=True)
        torch.testing.assert_close(wan.generate(compiled), expected, atol=1e-5, rtol=1e-5)
        assert any(record.early_refreshes for record in handle.report.steps)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    torch._dynamo.reset()
