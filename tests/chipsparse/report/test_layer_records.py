"""What a report says of each layer: actions, shares, backends, bytes and times."""

import json
from dataclasses import dataclass, replace

import pytest
import torch

import chipsparse
from chipsparse import FallbackError
from chipsparse.cache import memory_plan
from chipsparse.cache.host_memory import HostMemory
from chipsparse.cache.kinds import PARTS
from chipsparse.cache.memory_plan import Capacity
from chipsparse.cache.placement import Placement
from chipsparse.cost_model.layer_times import Rates
from chipsparse.kernels.dispatch import Backend, Choice
from chipsparse.plan import Action
from chipsparse.report.generation import GenerationReport, StepTimer
from chipsparse.session import Session
from chipsparse.step import StepContext
from tests.chipsparse.attend import attend
from tests.chipsparse.test_session_memory import (
    ACTIONS,
    CONFIG,
    HOSTED,
    TOTAL,
    call,
    equal,
    generate,
    layout_of,
    session_with,
)

CPU = torch.device("cpu")
LAYOUT = layout_of()
WIDTHS = [24, 24, 40, 40]
BUDGETS = {
    "layers": [
        {"layers": 0, "attention": "dense"},
        {"layers": 2, "attention": 0.5, "mlp": 0.75},
    ]
}


def test_every_layer_of_every_call_is_recorded():
    session = session_with(BUDGETS)
    generate(session)
    records = session.report.steps
    assert [(r.step, r.branch) for r in records] == [
        (step, branch) for step in range(len(ACTIONS)) for branch in ("cond", "uncond")
    ]
    for record in records:
        assert record.finished
        assert record.transformer == "transformer"
        if record.action is Action.SKIP:
            assert record.layers == []
            continue
        found = [(entry.layer, entry.part) for entry in record.layers]
        assert found == [(layer, part) for layer in range(4) for part in PARTS]
        for entry in record.layers:
            first = (entry.layer, entry.part) == (0, "attention")
            assert entry.action is (Action.DENSE if first else record.action)
            assert entry.reason == ("layers names it dense" if first else None)
            assert entry.timer is None
            if entry.action is not Action.SPARSE:
                assert entry.kept == 1.0
    sparse = records[4].layers
    assert [entry.kept for entry in sparse if entry.part == "attention"] == pytest.approx(
        [1.0, 13 / 63, 32 / 63, 13 / 63]
    )
    assert [entry.kept for entry in sparse if entry.part == "mlp"] == pytest.approx(
        [round(0.3 * 24) / 24, round(0.3 * 24) / 24, 0.75, 0.3]
    )
    assert records[4].attention_kept == pytest.approx((13 + 32 + 13) / 3 / 63)


def test_backends_of_each_layer():
    session = session_with(BUDGETS)
    generate(session)
    backends = {
        (record.action.value, entry.part, entry.backend)
        for record in session.report.steps
        for entry in record.layers
        if entry.reason is None
    }
    assert backends == {
        ("dense", "attention", "library"),
        ("dense", "mlp", "library"),
        ("refresh", "attention", "reference"),
        ("refresh", "attention", "library"),  # of the branch that keeps what the other one chose
        ("refresh", "mlp", "library"),
        ("sparse", "attention", "reference"),
        ("sparse", "mlp", "reference"),
    }
    assert session.report.steps[0].layers[0].backend == "model"
    assert session.report.backends["sparse_mlp_up"] == "reference"


def test_bytes_of_each_layer_are_those_of_the_plan():
    session = session_with(BUDGETS | HOSTED)
    generate(session)
    places = session._pool._opened.places.items()
    held = {(layer, kind): place.form.nbytes for (_, layer, kind), place in places}
    placement = Placement(host=held)  # as planned, without the room left for padding
    taken = set()
    for record in session.report.steps:
        for entry in record.layers:
            expected = placement.moved(session.config, entry.layer, entry.part, record.action)
            if (entry.part, entry.action, record.branch) == ("attention", Action.REFRESH, "uncond"):
                columns = held.get((entry.layer, "columns"), 0)  # which the other branch chose
                expected = expected[0] + columns, expected[1]
            assert (entry.bytes_to_device, entry.bytes_to_host) == expected
            taken.add(record.action)
        assert record.bytes_to_device == sum(entry.bytes_to_device for entry in record.layers)
        assert record.bytes_to_host == sum(entry.bytes_to_host for entry in record.layers)
    assert taken == {Action.DENSE, Action.REFRESH, Action.SPARSE}
    assert session.report.to_dict()["totals"]["bytes_to_host"] > 0


# Times.


def test_layer_times_are_parts_of_the_steps_time():
    session = session_with(BUDGETS)
    session.report.layer_times = True
    generate(session)
    for record in session.report.steps:
        times = [entry.seconds for entry in record.layers]
        assert all(time > 0 for time in times)
        assert sum(times) <= record.seconds
    totals = session.report.to_dict()["totals"]
    both = totals["attention_seconds"] + totals["mlp_seconds"]
    assert 0 < both <= totals["seconds"]


def test_neither_times_nor_reading_change_the_results():
    plain, watched = session_with(BUDGETS | HOSTED), session_with(BUDGETS | HOSTED)
    watched.report.layer_times = True
    expected, found = [], []
    for step in range(len(ACTIONS)):
        for session, outputs in ((plain, expected), (watched, found)):
            context = StepContext(1, step, "cond", TOTAL)
            if session.begin(context, LAYOUT, CPU).action is Action.SKIP:
                session.end(session.skipped_output())
                continue
            outputs += call(session, context, LAYOUT)
            session.end(outputs[-1])
        watched.report.to_dict()
    assert equal(found, expected)
    assert plain.report.to_dict()["totals"]["attention_seconds"] is None


@dataclass
class FakeEvent:
    """Counts what happens to the events of a device that is not here."""

    log: list

    def record(self, stream):
        self.log.append("record")

    def synchronize(self):
        self.log.append("wait")

    def elapsed_time(self, other):
        return 250.0


def test_device_times_wait_only_when_they_are_read(monkeypatch):
    log = []
    monkeypatch.setattr("torch.cuda.Event", lambda **_: FakeEvent(log))
    monkeypatch.setattr("torch.cuda.current_stream", lambda _: None)
    timer = StepTimer(torch.device("cuda"), lambda: 0.0)
    assert timer.seconds() is None
    timer.stop()
    assert log == ["record", "record"]
    assert timer.seconds() == timer.seconds() == 0.25
    assert log == ["record", "record", "wait"]


# Broken off.


def test_a_call_that_broke_off_is_reported_as_far_as_it_came(monkeypatch):
    def breaks(*_, **__):
        raise RuntimeError("no more\nof this")

    session = session_with(HOSTED)
    session.report.layer_times = True
    generate(session, steps=2)
    session.begin(StepContext(1, 2, "cond", TOTAL), LAYOUT, CPU)
    with monkeypatch.context() as patched:
        patched.setattr("chipsparse.layers.mlp.sparse_step", breaks)
        with pytest.raises(RuntimeError, match="no more") as error:
            call(session, session.state.context, LAYOUT)
    session.report.fail(error.value)
    session.reset()
    last = session.report.steps[-1]
    assert not last.finished
    assert [(entry.layer, entry.part) for entry in last.layers] == [(0, "attention"), (0, "mlp")]
    attention, mlp = last.layers
    assert attention.seconds > 0
    assert attention.bytes_to_device > 0
    assert mlp.seconds is None
    data = json.loads(json.dumps(session.report.to_dict(), allow_nan=False))
    assert data["steps"][-1]["finished"] is False
    assert data["steps"][-1]["seconds"] is None
    assert data["error"] == "RuntimeError: no more"
    assert [step["finished"] for step in data["steps"][:-1]] == [True] * 4
    generate(session, generation=2)
    assert session.report.error is None


# As JSON.


def test_to_dict_before_anything_ran():
    data = GenerationReport().to_dict()
    assert json.loads(json.dumps(data)) == data
    assert (data["steps"], data["transformers"], data["device"]) == ([], {}, None)


def test_to_dict():
    session = session_with(BUDGETS)
    generate(session, layout=layout_of(grid=(2, 4, 5)))
    session.report.note("something")
    data = session.report.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["versions"]["chipsparse"] == chipsparse.__version__
    assert data["versions"]["torch"] == torch.__version__
    assert data["device"]["type"] == "cpu"
    assert data["dtype"] == "float32"
    config = data["config"]
    assert config["layers"][1] == {"layers": "2", "attention": 0.5, "mlp": 0.75}
    assert chipsparse.SparsityConfig.from_mapping(config) == session.config
    (plan,) = data["transformers"].values()
    assert plan["actions"] == [*ACTIONS, "sparse"]
    assert plan["layout"]["tokens"] == 43
    assert plan["layout"]["kinds"][1]["intermediate_size"] == 40
    assert data["notes"] == ["something"]
    assert len(data["steps"]) == 2 * len(ACTIONS)
    step = data["steps"][4]
    assert (step["step"], step["branch"], step["action"]) == (2, "cond", "sparse")
    names = "layer part action reason kept backend seconds bytes_to_device bytes_to_host"
    assert set(step["layers"][1]) == set(names.split())
    totals = data["totals"]
    assert totals["steps"] == {"dense": 2, "refresh": 2, "sparse": 4, "skip": 1}
    assert totals["calls"] == 18
    assert totals["seconds"] == pytest.approx(sum(totals["seconds_by_action"].values()))
    assert totals["seconds_by_action"]["skip"] == 0
    assert totals["cache_bytes"] == session.report.cache_bytes


def test_layers_of_two_kinds_may_run_on_different_backends():
    def on(name):
        return {"op": Choice(Backend(name, lambda: None), (("x", "no"),))}

    report = GenerationReport()
    for name in ("triton", "gluon", "triton"):
        report.run_on(on(name))
    assert report.backends == {"op": "triton, gluon"}
    assert report.passed_over == {"op": {"x": "no"}}


# Strict.


def test_strict_raises_a_fallback_and_keeps_its_sentence():
    report = GenerationReport(strict=True)
    report.note("slower")
    with pytest.raises(FallbackError, match=r"^dense for a reason$"):
        report.fall_back("dense for a reason")
    assert (report.fallbacks, report.notes) == (["dense for a reason"], ["slower"])


def test_a_layer_that_had_recorded_nothing_is_a_fallback():
    session = session_with()
    generate(session, steps=2)
    del session._caches._branches["cond"].caches[3]
    assert session.report.fallbacks == []
    session.begin(StepContext(1, 2, "cond", TOTAL), LAYOUT, CPU)
    call(session, session.state.context, LAYOUT)
    assert session.report.fallbacks == [
        f"{part} runs in full at sparse steps where a layer had recorded nothing since "
        "the last refresh (first: layer 3, step 2)"
        for part in ("attention", "MLP")
    ]
    session.end(torch.zeros(1))
    actions = [entry.action.value for entry in session.report.steps[-1].layers]
    assert actions == ["sparse"] * 6 + ["dense", "refresh"]


def test_nan_that_keeps_more_columns_is_a_fallback_in_a_strict_run():
    session = session_with({"mlp.density": "dense"})
    session.report.strict = True
    generate(session, steps=1, branches=("cond",))
    session._caches["cond", 1].attention.lse[0, 0, 3] = torch.nan
    session.begin(StepContext(1, 1, "cond", TOTAL), LAYOUT, CPU)
    with pytest.raises(FallbackError, match="attention of layer 1 keeps up to 63 columns"):
        call(session, session.state.context, LAYOUT)


def test_what_would_be_slower_sparse_runs_dense_with_a_note_and_without_caches(monkeypatch):
    """In a strict run, too: it is what the user wants."""
    whole = session_with()
    generate(whole)
    slower = {(layer, "mlp"): "a sparse step of it is slow" for layer in (1, 2)}
    monkeypatch.setattr("chipsparse.session.slower_parts", lambda *_: slower)
    session = Session(CONFIG, GenerationReport(strict=True), rates_of=lambda *_: Rates())
    generate(session)
    for record in session.report.steps:
        for entry in record.layers:
            named = (entry.layer, entry.part) in slower
            assert entry.action is (Action.DENSE if named else record.action)
            assert entry.reason == ("a sparse step of it is slow" if named else None)
    assert session.report.fallbacks == []
    assert session.report.notes == [
        "MLP runs dense in 2 of 4 layers (first: layer 1): a sparse step of it is slow"
    ]
    assert session.report.cache_bytes < whole.report.cache_bytes


def test_a_budget_that_holds_not_all_ends_a_strict_run_in_its_first_call():
    session = session_with({"memory.ram": 60_000, "memory.offload": "always"})
    session.report.strict = True
    with pytest.raises(FallbackError, match="its caches do not fit into the memory budgets"):
        generate(session)
    (record,) = session.report.steps
    assert (record.step, record.layers) == (0, [])


def test_refused_host_memory_ends_a_strict_run_where_layers_run_dense(monkeypatch):
    def refuse(self, nbytes, **_):
        raise MemoryError("no more")

    monkeypatch.setattr(HostMemory, "acquire", refuse)
    capacity = Capacity(device=30_000, host=1 << 30)
    monkeypatch.setattr("chipsparse.cache.store.available", lambda *_, **__: capacity)
    monkeypatch.setattr(memory_plan, "worth_moving", lambda layer, sizes, **_: frozenset(sizes))
    session = session_with(HOSTED)
    session.report.strict = True
    with pytest.raises(FallbackError, match="its caches do not fit into the memory budgets"):
        generate(session)
    note, *_ = session.report.notes
    assert note.startswith("host memory for caches was refused (no more)")


def test_a_part_that_never_came_ends_a_strict_run_at_the_first_sparse_step():
    def attend_all(session, step):
        session.begin(StepContext(1, step, "cond", TOTAL), LAYOUT, CPU)
        query, key, value = torch.randn(3, 1, 2, LAYOUT.tokens, 8)
        for layer in range(4):
            attend(session, layer, query, key, value)
        session.end(query)

    strict, other = session_with(), session_with()
    strict.report.strict = True
    for step in range(2):
        attend_all(strict, step)
    with pytest.raises(
        FallbackError, match=r"^MLP of layer 0 was computed by the model itself at "
    ):
        attend_all(strict, 2)
    for step in range(4):
        attend_all(other, step)
    assert other.report.fallbacks == []


def test_a_strict_run_says_nothing_of_what_a_block_cache_passed_over():
    session = session_with()
    session.report.strict = True
    generate(session, steps=2, branches=("cond",))
    session.begin(StepContext(1, 2, "cond", TOTAL), LAYOUT, CPU)
    one = replace(LAYOUT, kinds=(replace(LAYOUT.kinds[0], layers=1),))
    call(session, session.state.context, one)  # the first block alone
    session.end(torch.zeros(1))
    assert len(session.report.steps[-1].layers) == 2
