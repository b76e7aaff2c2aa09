"""How numbers are shown."""

import json

import numpy as np
import pytest

from chipsparse.cli import generate_json, summary
from chipsparse.cli.denoise import Generation, StepResult


def told_json(outcome):
    return json.loads(generate_json.to_json([outcome], many=False))


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


@pytest.mark.parametrize(
    ("host_bytes", "text"),
    [(0, "caches 43.20 GiB"), (41 << 30, "caches 43.20 GiB (41.00 GiB in host memory)")],
)
def test_what_of_the_caches_was_in_host_memory(host_bytes, text):
    made = Generation(
        frames=np.zeros((1, 2, 2, 3), np.uint8),
        steps=[],
        denoising_seconds=1.0,
        total_seconds=1.0,
        peak_gpu_bytes=None,
        cache_bytes=round(43.2 * (1 << 30)),
        host_bytes=host_bytes,
        backends={},
        backend_reasons=[],
        fallbacks=[],
        notes=[],
    )
    outcome = summary.Outcome({}, {}, made, None, None, None)
    assert summary._memory(outcome, made) == text
    assert told_json(outcome)["sparse"]["host_bytes"] == host_bytes


@pytest.mark.parametrize("sentence", [None, "3 early refreshes of attention"])
def test_what_the_error_guard_did(sentence):
    made = Generation(
        np.zeros((1, 2, 2, 3), np.uint8), [], 1.0, 1.0, None, 0, 0, {}, [], [], [], guard=sentence
    )
    outcome = summary.Outcome({}, {}, made, None, None, None)
    told = [text for name, text in summary._internals(made) if name == "error guard"]
    assert told == ([] if sentence is None else [sentence])
    assert told_json(outcome)["sparse"]["guard"] == sentence


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"work_share": 0.435}, "about 44% of a dense run's operations (estimated"),
        ({"work_share": 1.0}, "none: nothing ran sparse"),
        ({"work_share": None}, "not known; --compare measures it"),
        ({"work_share": 0.9, "nothing_sparse": "why"}, "none: nothing ran sparse"),
    ],
)
def test_the_gain_without_a_dense_run(changes, text):
    made = Generation(
        np.zeros((1, 2, 2, 3), np.uint8), [], 1.0, 1.0, None, 0, 0, {}, [], [], [], **changes
    )
    assert summary._gain(summary.Outcome({}, {}, made, None, None, None), made).startswith(text)
    dense = summary.Outcome({}, {}, None, made, None, None)
    assert summary._gain(dense, made) == "none: the unpatched model ran"


def test_places_that_come_with_chipsparse(tmp_path):
    from chipsparse.cli.wording import bundled_name, counted, short_place
    from chipsparse.profiles import ASSETS

    assert bundled_name(str(ASSETS / "tiny-wan")) == "tiny-wan"
    assert bundled_name(str(ASSETS.resolve() / "tiny-wan")) == "tiny-wan"
    assert bundled_name("owner/name") is None
    assert short_place(str(tmp_path)) == str(tmp_path)
    assert [counted(n, "step") for n in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]
