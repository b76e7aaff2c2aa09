"""The error guard: what it measures, which layers it refreshes early, and nothing else."""

import pytest
import torch

from chipsparse import SparsityConfig
from chipsparse.cache.host_memory import HostMemory
from chipsparse.cache.offload import OffloadPool
from chipsparse.layers.error_guard import DeviceNumber, checked_rows, sampled_error
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.plan import Action
from chipsparse.report.generation import GenerationReport, StepRecord
from chipsparse.session import Session
from chipsparse.step import StepContext
from tests.chipsparse.attend import attend
from tests.chipsparse.cache.races import TracedCopies, WatchComputation

CPU = torch.device("cpu")
TOKENS, ROWS, HEADS, HEAD_DIM, LAYERS = 75, 16, 2, 8, 4
LAYOUT = ModelLayout(
    kinds=(LayerKind("block", layers=LAYERS, mlp_width=16),),
    heads=HEADS,
    head_dim=HEAD_DIM,
    batch=2,
    grids=((3, 5, 5),),
)
CONFIG = SparsityConfig().override(
    {
        "attention.keep_fraction": 0.3,
        "attention.group_rows": ROWS,
        "mlp.enabled": False,
        "token_order.voxel": None,
        "schedule.actions": ["dense", "refresh", "sparse"],
    }
)
GUARDED = CONFIG.override({"guard.bound": 0.1})
GROUPS = -(-TOKENS // ROWS)
HOSTED = {"memory.offload": "always"}
BAD_LAYER, BAD_STEP = 1, 4


def tensors_of(step, layer, branch, jumps):
    """Query, key and value that hardly change with the steps, but for where a layer jumps."""
    generator = torch.Generator().manual_seed(10 * layer + (branch == "uncond"))
    query, key, value, drift = torch.randn(4, 2, HEADS, TOKENS, HEAD_DIM, generator=generator)
    value = value + 0.002 * step * drift
    jumped = (layer, branch) in jumps and step >= BAD_STEP
    return query, key, 1 - 2 * value if jumped else value


def exact_attention(query, key, value, scale=None):
    query, key, value = query.double(), key.double(), value.double()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return torch.softmax(query @ key.mT * scale, dim=-1) @ value


def generate(session, *, generation=1, branches=("cond", "uncond"), jumps=(), steps=8):
    """Outputs by (step, branch, layer); nothing runs at skipped steps."""
    outputs = {}
    for step in range(steps):
        for branch in branches:
            context = StepContext(generation, step, branch, steps + 1)
            if session.begin(context, LAYOUT, CPU).action is Action.SKIP:
                session.end(session.skipped_output())
                continue
            for layer in range(LAYERS):
                query, key, value = tensors_of(step, layer, branch, jumps)
                outputs[step, branch, layer] = attend(session, layer, query, key, value)
            session.end(query)
    return outputs


def session_with(config, **options):
    report = GenerationReport()
    return Session(config, report, OffloadPool(HostMemory(), report.fall_back, **options))


def early(report):
    return {
        (record.step, record.branch): record.early_refreshes
        for record in report.steps
        if record.early_refreshes
    }


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


# What is measured.


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("starts", [[0], [16, 48], [5, 59]])
def test_the_error_is_that_of_the_rows(starts, scale):
    generator = torch.Generator().manual_seed(3)
    query, key, value, output = torch.randn(4, 2, HEADS, TOKENS, HEAD_DIM, generator=generator)
    found = sampled_error(output, query, key, value, starts, rows=ROWS, scale=scale, backend=None)
    rows = [row for start in starts for row in range(start, start + ROWS)]
    exact = exact_attention(query, key, value, scale)[:, :, rows]
    wanted = (output.double()[:, :, rows] - exact).norm() / exact.norm()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)


def test_strided_half_precision_tensors_are_measured_in_float32():
    generator = torch.Generator().manual_seed(3)
    shape = (2, TOKENS, HEADS, HEAD_DIM)
    query, key, value = (
        torch.randn(shape, generator=generator).bfloat16().transpose(1, 2) for _ in range(3)
    )
    exact = exact_attention(query, key, value)
    found = sampled_error(
        (1.5 * exact).bfloat16(), query, key, value, [32], rows=ROWS, scale=None, backend=None
    )
    assert float(found) == pytest.approx(0.5, rel=0.02)


def test_rows_of_zeros_have_no_error():
    zeros = torch.zeros(1, 1, 32, 8)
    assert sampled_error(zeros, zeros, zeros, zeros, [0], rows=16, scale=None, backend=None) == 0


@pytest.mark.parametrize(("tokens", "groups"), [(75, 2), (75, 1), (75, 3), (1000, 2), (16, 2)])
def test_every_group_is_looked_at_before_any_is_again(tokens, groups):
    total = -(-tokens // ROWS)
    groups_seen = []
    for turn in range(2 * total):
        starts = checked_rows(tokens, rows=ROWS, groups=groups, turn=turn, seed=77)
        assert len(starts) == min(groups, total)
        assert all(0 <= start <= tokens - ROWS for start in starts)
        groups_seen += [-(-start // ROWS) for start in starts]
    for first in range(0, len(groups_seen) - total, total):
        assert set(groups_seen[first : first + total]) == set(range(total))


def test_a_sequence_shorter_than_a_group_is_looked_at_as_a_whole():
    assert checked_rows(9, rows=9, groups=2, turn=5, seed=1) == [0]


def test_the_seed_says_where_to_begin():
    starts = [checked_rows(75, rows=ROWS, groups=1, turn=0, seed=seed) for seed in range(5)]
    assert sorted(starts) == [[0], [16], [32], [48], [59]]


@pytest.mark.parametrize("rule", ["merge", "difference", "kept_only", "reuse"])
def test_the_report_has_the_error_of_every_sparse_layer(rule):
    """With as many groups as there are, the sample is everything."""
    overrides = {"guard.groups": GROUPS, "guard.bound": 1e9, "attention.delta_rule": rule}
    session = session_with(CONFIG.override(overrides))
    outputs = generate(session)
    for record in session.report.steps:
        assert set(record.guard_errors) == (
            set(range(LAYERS)) if record.action is Action.SPARSE else set()
        )
        for layer, error in record.guard_errors.items():
            exact = exact_attention(*tensors_of(record.step, layer, record.branch, ()))
            difference = outputs[record.step, record.branch, layer].double() - exact
            rows = torch.arange(TOKENS)
            # The last group is full: it begins within the one before it, whose end counts twice.
            rows = torch.cat([rows[: (GROUPS - 1) * ROWS], rows[-ROWS:]])
            wanted = difference[:, :, rows].norm() / exact[:, :, rows].norm()
            assert float(error) == pytest.approx(float(wanted), rel=1e-4, abs=1e-6)


# What is refreshed.


@pytest.mark.parametrize("rule", ["merge", "difference", "reuse"])
@pytest.mark.parametrize("hosted", [{}, HOSTED], ids=["device", "host"])
def test_a_layer_that_goes_wrong_is_refreshed_at_the_next_step_and_only_it(rule, hosted):
    overrides = {"attention.delta_rule": rule, **hosted}
    jumps = {(BAD_LAYER, "cond")}
    session = session_with(GUARDED.override(overrides))
    found = generate(session, jumps=jumps)
    left_alone = generate(session_with(CONFIG.override(overrides)), jumps=jumps)
    assert early(session.report) == {(BAD_STEP + 1, "cond"): [BAD_LAYER]}
    for key, output in found.items():
        step, branch, layer = key
        changed = step > BAD_STEP and branch == "cond" and layer == BAD_LAYER
        assert torch.equal(output, left_alone[key]) != changed
    for step in range(BAD_STEP + 1, 8):
        exact = exact_attention(*tensors_of(step, BAD_LAYER, "cond", jumps))
        after = (found[step, "cond", BAD_LAYER].double() - exact).norm() / exact.norm()
        before = (left_alone[step, "cond", BAD_LAYER].double() - exact).norm() / exact.norm()
        assert after < 0.02 < 0.1 < before
    records = [record for record in session.report.steps if record.branch == "cond"]
    assert float(records[BAD_STEP].guard_errors[BAD_LAYER]) > 0.1
    assert BAD_LAYER not in records[BAD_STEP + 1].guard_errors  # it was not sparse
    assert all(record.action is Action.SPARSE for record in records[2:])


def test_each_branch_has_errors_of_its_own():
    session = session_with(GUARDED)
    generate(session, jumps={(BAD_LAYER, "cond"), (3, "uncond"), (0, "uncond")})
    assert early(session.report) == {
        (BAD_STEP + 1, "cond"): [BAD_LAYER],
        (BAD_STEP + 1, "uncond"): [0, 3],
    }


def test_an_early_refresh_chooses_the_columns_anew_even_where_the_schedule_keeps_them():
    """Keys in another order: the columns that were chosen are the wrong ones."""
    session = session_with(GUARDED.override({"schedule.reselect": False}))
    columns = []
    for step in range(6):
        session.begin(StepContext(1, step, "cond", 9), LAYOUT, CPU)
        query, key, value = tensors_of(0, 0, "cond", ())
        query, key = 3 * query, key.flip(2) if step >= BAD_STEP - 1 else key
        attend(session, 0, query, key, value)
        session.end(query)
        columns.append(session._caches["cond", 0].attention.columns)
    assert early(session.report) == {(BAD_STEP, "cond"): [0]}
    assert torch.equal(columns[BAD_STEP - 1], columns[1])
    assert not torch.equal(columns[BAD_STEP], columns[1])


def test_after_a_skipped_step_the_next_computed_one_refreshes():
    actions = ["dense", "refresh", "sparse", "sparse", "sparse", "skip", "sparse"]
    session = session_with(GUARDED.override({"schedule.actions": actions}))
    generate(session, jumps={(BAD_LAYER, "cond")})
    assert early(session.report) == {(BAD_STEP + 2, "cond"): [BAD_LAYER]}


def test_a_refresh_on_schedule_is_no_early_one():
    actions = ["dense", "refresh", "sparse", "sparse", "sparse", "refresh", "sparse"]
    session = session_with(GUARDED.override({"schedule.actions": actions}))
    generate(session, jumps={(BAD_LAYER, "cond")})
    assert float(session.report.steps[2 * BAD_STEP].guard_errors[BAD_LAYER]) > 0.1
    assert early(session.report) == {}


def test_an_error_that_is_no_number_passes_every_bound():
    session = session_with(GUARDED.override({"guard.bound": 1e9, "guard.groups": GROUPS}))
    outputs = []
    for step in range(5):
        session.begin(StepContext(1, step, "cond", 9), LAYOUT, CPU)
        query, key, value = tensors_of(step, 0, "cond", ())
        if step == 3:
            session._caches["cond", 0].attention.residual[:, :, 20] = torch.nan
        outputs.append(attend(session, 0, query, key, value))
        session.end(query)
    assert not outputs[3].isfinite().all()
    assert outputs[4].isfinite().all()
    assert early(session.report) == {(4, "cond"): [0]}


# Nothing else changes.


@pytest.mark.parametrize("hosted", [{}, HOSTED], ids=["device", "host"])
def test_a_bound_that_is_never_passed_changes_no_bit(hosted):
    jumps = {(BAD_LAYER, "cond")}
    plain, guarded = session_with(CONFIG), session_with(CONFIG.override({"guard.bound": 1e9}))
    assert same(generate(plain, jumps=jumps), generate(guarded, jumps=jumps))
    assert early(guarded.report) == {}
    assert not any(record.guard_errors for record in plain.report.steps)
    assert plain.report.guard_summary() is None


def test_a_second_generation_measures_and_refreshes_the_same():
    session = session_with(GUARDED)
    jumps = {(BAD_LAYER, "cond"), (2, "uncond")}
    runs = []
    for generation in (1, 2):
        outputs = generate(session, generation=generation, jumps=jumps)
        errors = [
            {layer: float(error) for layer, error in record.guard_errors.items()}
            for record in session.report.steps
        ]
        runs.append((outputs, errors, early(session.report)))
    assert same(runs[0][0], runs[1][0])
    assert runs[0][1:] == runs[1][1:]


@pytest.mark.parametrize("forecast", [0.0, 0.5])
def test_an_early_refresh_with_caches_in_host_memory_gives_the_same_bits(forecast):
    jumps = {(0, "cond"), (BAD_LAYER, "cond"), (3, "uncond")}
    config = GUARDED.override({"attention.forecast": forecast})
    expected = generate(session_with(config), jumps=jumps)
    hosted = session_with(config.override(HOSTED), poison=True)
    assert same(generate(hosted, jumps=jumps), expected)
    assert len(early(hosted.report)) == 2


def test_no_copy_can_overtake_an_early_refresh():
    traces = []

    def traced(_device):
        traces.append(TracedCopies())
        return traces[-1]

    session = session_with(GUARDED.override(HOSTED), copies=traced)
    with WatchComputation(session._pool):
        generate(session, jumps={(0, "cond"), (BAD_LAYER, "cond"), (3, "uncond")})
    assert len(early(session.report)) == 2
    assert [trace.races for trace in traces] == [[]]


# What is told of it.


def test_the_summary_counts_and_names_the_worst():
    report = GenerationReport()
    records = [StepRecord(step, 9, "cond", Action.SPARSE) for step in (5, 6)]
    for record in records:
        report.begin(1, record)
    records[0].guard_errors.update({0: number(0.05), 3: number(0.25)})
    records[1].guard_errors[0] = number(0.125)
    records[1].early_refreshes.append(3)
    assert report.guard_summary() == (
        "1 early refreshes of attention (most often of layers 3) beside 3 sparse calls; largest "
        "error 0.250, in layer 3 at step 5"
    )


def number(value):
    return DeviceNumber(torch.tensor(value))


def test_a_number_is_read_once_and_stays():
    source = torch.tensor([0.5])
    found = DeviceNumber(source)
    assert float(found) == 0.5
    source.fill_(2)
    assert float(found) == 0.5
