"""The share of a dense generation's operations, from what was recorded."""

from dataclasses import replace

import pytest

from chipsparse.config import Action, SparsityConfig
from chipsparse.experiments.clips import step_costs, work_share
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.report.generation import GenerationReport
from chipsparse.report.records import LayerRecord, StepRecord
from chipsparse.sparse.plan import SparsityPlan

KIND = LayerKind("block", layers=2, intermediate_size=64)
LAYOUT = ModelLayout((KIND,), heads=2, head_dim=16, batch=1, grids=((2, 4, 4),))
PLAN = SparsityPlan(SparsityConfig().override({"schedule.periodic.warmup": 2}), LAYOUT, 4)
TOKENS = 32
CHANNELS = 32
WIDTH = 64
ATTENTION = 4 * TOKENS * TOKENS * CHANNELS
MLP = 2 * 2 * TOKENS * CHANNELS * WIDTH


def record(action, *layers, plan=PLAN):
    made = StepRecord(step=0, steps_total=4, branch="", action=action, layers=list(layers))
    made.plan = plan
    return made


def report(*records):
    return GenerationReport(steps=list(records))


def test_dense_steps_do_all_and_skipped_ones_nothing():
    assert work_share(report(record(Action.DENSE))) == 1
    assert work_share(report(record(Action.DENSE), record(Action.SKIP))) == 0.5
    assert work_share(report(record(Action.DENSE), record(Action.REFRESH))) == 1


def test_sparse_layers_save_what_they_leave_out():
    dense = step_costs(PLAN)[0]
    half = LayerRecord(0, "attention", Action.SPARSE, computed=0.5)
    tenth = LayerRecord(1, "mlp", Action.SPARSE, computed=0.1)
    stayed = LayerRecord(1, "attention", Action.DENSE)
    share = work_share(report(record(Action.SPARSE, half, tenth, stayed)))
    assert share == pytest.approx(1 - (0.5 * ATTENTION + 0.9 * MLP) / dense)


def test_a_section_of_another_size_counts_by_its_own():
    large = replace(PLAN, layout=replace(LAYOUT, batch=3 * LAYOUT.batch))
    computed = record(Action.DENSE), record(Action.SKIP, plan=large)
    assert work_share(report(*computed)) == work_share(report(*reversed(computed))) == 0.25


def test_the_steps_of_a_plan_without_which_nothing_is_known():
    assert work_share(report(record(Action.DENSE, plan=None))) is None
    assert work_share(GenerationReport()) is None
    dense, refresh, *sparse = step_costs(PLAN)
    assert dense == refresh > sparse[0] == sparse[1] > 0
    assert len(step_costs(PLAN, first=1)) == 3
