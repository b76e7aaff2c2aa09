"""Predicted times against sums by hand."""

import pytest

from chipsparse.config import SparsityConfig
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.plan import Action
from chipsparse.tuning.layer_times import line
from chipsparse.tuning.probes import BUDGETS
from chipsparse.tuning.time_model import TimeModel, WholeTimes

LAYOUT = ModelLayout(
    kinds=(LayerKind("double", 1, 256), LayerKind("single", 2, 128)),
    heads=2,
    head_dim=8,
    batch=1,
    grids=((1, 10, 9),),
    text_tokens=10,
)
TIMES = [
    {
        "part": part,
        "kind": kind,
        "plain": 1.0 * factor,
        "dense": 1.1 * factor,
        "refresh": 1.5 * factor,
        "sparse": [[0.1, 0.3 * factor], [0.5, 0.7 * factor]],  # 0.2 and 1 per share
    }
    for part, of_part in (("attention", 1.0), ("mlp", 2.0))
    for kind, factor in (("double", of_part), ("single", 3 * of_part))
]
WHOLE = WholeTimes(step=100.0, skipped_step=0.5, other=7.0)
LAYERS = {"attention": [0, 1, 2], "mlp": [0, 1, 2]}
CONFIG = SparsityConfig().override({"attention.random_fraction": 0.05})
D, R, S, K = Action.DENSE, Action.REFRESH, Action.SPARSE, Action.SKIP


def test_a_schedule_takes_the_sum_of_its_steps():
    model = TimeModel(TIMES, WHOLE, 2, LAYOUT, LAYERS, CONFIG)
    actions = [D, R, S, K, S, R, S, K, D]
    spent = model.of_schedule(actions)
    plain = sum((1 + 2) * factor for factor in (1, 3, 3))
    rest = 100 - 2 * plain
    assert spent.fixed == pytest.approx(7 + 2 * 0.5 + 7 * rest)
    for part, of_part in (("attention", 1.0), ("mlp", 2.0)):
        for layer, of_layer in enumerate((1, 3, 3)):
            factor = of_part * of_layer
            assert spent.dense[part][layer] == pytest.approx(2 * 7 * factor)
            for i, budget in enumerate(BUDGETS[part]):
                # The ten text columns are always kept, and random ones come on top.
                share = max(budget, 0.1) + 0.05 if part == "attention" else budget
                full = 2 * 1.1 + 2 * 1.5
                expected = 2 * factor * (full + 3 * (0.2 + share))
                assert spent.of[part][layer, i] == pytest.approx(expected)
    assert model.dense_seconds(9) == pytest.approx(7 + 900)


def test_the_rest_of_a_step_is_never_negative():
    model = TimeModel(TIMES, WholeTimes(1.0, 0.0, 0.0), 2, LAYOUT, LAYERS, CONFIG)
    assert model.of_schedule([D, D]).fixed == 0


@pytest.mark.parametrize(
    ("pairs", "fixed", "per_share"),
    [
        ([[0.1, 0.3], [0.3, 0.5], [0.5, 0.7]], 0.2, 1.0),
        ([[0.2, 0.5]], 0.5, 0.0),
        ([[0.2, 0.5], [0.2, 0.7]], 0.6, 0.0),
        ([[0.1, 0.5], [0.5, 0.3]], 0.4, 0.0),  # more work never takes less time
    ],
)
def test_a_line_through_measured_times(pairs, fixed, per_share):
    found = line(pairs)
    assert found["fixed"] == pytest.approx(fixed)
    assert found["per_share"] == pytest.approx(per_share)
