"""What a report keeps of a call with several generations, and of the backends that ran."""

import pytest

from chipsparse.kernels.dispatch import Backend, Choice
from chipsparse.plan import Action
from chipsparse.report.generation import GenerationReport, StepRecord

PLAIN = Backend("plain", lambda: None)


@pytest.mark.parametrize(("in_call", "kept"), [(True, [1, 2]), (False, [2])])
def test_sections_of_a_call_stay_together_and_other_generations_do_not(in_call, kept):
    report = GenerationReport()
    for generation in (1, 2):
        report.in_call = in_call
        for step, action in enumerate((Action.DENSE, Action.SKIP, Action.DENSE)):
            report.begin(generation, StepRecord(step, 3, "", action))
        report.note(f"of generation {generation}")
    report.correct(range(1, 2))
    assert [record.generation for record in report.steps] == [n for n in kept for _ in range(3)]
    assert report.actions() == {"dense": 2 * len(kept), "skip": len(kept)}
    assert report.notes == [f"of generation {n}" for n in kept]
    assert [r.generation for r in report.steps if r.corrected] == [2]
    report.end_call(finished=True)
    report.begin(3, StepRecord(0, 3, "", Action.DENSE))
    assert (len(report.steps), report.notes) == (1, [])


def test_ops_with_the_same_reasons_share_a_line():
    report = GenerationReport()
    slow = (("fast", "no GPU"), ("faster", "too old"))
    report.run_on({"a": Choice(PLAIN, slow), "b": Choice(PLAIN, ())})
    report.run_on({"c": Choice(PLAIN, slow), "d": Choice(PLAIN, slow[:1])})
    assert report.backends == dict.fromkeys("abcd", "plain")
    assert report.passed_over == {
        "a": {"fast": "no GPU", "faster": "too old"},
        "b": {},
        "c": {"fast": "no GPU", "faster": "too old"},
        "d": {"fast": "no GPU"},
    }
    assert report.backend_reasons() == [
        "a, c not on fast: no GPU; faster: too old",
        "d not on fast: no GPU",
    ]
