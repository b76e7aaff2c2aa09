"""When sparse steps are captured as CUDA graphs: expected before a generation, measured in it."""

import pytest
import torch

from chipsparse import SparsityConfig
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.measure.capture_gain import as_of_many, capture_pays, device_seconds, may_capture
from chipsparse.measure.cost_model import Rates, layer_time
from chipsparse.measure.step_seconds import estimated_seconds
from chipsparse.plan import Action, SparsityPlan
from tests.variants import slow

BF16 = torch.bfloat16


def plan_of(tokens=4352, heads=24, layers=57, width=12_288, steps=50, **overrides):
    """By default FLUX.1 at 1280x768."""
    values = {name.replace("__", "."): value for name, value in overrides.items()}
    layout = ModelLayout((LayerKind("block", layers, width),), heads, 128, 1, ((1, 1, tokens),))
    return SparsityPlan(SparsityConfig().override(values), layout, steps)


@pytest.mark.parametrize(
    ("tokens", "heads", "layers", "width", "expected"),
    [
        (4352, 24, 57, 12_288, True),  # 72 ms of kernels, launched in 85
        slow(17_408, 2, 10, 1024, True),
        slow(32_760, 12, 30, 8960, False),  # 4 % of a sparse step were idle
        slow(119_056, 24, 60, 12_288, False),
    ],
)
def test_steps_that_the_host_may_hold_up_get_room_for_graphs(
    tokens, heads, layers, width, expected
):
    plan = plan_of(tokens, heads, layers, width)
    assert may_capture(plan, BF16) is expected
    # A device that takes no time waits for any host, one that takes very long for none.
    assert may_capture(plan, BF16, Rates(launch_seconds=1e3))
    assert not may_capture(plan, BF16, Rates(launch_seconds=1e-9))


@pytest.mark.parametrize("tokens", [4352, 119_056])
def test_what_a_user_asks_for_is_not_weighed(tokens):
    assert may_capture(plan_of(tokens, cuda_graphs="always"), BF16)
    assert not may_capture(plan_of(tokens, cuda_graphs="never"), BF16)


def test_two_sparse_steps_run_before_one_is_captured():
    for sparse, expected in ((2, False), (3, True)):
        actions = ("dense", "refresh", *["sparse"] * sparse)
        plan = plan_of(steps=len(actions), schedule__actions=actions)
        assert plan.sparse_steps_from(0) == sparse
        assert plan.sparse_steps_from(3) == sparse - 1
        assert may_capture(plan, BF16) is expected


def test_what_the_device_computes_is_that_of_all_layers():
    plan = plan_of(layers=3)
    rates = Rates()
    rest = layer_time(0, Action.SPARSE, plan=plan, rates=rates, dtype=BF16).rest
    attention, mlp = (estimated_seconds(plan, 0, part, dtype=BF16) for part in ("attention", "mlp"))
    expected = 3 * (rest + attention.sparse + mlp.sparse)
    assert device_seconds(plan, BF16) == pytest.approx(expected)
    dense = layer_time(0, Action.DENSE, plan=plan, rates=rates, dtype=BF16).mlp
    with_one_dense = device_seconds(plan, BF16, dense={(1, "mlp")})
    assert with_one_dense - expected == pytest.approx(dense - mlp.sparse)


@pytest.mark.parametrize(
    ("host", "call", "device", "calls", "expected"),
    [
        (85, 85, 75, 38, True),  # FLUX.1, the published schedule: 380 ms saved for 128
        (85, 85, 75, 7, False),
        (10, 10.2, 4, 8, True),  # 17,408 tokens of a small model
        (10, 10.2, 4, 2, False),
        (60, 200, 180, 38, False),  # the host keeps ahead
        (85, 85, 90, 38, False),  # nothing is waited for
    ],
)
def test_what_was_measured_decides(host, call, device, calls, expected):
    assert capture_pays(host=host, call=call, device=device, calls=calls) is expected


def test_a_few_steps_run_as_many_would():
    config = SparsityConfig()
    assert as_of_many(config, plan_of(), BF16).cuda_graphs == "always"
    assert as_of_many(config, plan_of(119_056, layers=60), BF16).cuda_graphs == "never"
