"""The results file: nothing measured twice, nothing lost, nothing mixed."""

import json

import pytest

from chipsparse.tuning.results_file import ResultsError, ResultsFile, ResultsWriteError

ABOUT = {"model": "tiny", "steps": 50, "size": [128, 128]}


def counted(values):
    """A measurement that gives the next of these values each time, and raises at the end."""
    return iter(values).__next__


def test_nothing_is_measured_twice_not_even_by_another_run(tmp_path):
    path = tmp_path / "results.json"
    results = ResultsFile(path, ABOUT)
    measure = counted([{"psnr": 30.5, "kept": [0.1, 0.2]}])
    assert results.measured("a", measure) == {"psnr": 30.5, "kept": [0.1, 0.2]}
    assert results.measured("a", measure) == {"psnr": 30.5, "kept": [0.1, 0.2]}
    again = ResultsFile(path, ABOUT)
    assert "a" in again
    assert again.measured("a", measure) == {"psnr": 30.5, "kept": [0.1, 0.2]}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_loses_only_what_was_being_measured(tmp_path, error):
    path = tmp_path / "results.json"
    results = ResultsFile(path, ABOUT)
    results.measured("first", lambda: 1)

    def interrupted():
        raise error

    with pytest.raises(error):
        results.measured("second", interrupted)
    again = ResultsFile(path, ABOUT)
    assert again.measured("first", interrupted) == 1
    assert "second" not in again
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    results = ResultsFile(path, ABOUT)
    results.measured("first", lambda: 1)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(
        ResultsWriteError, match=r"results\.json could not be written: disk full; w"
    ):
        results.measured("second", lambda: 2)
    assert path.read_bytes() == before
    assert "second" not in results
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_about_something_else_is_refused_with_both_values(tmp_path):
    path = tmp_path / "results.json"
    ResultsFile(path, ABOUT).measured("a", lambda: 1)
    before = path.read_bytes()
    with pytest.raises(ResultsError, match=r"measured with steps 50, not 30; name another"):
        ResultsFile(path, {**ABOUT, "steps": 30})
    with pytest.raises(ResultsError, match=r"measured with dtype null, not float32"):
        ResultsFile(path, {**ABOUT, "dtype": "float32"})
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not JSON", "it is no JSON"),
        ("[1]", "format is None"),
        (json.dumps({"format": 0, "about": ABOUT, "measured": {}}), "format is 0, not 2"),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ResultsError, match=message):
        ResultsFile(path, ABOUT)


def test_numbers_that_are_not_finite_are_not_kept(tmp_path):
    results = ResultsFile(tmp_path / "results.json", ABOUT)
    with pytest.raises(ValueError, match="not JSON compliant"):
        results.measured("a", lambda: float("nan"))
    assert "a" not in results


def test_searches_stand_beside_the_measurements(tmp_path):
    path = tmp_path / "results.json"
    results = ResultsFile(path, ABOUT)
    results.keep_search("30 dB", {"chosen": None})
    results.measured("first", lambda: 1)
    results.keep_search("40 dB", {"chosen": "b"})
    again = ResultsFile(path, ABOUT)
    again.keep_search("30 dB", {"chosen": "a"})
    content = json.loads(path.read_text())
    assert content["measured"] == {"first": 1}
    assert list(content["searches"].items()) == [
        ("40 dB", {"chosen": "b"}),
        ("30 dB", {"chosen": "a"}),
    ]
    assert again.search("30 dB") == {"chosen": "a"}
    assert again.search("20 dB") is None
    with pytest.raises(ValueError, match="JSON compliant"):
        again.keep_search("20 dB", {"psnr_db": float("inf")})
    assert json.loads(path.read_text()) == content
