"""What a report tells of the backends that ran."""

from chipsparse.kernels.dispatch import Backend, Choice
from chipsparse.report.generation import GenerationReport

PLAIN = Backend("plain", lambda: None)


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
