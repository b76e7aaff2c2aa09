"""Records come back from a file as they were, but for the last digits of numbers."""

import json

import pytest

from benchmarks.records import DIGITS, read, write, write_compact


@pytest.mark.parametrize("values", [1, 2, len(DIGITS), len(DIGITS) + 1])
def test_compact_files_hold_what_was_written(tmp_path, values):
    records = [
        {"case": f"case {number % values}", "number": number / 7, "rare": [number // 40]}
        for number in range(3 * values)
    ]
    for record in records[::3]:
        del record["rare"]
    write_compact(records, tmp_path / "compact.json")
    found = read(tmp_path / "compact.json")
    for record in records:
        record["number"] = pytest.approx(record["number"], rel=1e-5)
    assert found == records
    of = json.loads((tmp_path / "compact.json").read_text())["case"]["of"]
    assert isinstance(of, str) == (values <= len(DIGITS))


def test_files_of_both_forms_are_read_one_behind_the_other(tmp_path):
    write_compact([{"a": 1}, {"b": "x"}], tmp_path / "compact.json")
    write([{"a": float("inf")}], tmp_path / "list.json")
    paths = [tmp_path / name for name in ("compact.json", "list.json", "missing.json")]
    assert read(*paths) == [{"a": 1}, {"b": "x"}, {"a": None}]
