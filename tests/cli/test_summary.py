"""How numbers are shown."""

import pytest

from chipsparse.cli import summary
from chipsparse.cli.denoise import StepResult


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0041, "4.1 ms"),
        (0.1, "0.10 s"),
        (59.5, "59.50 s"),
        (60, "1 min 0 s"),
        (119.7, "2 min 0 s"),
    ],
)
def test_seconds(seconds, text):
    assert summary.seconds_text(seconds) == text


def test_what_ran_dense_counts_as_computed_and_what_was_skipped_does_not():
    actions = [("dense", None), ("sparse", 0.2), ("skip", None), ("sparse", None)]
    steps = [StepResult(i, action, 1.0, kept, kept) for i, (action, kept) in enumerate(actions)]
    assert summary._row("all", steps) == ["all", "4", "1.00 s", "55.0%", "55.0%"]
