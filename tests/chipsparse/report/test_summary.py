"""What a report says in a few lines, as text and as a table."""

import pytest
import torch

from chipsparse import GenerationReport, LayerRecord, SparsityConfig, StepRecord
from chipsparse.plan import Action
from chipsparse.report.generation import PipelineFacts, StepTimer
from chipsparse.report.summary import estimated_speedup

SECONDS = {Action.DENSE: 4.0, Action.REFRESH: 5.0, Action.SPARSE: 1.0}


def record(step, action, branch="cond", scale=1):
    ticks = iter([0.0, scale * SECONDS.get(action, 0.0)])
    made = StepRecord(step, 8, branch, action, finished=True)
    if action is not Action.SKIP:
        made.timer = StepTimer(torch.device("cpu"), lambda: next(ticks))
        made.timer.stop()
        kept = {"attention": 0.1, "mlp": 0.3}
        made.layers = [
            LayerRecord(layer, part, action, kept[part] if action is Action.SPARSE else 1.0)
            for layer in range(60)
            for part in kept
        ]
    return made


@pytest.fixture
def report():
    made = GenerationReport(
        pipeline=PipelineFacts("WanPipeline", "folder", {"transformer": "WanTransformer3DModel"}),
        config=SparsityConfig(),
    )
    actions = "dense dense refresh sparse skip sparse sparse sparse".split()  # noqa: SIM905
    for step, action in enumerate(actions):
        for branch in ("cond", "uncond"):
            made.begin(1, record(step, Action(action), branch))
    made.device, made.dtype = torch.device("cpu"), torch.float32
    made.cache_bytes, made.host_bytes = 3 << 30, 1 << 30
    return made


def test_the_summary(report):
    report.fall_back("MLP runs dense in 1 of 60 layers: a <b>reason</b>")
    report.note("copies are slower")
    assert report.summary().splitlines() == [
        "pipeline  WanPipeline with WanTransformer3DModel on cpu in float32",
        "steps     8: 4 sparse, 2 dense, 1 refresh, 1 skip",
        # 16 calls of 4 s, in 2 x (4 + 4 + 5 + 1 + 0 + 1 + 1 + 1) s.
        "gain      1.88x as fast as dense, estimated from its fastest full call",
        "computed  10 % of the attention's columns and 30 % of the MLPs' neurons at sparse steps",
        "caches    3.00 GiB at most, 1.00 GiB of it in host memory",
        "dense     MLP runs dense in 1 of 60 layers: a <b>reason</b>",
        "note      copies are slower",
    ]
    html = report._repr_html_()
    assert html.count("<tr>") == 7
    assert "a &lt;b&gt;reason&lt;/b&gt;" in html
    assert "<b>" not in html


def test_a_report_of_nothing_yet():
    report = GenerationReport()
    assert report.summary() == "steps  none yet"
    assert repr(report) == "<GenerationReport: no steps; 0 fallbacks>"


def test_what_ended_a_generation_and_why_nothing_was_sparse(report):
    report.nothing_sparse = "nothing runs sparse: too few steps"
    report.fail(ValueError("a <tag>"))
    lines = report.summary().splitlines()
    assert lines[-2:] == [
        "warning   nothing runs sparse: too few steps",
        "error     ValueError: a <tag>",
    ]
    assert "a &lt;tag&gt;" in report._repr_html_()


def test_sections_are_counted_and_compared_with_full_calls_of_their_own():
    report = GenerationReport(in_call=True)
    for section, scale in ((1, 1), (2, 10)):
        for step, action in enumerate((Action.DENSE, Action.SKIP, Action.SPARSE)):
            report.begin(section, record(step, action, scale=scale))
    steps, gain, *_ = report.summary().splitlines()
    assert steps == "steps     6 in 2 sections: 2 dense, 2 skip, 2 sparse"
    assert gain.startswith("gain      2.40x")  # 3 calls of 4 s, in 5 s


def test_no_gain_is_estimated_where_nothing_ran_in_full_or_nothing_sparse():
    for action in (Action.DENSE, Action.SPARSE):
        report = GenerationReport()
        report.begin(1, record(0, action))
        assert estimated_speedup(report) is None


def test_the_repr_of_a_report_and_of_its_steps_is_short(report):
    assert repr(report) == ("<GenerationReport: 4 sparse, 2 dense, 1 refresh, 1 skip; 0 fallbacks>")
    assert len(repr(report.steps[0])) < 800
