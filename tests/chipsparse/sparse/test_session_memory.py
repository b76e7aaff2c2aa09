"""The caches of a session: the same results wherever they live, within the budgets, no leaks."""

from dataclasses import replace

import pytest
import torch

import chipsparse.sparse.cache.store
from chipsparse.config import Action
from chipsparse.skip.position import Place
from chipsparse.sparse.cache import memory_plan
from chipsparse.sparse.cache.memory_plan import cache_needs, working_bytes
from chipsparse.sparse.cache.placement import SLOTS, Capacity
from chipsparse.sparse.cache.tensors import PLACED, Kept
from chipsparse.sparse.plan import SparsityPlan
from tests.chipsparse.sparse import sessions
from tests.chipsparse.sparse.cache.races import PoisonedPool, TracedCopies, WatchComputation
from tests.chipsparse.sparse.sessions import (
    BOTH,
    HOSTED,
    TOTAL,
    equal,
    generate,
    layout_of,
    session_with,
)
from tests.variants import slow

ROUNDED = {"memory.cache_precision": "fp8"}
IN_FULL = {"memory.cache_precision": "model"}
DENSE_LAYERS = {
    "layers": [
        {"index": 0, "attention": "dense"},
        {"index": 1, "attention": 0.5, "mlp": 0.75},
        {"index": 2, "attention": 1.0, "mlp": "dense"},
    ],
}


@pytest.mark.parametrize(
    "overrides",
    [{}, slow({"attention.delta_rule": "difference"}), ROUNDED, DENSE_LAYERS],
    ids=["full", "difference", "rounded", "dense layers"],
)
def test_caches_in_host_memory_give_the_same_bits(overrides):
    """Also where a slot holds NaN as soon as nothing may read it."""
    here = session_with(overrides)
    hosted = session_with(overrides | HOSTED, PoisonedPool)
    expected = generate(here)
    assert equal(generate(hosted), expected)
    assert here.report.host_bytes == 0 < here.report.cache_bytes
    # All but one number per layer, the kept fraction.
    caches = [hosted._caches[key] for key in hosted._caches]
    assert all(cache.nbytes() <= 4 for cache in caches)
    assert hosted.report.cache_bytes - hosted.report.host_bytes <= 4 * len(caches)
    assert equal(generate(hosted, generation=2), expected)
    assert hosted.report.fallbacks == []


def test_caches_are_rounded_where_the_memory_wants_it_and_the_report_says_so(monkeypatch):
    expected = generate(session_with(ROUNDED))
    with_available(monkeypatch, lambda *_, **__: Capacity(wanted(ROUNDED), 0))
    session = session_with()
    assert equal(generate(session), expected)
    assert session.report.fallbacks == []
    (note,) = session.report.notes
    assert note.startswith("caches are in FP8,")
    in_full = session_with(IN_FULL)
    generate(in_full)
    assert in_full.report.fallbacks != []
    assert in_full.report.notes == []


@pytest.mark.parametrize("overrides", [slow({}), HOSTED], ids=["device", "host"])
def test_branches_of_other_prompts_run_side_by_side(overrides):
    """As with samples called one by one, or where a sample of a batch is guided again."""
    layouts = {
        "cond": replace(layout_of(batch=2), text_tokens=7),
        "uncond": layout_of(),
        "more": replace(layout_of(), text_tokens=0, samples=(1,)),
    }
    tile = {"tile": [1, 2, 2]}
    together = session_with(overrides | tile)
    outputs = {name: [] for name in layouts}
    for step in range(len(sessions.ACTIONS)):
        for branch, layout in layouts.items():
            context = Place(1, step, branch, TOTAL)
            outputs[branch] += sessions.step_of(together, context, layout)
    for branch, layout in layouts.items():
        alone = session_with(overrides | tile)
        assert equal(generate(alone, layout=layout, branches=[branch], known=1), outputs[branch])
        taken = [record.action for record in alone.report.steps]
        assert [r.action for r in together.report.steps if r.branch == branch] == taken
        assert taken.count(Action.SPARSE) == 4


def test_no_copy_can_overtake_a_layer():
    traces = []

    def traced(_device):
        traces.append(TracedCopies())
        return traces[-1]

    session = session_with(HOSTED, copies=traced)
    with WatchComputation(session._pool):
        generate(session)
        generate(session, generation=2, layout=layout_of(grid=(1, 5, 5)))
    assert [trace.races for trace in traces] == [[], []]
    assert all(len(trace.accesses) > 20 for trace in traces)


def test_each_sparse_call_brings_every_tensor_that_it_reads_once_and_before_it_is_due(monkeypatch):
    session = session_with(HOSTED)
    late = []
    pool = session._pool
    load = pool.load

    def watched(key, wanted):
        if session.state.action is Action.SPARSE:
            slots = [slot for slot in pool._opened.slots[key[2]] if slot.key == key]
            stored = {kept for kept in wanted if pool.has(key, kept)}
            late.extend([] if slots and stored <= slots[0].loaded else [key])
        return load(key, wanted)

    monkeypatch.setattr(pool, "load", watched)
    generate(session)
    assert late == []
    plan = SparsityPlan(session.config, layout_of(), len(sessions.ACTIONS))
    needs = cache_needs(plan, dtype=torch.float32)
    nbytes = sum(size for need in needs for kept, size in need.sizes.items() if kept != Kept.LSE)
    for record in session.report.steps:
        if record.action is Action.SPARSE:
            # Activations are planned with their rows padded to 8.
            assert 0.9 * nbytes < record.bytes_to_device <= nbytes
            assert record.bytes_to_host > 0  # the MLPs'
        elif record.action is Action.REFRESH:
            assert record.bytes_to_host > record.bytes_to_device > 0
        elif record.action is Action.SKIP:
            assert record.bytes_to_device == record.bytes_to_host == 0


def test_a_refresh_brings_log_sum_exps_and_the_columns_of_the_other_branch_once():
    session = session_with(HOSTED)
    generate(session, steps=2)
    plan = SparsityPlan(session.config, layout_of(), TOTAL)
    needs = cache_needs(plan, dtype=torch.float32)
    lse, columns = (
        sum(need.sizes.get(kept, 0) for need in needs) for kept in (Kept.LSE, Kept.COLUMNS)
    )
    first, second = (record for record in session.report.steps if record.action is Action.REFRESH)
    assert (first.branch, first.bytes_to_device) == ("cond", lse)
    assert (second.branch, second.bytes_to_device) == ("uncond", lse + columns)


def test_each_call_tells_what_the_caches_hold_behind_it():
    session = session_with(HOSTED)
    generate(session, steps=TOTAL)  # one more than the config names: the last action again
    records = session.report.steps
    held = [record.cache_bytes for record in records]
    hosted = [record.host_bytes for record in records]
    assert 0 < held[0] < held[1] < held[3]  # LSE of one branch, of both; a refresh adds
    assert (max(held), max(hosted)) == (session.report.cache_bytes, session.report.host_bytes)
    assert held[4:-2] == [held[3]] * len(held[4:-2])
    assert all(0 < host <= both for host, both in zip(hosted, held, strict=True))
    assert {record.allocated_bytes for record in records} == {None}  # not a CUDA device
    generate(session, generation=2, steps=1)
    assert session.report.steps[0].cache_bytes == held[0]


@pytest.mark.parametrize(
    ("batch", "overrides"),
    [(1, IN_FULL), (3, DENSE_LAYERS), (2, ROUNDED)],
    ids=["full", "dense layers", "fp8"],
)
def test_the_planned_bytes_are_the_bytes_that_are_kept(batch, overrides):
    session = session_with(overrides)
    seen = set()
    generate(session, layout=layout_of(batch=batch), branches=("cond",))
    placed = placement_of(session, "cond").device
    for branch, layer in session._caches:
        cache = session._caches[branch, layer]
        for kept in PLACED:
            tensor = getattr(getattr(cache, kept.part), kept.field)
            if tensor is not None:
                planned = placed[layer, kept.part][kept]
                padding = planned // 8 if kept is Kept.ACTIVATION else 0
                assert planned - padding <= tensor.nbytes <= planned, kept
                seen.add((layer, kept))
    assert seen == {(layer, kept) for (layer, _), sizes in placed.items() for kept in sizes}


def placement_of(session, branch):
    return session._caches._branches[branch].memory.placement


def with_available(monkeypatch, available):
    """Memory as told, on a machine on which everything is worth moving."""
    monkeypatch.setattr(chipsparse.sparse.cache.store, "available", available)
    monkeypatch.setattr(memory_plan, "worth_moving", lambda layer, sizes, **_: frozenset(sizes))


def wanted(overrides=(), layout=None, branches=2):
    config = sessions.CONFIG.override(dict(overrides))
    plan = SparsityPlan(config, layout or layout_of(), len(sessions.ACTIONS))
    return branches * sum(need.nbytes for need in cache_needs(plan, dtype=torch.float32))


@pytest.mark.parametrize("share", [0.65, 0.8, slow(0.9), slow(0.78), slow(0.96)])
def test_branches_of_other_sizes_are_rounded_alike_and_so_is_another_generation(share, monkeypatch):
    """Each plans for itself, as its text has another length, the second from what is left."""
    layouts = {"cond": layout_of(text_tokens=7), "uncond": layout_of()}
    free = share * wanted(layout=layouts["cond"])

    def available(*args, reserved, held, reserve=None, **kwargs):
        left = free - held
        return Capacity(int(left - left * (0.06 if reserve is None else reserve) - reserved), 0)

    with_available(monkeypatch, available)
    session = session_with()
    results = []
    for generation in (1, 2):
        outputs = []
        plans = {}
        for step in range(len(sessions.ACTIONS)):
            for branch, layout in layouts.items():
                context = Place(generation, step, branch, TOTAL)
                outputs += sessions.step_of(session, context, layout, BOTH)
                plans[branch] = session._caches._branches[branch].memory
        assert plans["cond"].in_fp8 == plans["uncond"].in_fp8
        results.append((outputs, plans))
        free *= 0.97  # half of the reserve is gone
    (first, planned), (second, again) = results
    assert again == planned
    assert equal(second, first)


def test_a_second_generation_with_less_memory_is_planned_anew(monkeypatch):
    """Not as the first one, whose caches would not fit."""
    free = wanted(IN_FULL)

    def available(*args, reserve=None, **kwargs):
        return Capacity(free, 0)

    with_available(monkeypatch, available)
    session = session_with(IN_FULL)
    generate(session)
    assert session.report.fallbacks == []
    free //= 2
    generate(session, generation=2)
    assert any("its caches do not fit" in line for line in session.report.fallbacks)
    assert 0 < session.report.cache_bytes <= free + 4 * len([*session._caches])


def test_a_later_branch_is_told_what_the_others_have_and_will_take(monkeypatch):
    """Nothing of one that is over; and there is room for a recorded call of each that is known."""
    config = sessions.CONFIG.override({"cuda_graphs": "always"})
    plan = SparsityPlan(config, layout_of(), len(sessions.ACTIONS))
    told = []

    def available(*args, working, reserved, held, **kwargs):
        told.append((working, reserved, held))
        return Capacity(1 << 40, 0)

    monkeypatch.setattr(chipsparse.sparse.cache.store, "available", available)
    session = session_with()
    shared = session_with()
    for branch in ("cond", "uncond", "third"):
        if branch == "third":
            session._caches.finish("cond")
            session._caches["uncond", 0].attention.lse = torch.zeros(25)
        session._caches.admit(branch, plan, torch.device("cuda"), BOTH)
    shared._caches.admit("cond", plan, torch.device("cuda"), replace(BOTH, captures=False))
    two, three, none = (working_bytes(plan, dtype=BOTH.dtype, captured=n) for n in (2, 3, 0))
    of_one = placement_of(session, "uncond").device_bytes
    assert told == [(two, 0, 0), (three, of_one - 100, 100), (none, 0, 0)]


@pytest.mark.parametrize("share", [slow(0.4), 0.7, 1.5])
@pytest.mark.parametrize("host_share", [0.0, 0.5, slow(3.0)])
def test_branches_that_nobody_announced_stay_within_the_budgets(share, host_share, monkeypatch):
    """The first has taken little of what it will take when the second one is planned."""
    device, host = (round(part * wanted(branches=1)) for part in (share, host_share))
    session = session_with()
    layout = layout_of()
    most = 0
    memory = session._pool.host

    def on_device():
        slots = SLOTS * sum(sum(sizes.values()) for sizes in session._pool.slots.values())
        return session.cache_bytes() - session._pool.stored_bytes + slots

    def available(*args, reserved, **kwargs):
        return Capacity(device - on_device() - reserved, host - memory.lent_bytes)

    with_available(monkeypatch, available)
    for step in range(5):
        for branch in ("cond", "uncond", "third"):
            sessions.step_of(session, Place(1, step, branch, TOTAL), layout)
            most = max(most, on_device())
            assert memory.lent_bytes <= host + 512 * 9 * 4
    kept_fractions = 4 * len([*session._caches])
    assert 0 < most <= device + kept_fractions
    said = [line for line in session.report.fallbacks if "its caches do not fit" in line]
    if share + host_share < 3:
        assert any(line.startswith("in branch third, ") for line in said)
    if share + host_share >= 1:
        assert all(line.startswith("in branch ") for line in said)
