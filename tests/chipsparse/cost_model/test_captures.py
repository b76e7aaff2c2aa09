"""When sparse steps are captured as CUDA graphs: decided before a generation."""

import pytest
import torch

from chipsparse import SparsityConfig
from chipsparse.cost_model.layer_times import Rates, as_of_many, captures
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.plan import SparsityPlan
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
def test_steps_that_wait_for_the_host_are_captured(tokens, heads, layers, width, expected):
    plan = plan_of(tokens, heads, layers, width)
    assert captures(plan, BF16) is expected
    # A device that takes no time waits for any host, one that takes very long for none.
    assert captures(plan, BF16, Rates(host_seconds=1e3))
    assert not captures(plan, BF16, Rates(host_seconds=1e-9))


@pytest.mark.parametrize("tokens", [4352, 119_056])
def test_what_a_user_asks_for_is_not_weighed(tokens):
    assert captures(plan_of(tokens, cuda_graphs="always"), BF16)
    assert not captures(plan_of(tokens, cuda_graphs="never"), BF16)


@pytest.mark.parametrize(
    ("tokens", "sparse", "expected"),
    # FLUX.1 saves 11 ms a call and pays 128 once; a small model saves nearly all of 15 for 22.
    [(4352, 12, False), (4352, 16, True), (256, 2, False), (256, 3, True)],
)
def test_enough_sparse_steps_must_come(tokens, sparse, expected):
    actions = ("dense", "refresh", *["sparse"] * sparse)
    plan = plan_of(tokens, steps=len(actions), schedule__actions=actions)
    assert plan.sparse_steps_from(0) == sparse
    assert captures(plan, BF16) is expected


def test_a_few_steps_run_as_many_would():
    config = SparsityConfig()
    assert as_of_many(config, plan_of(), BF16).cuda_graphs == "always"
    assert as_of_many(config, plan_of(119_056, layers=60), BF16).cuda_graphs == "never"
