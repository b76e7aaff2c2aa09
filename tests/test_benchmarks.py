"""The benchmark runner: its cases, its records and its table."""

import json

import pytest

from benchmarks.quality import cases
from benchmarks.records import table, write
from chipsparse.profiles import bundled_model, load_profile


def test_the_quality_table_has_every_row_and_control():
    profile = load_profile(bundled_model() / "chipsparse.yaml").sparsity
    rows = cases(profile)
    assert rows.pop("profile") == profile
    for rule in ("merge", "difference"):
        for parts in ("attention", "attention + MLP"):
            for keep in (0.05, 0.1, 0.2, 0.3):
                config = rows[f"{rule}, keep {keep:.0%}, {parts}"]
                assert config.attention.delta_rule == rule
                assert config.attention.keep_fraction == keep
                assert config.mlp.enabled == (parts != "attention")
    assert all(config.schedule.skip_steps == () for config in rows.values())
    assert len(set(map(repr, rows.values()))) >= len(rows) - 1  # the base may be one of the rows
    kept = [name for name in rows if name.startswith("control:")]
    assert len(kept) == 11


def test_records_are_written_whole_and_as_json(tmp_path):
    path = tmp_path / "results.json"
    write([{"case": "a", "psnr": float("inf"), "values": [1.5, float("inf")]}], path)
    assert json.loads(path.read_text()) == [{"case": "a", "psnr": None, "values": [1.5, None]}]
    with pytest.raises(TypeError):
        write([{"case": object()}], path)
    assert len(json.loads(path.read_text())) == 1
    assert [item.name for item in tmp_path.iterdir()] == ["results.json"]


def test_the_table_formats_and_leaves_gaps():
    text = table(
        [{"case": "a", "psnr": 31.26}, {"case": "b", "psnr": None}], {"case": "", "psnr": ".1f"}
    )
    assert text.splitlines()[2:] == ["| a | 31.3 |", "| b |  |"]
