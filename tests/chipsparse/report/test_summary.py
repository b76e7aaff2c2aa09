"""What a report keeps of sections and backends, and what it says in a few lines."""

import pytest

from chipsparse import GenerationReport, LayerRecord, SparsityConfig, StepRecord
from chipsparse.config import Action
from chipsparse.kernels.dispatch import Backend, Choice
from chipsparse.reasons.reason import fallback, note
from chipsparse.report.records import Device, PipelineFacts
from chipsparse.report.summary import estimated_speedup

SECONDS = {Action.DENSE: 4.0, Action.REFRESH: 5.0, Action.SPARSE: 1.0}


def record(step, action, branch="cond", scale=1):
    made = StepRecord(step, 8, branch, action, finished=True)
    if action is not Action.SKIP:
        made.timer = scale * SECONDS[action]
        kept = {"attention": 0.1, "mlp": 0.3}
        made.layers = [
            LayerRecord(layer, part, action, kept[part] if action is Action.SPARSE else 1.0)
            for layer in range(60)
            for part in kept
        ]
    return made


def test_the_summary():
    report = GenerationReport()
    assert report.summary() == "steps  none yet"
    report.pipeline = PipelineFacts("WanPipeline", None, {"transformer": "WanTransformer3DModel"})
    report.config = SparsityConfig()
    actions = "dense dense refresh sparse skip sparse sparse sparse"
    for step, action in enumerate(actions.split()):
        for branch in ("cond", "uncond"):
            report.begin(1, record(step, Action(action), branch))
    report.device = Device("cpu")
    report.dtype = "float32"
    report.cache_bytes = 3 << 30
    report.host_bytes = 1 << 30
    report.nothing_sparse = "nothing runs sparse: too few steps"
    report.add(fallback("of.a.test", "MLP runs dense in 1 of 60 layers: a <b>reason</b>"))
    report.add(note("of.a.test", "copies are slower"))
    report.fail(ValueError("a <tag>"))
    assert report.summary().splitlines() == [
        "pipeline  WanPipeline with WanTransformer3DModel on cpu in float32",
        "steps     8: 4 sparse, 2 dense, 1 refresh, 1 skip",
        # 16 calls of 4 s, in 2 x (4 + 4 + 5 + 1 + 0 + 1 + 1 + 1) s.
        "gain      1.88x as fast as dense, estimated from its fastest full call",
        "computed  10 % of the attention's columns and 30 % of the MLPs' neurons at sparse steps",
        "caches    3.00 GiB at most, 1.00 GiB of it in host memory",
        "warning   nothing runs sparse: too few steps",
        "dense     MLP runs dense in 1 of 60 layers: a <b>reason</b>",
        "note      copies are slower",
        "error     ValueError: a <tag>",
    ]
    html = report._repr_html_()
    assert html.count("<tr>") == 9
    assert "a &lt;b&gt;reason&lt;/b&gt;" in html
    assert "<b>" not in html


def test_sections_are_compared_with_full_calls_of_their_own():
    report = GenerationReport(in_call=True)
    for section, scale in ((1, 1), (2, 10)):
        for step, action in enumerate((Action.DENSE, Action.SKIP, Action.SPARSE)):
            report.begin(section, record(step, action, scale=scale))
    steps, gain, *_ = report.summary().splitlines()
    assert steps == "steps     6 in 2 sections: 2 dense, 2 skip, 2 sparse"
    assert gain.startswith("gain      2.40x")  # 3 calls of 4 s, in 5 s
    for action in (Action.DENSE, Action.SPARSE):  # nothing ran sparse, nothing in full
        report = GenerationReport()
        report.begin(1, record(0, action))
        assert estimated_speedup(report) is None


@pytest.mark.parametrize(("in_call", "kept"), [(True, [1, 2]), (False, [2])])
def test_sections_of_a_call_stay_together_and_other_generations_do_not(in_call, kept):
    report = GenerationReport()
    for generation in (1, 2):
        report.in_call = in_call
        for step, action in enumerate((Action.DENSE, Action.SKIP, Action.DENSE)):
            report.begin(generation, StepRecord(step, 3, "", action))
        report.add(note("of.a.test", f"of generation {generation}"))
    report.correct(range(1, 2))
    assert [record.generation for record in report.steps] == [n for n in kept for _ in range(3)]
    assert report.actions() == {"dense": 2 * len(kept), "skip": len(kept)}
    assert report.notes == [f"of generation {n}" for n in kept]
    assert [r.generation for r in report.steps if r.corrected] == [2]
    report.end_call(finished=True)
    report.begin(3, StepRecord(0, 3, "", Action.DENSE))
    assert (len(report.steps), report.notes) == (1, [])


def test_backends_of_all_layers_and_ops_with_the_same_reasons_in_one_line():
    def on(name, *rejected):
        return Choice(Backend(name, lambda: None), rejected)

    report = GenerationReport()
    slow = (("fast", "no GPU"), ("faster", "too old"))
    report.run_on({"a": on("plain", *slow), "b": on("plain")})
    report.run_on({"a": on("other", *slow), "c": on("plain", *slow), "d": on("plain", slow[0])})
    report.run_on({"a": on("plain", *slow)})
    assert report.backends == {"a": "plain, other", "b": "plain", "c": "plain", "d": "plain"}
    assert report.passed_over == {"a": dict(slow), "b": {}, "c": dict(slow), "d": dict(slow[:1])}
    assert report.backend_reasons() == [
        "a, c not on fast: no GPU; faster: too old",
        "d not on fast: no GPU",
    ]
