"""Times computed by hand, and those that were measured on the device of the default rates."""

import dataclasses
import itertools
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.records import read
from chipsparse.config import Action, SparsityConfig
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.pipelines.families.flux import FLUX
from chipsparse.profiles.profile import find_profile
from chipsparse.sparse.cost_model.layer_times import (
    ELEMENTWISE_PASSES,
    Rates,
    kept_columns,
    layer_time,
)
from chipsparse.sparse.plan import SparsityPlan

SHARES = {"sparse_attention": 0.5, "sparse_mlp": 0.25}
REFRESH = {"refresh_attention": 2.0, "refresh_seconds": 7.0}
UNIT = Rates(attention=1.0, linear=1.0, memory=1.0, **SHARES, **REFRESH)
CONFIG = SparsityConfig().override({"attention.density": 0.4, "mlp.density": 0.5})
KINDS = LayerKind("double", 1, 32, mlp_sees_text=False), LayerKind("single", 1, 32)
LAYOUT = ModelLayout(KINDS, heads=2, head_dim=4, batch=1, grids=((1, 2, 8),), text_tokens=4)
PLAN = SparsityPlan(CONFIG, LAYOUT, 10)
ATTENTION = 4 * 20 * 20 * 8
REST = 2 * 20 * 8 * 4 * 8 + ELEMENTWISE_PASSES * 20 * 8 * 2
IMAGE_MLP = 4 * 16 * 8 * 32
TEXT_MLP = 4 * 4 * 8 * 32


def time_of(action, layer=1, plan=PLAN, **given):
    return layer_time(layer, action, plan=plan, rates=UNIT, dtype=torch.bfloat16, **given)


# Tokens, and how much faster full attention was in 8 bits, rounding included.
IN_8_BITS = [(4_352, 0.98), (6_144, 1.11), (8_192, 1.20), (16_384, 1.30), (32_256, 1.37)]


@pytest.mark.parametrize(("tokens", "measured"), IN_8_BITS)
def test_attention_in_8_bits(tokens, measured):
    """Of 24 heads of 128 channels; benchmarks/notes/fp8.md."""
    layout = ModelLayout((LayerKind("", 1, 1),), 24, 128, 1, ((1, 1, tokens),))
    times = []
    for precision in ("model", "fp8"):
        config = SparsityConfig().override({"attention.precision": precision})
        plan = SparsityPlan(config, layout, 10)
        found = layer_time(0, Action.DENSE, plan=plan, rates=Rates(), dtype=torch.bfloat16)
        times.append(found.attention)
    assert times[0] / times[1] == pytest.approx(measured, rel=0.07)


@pytest.mark.parametrize(
    ("action", "attention", "mlp"),
    [
        (Action.DENSE, ATTENTION, IMAGE_MLP + TEXT_MLP),
        (Action.REFRESH, 2 * ATTENTION + 7, IMAGE_MLP + TEXT_MLP),
        (Action.SPARSE, ATTENTION * (8 / 20 + 0.022) / 0.5, (IMAGE_MLP + TEXT_MLP) * 0.5 / 0.25),
    ],
)
def test_a_layer_by_hand(action, attention, mlp):
    time = time_of(action)
    twice = dataclasses.replace(LAYOUT, batch=2)
    assert (time.attention, time.mlp, time.rest) == pytest.approx((attention, mlp, REST))
    assert time.total == pytest.approx(attention + mlp + REST)
    double = time_of(action, plan=dataclasses.replace(PLAN, layout=twice))
    fixed = 7 if action is Action.REFRESH else 0
    assert double.attention - fixed == pytest.approx(2 * (attention - fixed))
    assert (double.mlp, double.rest) == pytest.approx((2 * mlp, 2 * REST))


def test_a_gated_layer_has_one_linear_more():
    gated = tuple(dataclasses.replace(kind, mlp_linears=3) for kind in LAYOUT.kinds)
    plan = dataclasses.replace(PLAN, layout=dataclasses.replace(LAYOUT, kinds=gated))
    for action, layer in itertools.product((Action.DENSE, Action.SPARSE), (0, 1)):
        result = time_of(action, layer, plan)
        plain = time_of(action, layer)
        assert result.mlp == pytest.approx(1.5 * plain.mlp)
        assert (result.attention, result.rest) == (plain.attention, plain.rest)


def test_columns_that_a_group_computes():
    for density, columns in ((0.4, 8), (0.1, 4), (1.0, 20)):  # 4 columns of text are always kept
        config = CONFIG.override({"attention.density": density})
        assert kept_columns(dataclasses.replace(PLAN, config=config), 0) == columns


def test_the_measured_transformer():
    records = read(Path(__file__).parents[4] / "benchmarks/results/full_size_fp8_h200.json")
    wanted = "flux_1280x768", "sparse"
    (measured,) = (one for one in records if (one["case"], one["schedule"]) == wanted)
    config = {"num_layers": 19, "num_single_layers": 38}
    config |= {"num_attention_heads": 24, "attention_head_dim": 128}
    layout = FLUX.planned_layout(config, latents=(1, 96, 160), text_tokens=512)
    assert layout.tokens == measured["tokens"]
    profile = find_profile(None, "FluxTransformer2DModel")
    plan = SparsityPlan(profile.qualities["chipmunk"], layout, 20)
    timed = partial(layer_time, plan=plan, rates=Rates(), dtype=torch.bfloat16)
    for action in (Action.DENSE, Action.REFRESH, Action.SPARSE):
        seconds = sum(timed(layer, action).total for layer in range(layout.layers))
        assert 1e3 * seconds == pytest.approx(measured[f"{action}_ms"], rel=0.03)
