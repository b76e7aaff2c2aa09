"""The schedules that tuning chooses from."""

import pytest

from chipsparse.config import SparsityConfig
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.plan import Action, SparsityPlan
from chipsparse.tuning.schedules import schedules

LAYOUT = ModelLayout((LayerKind("block", 2, 64),), 2, 8, 1, ((1, 8, 8),))


@pytest.mark.parametrize("steps", [4, 8, 30, 50])
def test_every_schedule_does_what_it_lists(steps):
    base = SparsityConfig().override({"attention.random_fraction": 0.02})
    configs = list(schedules(base, steps))
    assert len(set(configs)) == len(configs)
    for config in configs[1:]:
        plan = SparsityPlan(config, LAYOUT, steps)
        actions = plan.actions()
        assert plan.remarks() == []  # nothing that is listed as skipped is computed
        skipped = [step for step, action in enumerate(actions) if action is Action.SKIP]
        assert skipped == list(config.schedule.skip_steps)
        assert Action.SKIP in actions or Action.SPARSE in actions
        # A generation without a sparse step records nothing.
        assert (Action.SPARSE in actions) == config.attention.enabled == config.mlp.enabled
        assert config.attention.random_fraction == 0.02


def test_the_schedule_of_the_base_comes_first():
    base = SparsityConfig().override(
        {"schedule.refresh_steps": [9, 21], "schedule.skip_steps": [12, 14]}
    )
    first = next(iter(schedules(base, 30)))
    assert first == base
    by_threshold = base.override({"schedule.skip_threshold": 0.05})
    assert next(iter(schedules(by_threshold, 30))) == first  # which no prediction covers


def test_a_part_that_is_off_stays_off():
    base = SparsityConfig().override({"mlp.enabled": False})
    assert not any(config.mlp.enabled for config in schedules(base, 20))
