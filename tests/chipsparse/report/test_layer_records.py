"""What a report says of each layer: actions, shares, backends, bytes and times."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import chipsparse
from chipsparse.config import PARTS, Action
from chipsparse.reasons.reason import note
from chipsparse.report.generation import GenerationReport
from chipsparse.report.records import StepTimer
from chipsparse.skip.position import Place
from chipsparse.sparse.cache.placement import Placement
from chipsparse.sparse.cache.tensors import Kept
from chipsparse.sparse.cost_model.layer_times import Rates
from tests.chipsparse.sparse import sessions
from tests.chipsparse.sparse.sessions import (
    ACTIONS,
    HOSTED,
    Session,
    generate,
    layout_of,
    session_with,
    step_of,
)

LAYOUT = layout_of()
OF_ONE = {"index": 2, "attention": 0.5, "mlp": 0.75}
BUDGETS = {"layers": [{"index": 0, "attention": "dense"}, OF_ONE]}


def test_every_layer_of_every_call_is_recorded():
    session = session_with(BUDGETS)
    generate(session)
    records = session.report.steps
    backends = set()
    assert [(r.step, r.branch) for r in records] == [
        (step, branch) for step in range(len(ACTIONS)) for branch in ("cond", "uncond")
    ]
    for record in records:
        assert (record.finished, record.transformer) == (True, "transformer")
        places = [] if record.action is Action.SKIP else [(n, p) for n in range(4) for p in PARTS]
        assert [(entry.layer, entry.part) for entry in record.layers] == places
        for entry in record.layers:
            first = (entry.layer, entry.part) == (0, "attention")
            assert entry.action is (Action.DENSE if first else record.action)
            assert entry.reason == ("layers names it dense" if first else None)
            assert entry.timer is None
            assert entry.action is Action.SPARSE or entry.kept == 1.0
            action = "left" if first else record.action.value
            backends.add((action, entry.part, entry.backend))
    assert backends == {
        ("left", "attention", "model"),
        ("dense", "attention", "library"),
        ("dense", "mlp", "library"),
        ("refresh", "attention", "reference"),
        ("refresh", "attention", "library"),  # of the branch that keeps what the other one chose
        ("refresh", "mlp", "library"),
        ("sparse", "attention", "reference"),
        ("sparse", "mlp", "reference"),
    }
    kept = [[x.kept for x in records[4].layers if x.part == part] for part in PARTS]
    assert kept[0] == pytest.approx([1.0, 13 / 63, 32 / 63, 13 / 63])
    assert kept[1] == pytest.approx([7 / 24, 7 / 24, 0.75, 0.3])
    assert records[4].attention_kept == pytest.approx((13 + 32 + 13) / 3 / 63)


def test_bytes_of_each_layer_are_those_of_the_plan():
    session = session_with(BUDGETS | HOSTED)
    generate(session)
    held = {
        (layer, part): {kept: form.nbytes for kept, form in home.forms.items()}
        for (_, layer, part), home in session._pool._opened.homes.items()
    }
    placement = Placement(host=held)  # as planned, without the room left for padding
    taken = set()
    for record in session.report.steps:
        for entry in record.layers:
            expected = placement.moved(session.config, entry.layer, entry.part, record.action)
            if (entry.part, entry.action, record.branch) == ("attention", Action.REFRESH, "uncond"):
                # Columns that the other branch chose.
                columns = held[entry.layer, "attention"][Kept.COLUMNS]
                expected = expected[0] + columns, expected[1]
            assert (entry.bytes_to_device, entry.bytes_to_host) == expected
            taken.add(record.action)
        assert record.bytes_to_device == sum(entry.bytes_to_device for entry in record.layers)
        assert record.bytes_to_host == sum(entry.bytes_to_host for entry in record.layers)
    assert taken == {Action.DENSE, Action.REFRESH, Action.SPARSE}


def test_times_are_parts_of_the_steps_time_and_reading_them_changes_nothing():
    plain = session_with(BUDGETS | HOSTED)
    watched = session_with(BUDGETS | HOSTED)
    watched.report.layer_times = True
    for step in range(len(ACTIONS)):
        context = Place(1, step, "cond", sessions.TOTAL)
        expected, outputs = (step_of(session, context, LAYOUT) for session in (plain, watched))
        assert all(map(torch.equal, outputs, expected))
        watched.report.to_dict()
    for record in watched.report.steps:
        times = [entry.seconds for entry in record.layers]
        assert all(time > 0 for time in times)
        assert sum(times) <= record.seconds
    totals = watched.report.to_dict()["totals"]
    assert 0 < totals["attention_seconds"] + totals["mlp_seconds"] <= totals["seconds"]
    assert totals["bytes_to_host"] > 0
    assert plain.report.to_dict()["totals"]["attention_seconds"] is None


def test_device_times_wait_only_when_they_are_read(monkeypatch):
    log = []
    event = SimpleNamespace(
        record=lambda _stream: log.append("record"),
        synchronize=lambda: log.append("wait"),
        elapsed_time=lambda _other: 250.0,
    )
    monkeypatch.setattr("torch.cuda.Event", lambda **_: event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda _: None)
    timer = StepTimer(torch.device("cuda"))
    assert timer.seconds() is None
    timer.stop()
    assert log == ["record", "record"]
    assert timer.seconds() == timer.seconds() == 0.25
    assert log == ["record", "record", "wait"]


def test_to_dict():
    empty = GenerationReport().to_dict()
    assert json.loads(json.dumps(empty)) == empty
    assert (empty["steps"], empty["transformers"], empty["device"]) == ([], {}, None)
    session = session_with(BUDGETS)
    generate(session, layout=layout_of(grid=(2, 4, 5)))
    session.report.add(note("of.a.test", "something"))
    data = session.report.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["versions"]["chipsparse"] == chipsparse.__version__
    assert (data["device"]["type"], data["dtype"]) == ("cpu", "float32")
    assert data["notes"] == ["something"]
    assert data["config"]["layers"][1] == {"index": "2", "attention": 0.5, "mlp": 0.75}
    assert chipsparse.SparsityConfig(**data["config"]) == session.config
    (plan,) = data["transformers"].values()
    assert (plan["actions"], plan["layout"]["tokens"]) == ([*ACTIONS, "sparse"], 43)
    assert plan["layout"]["kinds"][1]["intermediate_size"] == 40
    step = data["steps"][4]
    assert (step["step"], step["branch"], step["action"]) == (2, "cond", "sparse")
    names = "layer part action reason kept backend seconds bytes_to_device bytes_to_host"
    assert set(step["layers"][1]) == set(names.split())
    totals = data["totals"]
    assert totals["steps"] == {"dense": 2, "refresh": 2, "sparse": 4, "skip": 1}
    assert totals["calls"] == len(data["steps"]) == 18
    assert totals["seconds"] == pytest.approx(sum(totals["seconds_by_action"].values()))
    assert totals["seconds_by_action"]["skip"] == 0
    assert data["cache_bytes"] == session.report.cache_bytes


def first_layers(count):
    """The layout of the first layers alone, as where a block cache passes over the others."""
    double, single = LAYOUT.kinds
    kinds = replace(double, layers=min(count, 2)), replace(single, layers=max(0, count - 2))
    return replace(LAYOUT, kinds=kinds)


@pytest.mark.parametrize("passed_over_at", [1, 7])
def test_a_layer_that_was_passed_over_at_the_last_refresh_is_a_fallback(passed_over_at):
    session = session_with()
    for step in range(passed_over_at + 2):
        context = Place(1, step, "cond", sessions.TOTAL)
        if session.begin(context, LAYOUT, sessions.CPU).action is Action.SKIP:
            session.end(session.skipped_output())
            continue
        assert session.report.fallbacks == []
        sessions.call(session, context, first_layers(3) if step == passed_over_at else LAYOUT)
        session.end(torch.zeros(1))
    assert session.report.fallbacks == [
        f"{part} runs in full at sparse steps where a layer had recorded nothing since "
        f"the last refresh (first: layer 3, step {passed_over_at + 1})"
        for part in ("attention", "MLP")
    ]
    actions = [entry.action.value for entry in session.report.steps[-1].layers]
    assert actions == ["sparse"] * 6 + ["refresh"] * 2


def test_what_would_be_slower_sparse_runs_dense_with_a_note_and_without_caches(monkeypatch):
    """In a strict run, too: it is what the user wants."""
    whole = session_with()
    generate(whole)
    slower = {(layer, "mlp"): "a sparse step of it is slow" for layer in (1, 2)}
    monkeypatch.setattr("chipsparse.sparse.session.slower_parts", lambda *_: slower)
    monkeypatch.setattr("chipsparse.sparse.session.known_rates", lambda *_: Rates())
    session = Session(sessions.CONFIG, GenerationReport(strict=True))
    generate(session)
    for record in session.report.steps:
        for entry in record.layers:
            named = (entry.layer, entry.part) in slower
            assert entry.action is (Action.DENSE if named else record.action)
            assert entry.reason == ("a sparse step of it is slow" if named else None)
    assert session.report.fallbacks == []
    note = "MLP runs dense in 2 of 4 layers (first: layer 1): a sparse step of it is slow"
    assert session.report.notes == [note]
    assert session.report.cache_bytes < whole.report.cache_bytes


def test_a_strict_run_says_nothing_of_what_a_block_cache_passed_over():
    session = session_with({"layers": [{"index": 2, "attention": "dense"}]})
    session.report.strict = True
    generate(session, steps=2, branches=("cond",))
    session.begin(Place(1, 2, "cond", sessions.TOTAL), LAYOUT, sessions.CPU)
    sessions.call(session, session.state.place, first_layers(1))
    session.end(torch.zeros(1))
    assert len(session.report.steps[-1].layers) == 2
