"""Times of the steps of a run, against sums by hand."""

import dataclasses
from functools import partial

import pytest
import torch

from chipsparse.config import PARTS, Action, SparsityConfig
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.sparse.cache.placement import Placement
from chipsparse.sparse.cache.tensors import Kept
from chipsparse.sparse.cost_model.layer_times import Rates
from chipsparse.sparse.cost_model.run_times import Load, estimate_run, step_seconds
from chipsparse.sparse.plan import SparsityPlan

LAYOUT = ModelLayout((LayerKind("block", 3, 32),), 2, 4, 1, ((1, 4, 8),))
UNIT = Rates(link=1.0, both_ways=1.0)
ACTIONS = ["dense", "refresh", "sparse", "skip", "sparse"]
PLAN = SparsityPlan(SparsityConfig().override({"schedule.actions": ACTIONS}), LAYOUT, 5)
ON_DEVICE = Placement()
NOTHING: dict = {part: {} for part in PARTS}


def estimate(placement=ON_DEVICE, *, captured=True, dense=NOTHING, branches=1, rates=None):
    rates = rates or Rates(launch_seconds=0.0, refresh_seconds=0.0)
    options = {"captured": captured, "dense_parts": dense, "branches": branches, "rates": rates}
    moved = partial(placement.moved, PLAN.config)
    return estimate_run(PLAN, moved=moved, dtype=torch.bfloat16, **options)


def test_a_run_is_the_sum_of_its_steps():
    found = estimate(branches=2)
    steps = found.steps
    assert (steps[Action.SKIP], steps[Action.DENSE]) == (0, pytest.approx(found.stock))
    total = steps[Action.DENSE] + steps[Action.REFRESH] + 2 * steps[Action.SPARSE]
    assert (found.run, found.stock_run) == (pytest.approx(total), pytest.approx(5 * found.stock))
    assert found.speedup_run == pytest.approx(5 * found.stock / total)
    single = estimate()
    assert found.stock == pytest.approx(2 * single.stock)
    assert (found.moving, found.hidden) == (0, 1)


def test_of_the_branches_the_first_alone_sums_columns_at_a_refresh():
    rates = Rates(launch_seconds=0.0, refresh_seconds=0.0, refresh_attention=2.0)
    one, three = (estimate(branches=branches, rates=rates) for branches in (1, 3))
    assert one.steps[Action.REFRESH] > one.stock
    assert three.steps[Action.REFRESH] == pytest.approx(one.steps[Action.REFRESH] + 2 * one.stock)
    assert three.steps[Action.SPARSE] == pytest.approx(3 * one.steps[Action.SPARSE])


def test_layers_that_run_dense_take_as_long_as_stock_ones():
    all_layers = dict.fromkeys(range(3), "why")
    found = estimate(dense=dict.fromkeys(PARTS, all_layers))
    for action in (Action.DENSE, Action.REFRESH, Action.SPARSE):
        assert found.steps[action] == pytest.approx(found.stock)
    none, one = (estimate(dense=dict.fromkeys(PARTS, of)).steps for of in ({}, {0: "why"}))
    saved = found.stock - none[Action.SPARSE]
    assert found.stock - one[Action.SPARSE] == pytest.approx(saved * 2 / 3)


def test_slow_transfers_decide_how_long_a_step_takes():
    host = {(layer, "mlp"): {Kept.ACTIVATION: 1 << 20} for layer in range(3)}
    rates = Rates(launch_seconds=0.0, link=1e6)
    found = estimate(Placement(host=host), branches=2, rates=rates)
    assert found.to_device == found.to_host == 2 * 3 << 20
    assert found.moving == pytest.approx(found.to_device / (rates.both_ways * 1e6))
    assert found.steps[Action.SPARSE] > found.moving > 100 * found.computing
    assert found.hidden == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("captured", [False, True])
def test_no_sparse_layer_is_faster_than_its_launch(captured):
    result = estimate(captured=captured, rates=Rates(launch_seconds=1.0))
    least = 0.0 if captured else 3.0
    assert result.steps[Action.SPARSE] == pytest.approx(least, abs=0.1 if captured else 1e-6)
    assert result.steps[Action.REFRESH] == pytest.approx(3.0)
    assert result.steps[Action.DENSE] == pytest.approx(result.stock)
    assert result.stock < 1.0


@pytest.mark.parametrize(
    ("loads", "seconds"),
    [
        ([], 0),
        ([Load(3), Load(4)], 7),
        # the first layer waits for its own tensors
        ([Load(3, "mlp", 2)], 2 + 3),
        # later ones arrive while the layer before computes
        ([Load(3, "mlp", 2)] * 3, 2 + 9),
        # or the link decides
        ([Load(1, "mlp", 5)] * 3, 15 + 1),
        # layers that fetch nothing give time to the others
        ([Load(1, "mlp", 3), Load(1), Load(1), Load(1, "mlp", 3)], 3 + 4),
        # what must leave a slot before it is filled again
        ([Load(1, "mlp", 1, 9), Load(1, "mlp", 1), Load(1, "mlp", 1)], 11 + 1 + 1),
        # parts have slots of their own, but share the link
        ([Load(1, "attention", 1), Load(1, "mlp", 1, 9)] * 2, 1 + 4),
        ([Load(1, "attention", 4), Load(1, "mlp", 4)], 8 + 1),
    ],
)
def test_computation_and_transfers_overlap(loads, seconds):
    assert step_seconds(loads, UNIT) == pytest.approx(seconds)


def test_a_link_that_is_used_both_ways_carries_less_each_way():
    rates = dataclasses.replace(UNIT, both_ways=0.5)
    assert step_seconds([Load(1, "mlp", 3)] * 2, rates) == 3 + 3 + 1
    assert step_seconds([Load(1, "mlp", 3, 1), Load(1, "mlp", 3)], rates) == 6 + 6 + 1
