"""A session whose caches live in host memory: the same results, within the budgets, no leaks."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import chipsparse.cache.store
from chipsparse import SparsityConfig
from chipsparse.cache import memory_plan
from chipsparse.cache.host_memory import HostMemory
from chipsparse.cache.kinds import KINDS, kept_kinds, kind_bytes
from chipsparse.cache.memory_plan import (
    BudgetError,
    Capacity,
    MemoryDemand,
    cache_needs,
    working_bytes,
)
from chipsparse.cache.offload import OffloadPool
from chipsparse.cache.placement import SLOTS
from chipsparse.kernels.token_layout import padded_rows
from chipsparse.layers import mlp
from chipsparse.layers.mlp_weights import MLPWeights
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.plan import Action, SparsityPlan
from chipsparse.report.generation import GenerationReport
from chipsparse.session import Session
from chipsparse.step import StepContext
from tests.chipsparse.cache.races import TracedCopies, WatchComputation
from tests.variants import slow

CPU = torch.device("cpu")
ACTIONS = ["dense", "refresh", "sparse", "sparse", "skip", "dense", "sparse", "refresh", "sparse"]
CONFIG = SparsityConfig().override(
    {
        "attention.density": 0.2,
        "attention.block_size_q": 16,
        "mlp.block_size": 16,
        "tile": None,
        "schedule.actions": ACTIONS,
    }
)
HOSTED = {"memory.offload": "always"}
TOTAL = len(ACTIONS) + 1  # after the last step nothing would be left to look at
BOTH = MemoryDemand(branches=2)
RULES = ["merge", "difference"]


def layout_of(layers=4, grid=(3, 4, 5), batch=1, text_tokens=3):
    kinds = (
        LayerKind("double", layers // 2, intermediate_size=24, mlp_sees_text=False),
        LayerKind("single", layers - layers // 2, intermediate_size=40),
    )
    return ModelLayout(
        kinds, heads=2, head_dim=8, batch=batch, grids=(grid,), text_tokens=text_tokens
    )


def weights_of(layer, width):
    generator = torch.Generator().manual_seed(layer)
    up, down = (torch.randn(*shape, generator=generator) for shape in ((width, 16), (16, width)))
    return MLPWeights(up, None, down, None, "gelu")


def dense_attention(query, key, value):
    return F.scaled_dot_product_attention(query, key, value)


def call(session, context, layout, action=None):
    """One transformer call; returns the outputs of its layers."""
    outputs = []
    for layer in range(layout.layers):
        generator = torch.Generator().manual_seed(10 * context.step + layer)
        shape = (layout.batch, 2, layout.tokens, 8)
        query, key, value = torch.randn(3, *shape, generator=generator)
        query += context.branch == "uncond"
        outputs.append(
            session.attention[layer](
                session.state,
                query,
                key,
                value,
                scale=None,
                unpatched=lambda q, k, v, _: dense_attention(q, k, v),
            )
        )
        hidden = torch.randn(layout.batch, layout.mlp_tokens(layer), 16, generator=generator)
        weights = weights_of(layer, layout.kind(layer).intermediate_size)
        outputs.append(session.mlp[layer](session.state, hidden, weights))
    return outputs


def generate(session, *, generation=1, layout=None, branches=("cond", "uncond"), known=2, steps=9):
    layout = layout or layout_of()
    outputs = []
    for step in range(steps):
        for branch in branches:
            context = StepContext(generation, step, branch, TOTAL)
            demand = MemoryDemand(branches=known)
            if session.begin(context, layout, CPU, lambda d=demand: d).action is Action.SKIP:
                session.end(session.skipped_output())
                continue
            outputs += call(session, context, layout)
            session.end(outputs[-1])
    return outputs


def session_with(overrides=(), *, memory=None, **options):
    """A session, and a pool with these options."""
    report = GenerationReport()
    pool = OffloadPool(memory or HostMemory(), report.fall_back, **options)
    return Session(CONFIG.override(dict(overrides)), report, pool)


@functools.cache
def on_the_device():
    """What a session gives whose caches live there."""
    return generate(session_with())


def equal(first, second):
    assert len(first) == len(second)
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


# The same results.


@pytest.mark.parametrize("rule", RULES)
def test_offloaded_caches_give_the_same_bits(rule):
    overrides = {"attention.delta_rule": rule}
    here, hosted = session_with(overrides), session_with(overrides | HOSTED)
    expected = generate(here)
    assert equal(generate(hosted), expected)
    assert here.report.host_bytes == 0
    assert here.report.cache_bytes > 0
    # All but one number per layer, the kept fraction.
    assert all(cache.nbytes() <= 4 for cache in hosted._caches.values())
    assert hosted.report.cache_bytes - hosted.report.host_bytes <= 4 * len(hosted._caches)
    assert hosted.report.fallbacks == []


def test_each_call_tells_what_the_caches_hold_behind_it():
    session = session_with(HOSTED)
    generate(session, steps=TOTAL)  # one more than the config names: the last action again
    records = session.report.steps
    held = [record.cache_bytes for record in records]
    hosted = [record.host_bytes for record in records]
    assert 0 < held[0] < held[1] < held[3]  # LSE of one branch, of both; a refresh adds
    assert max(held) == session.report.cache_bytes
    assert max(hosted) == session.report.host_bytes
    for record, before in zip(records[2:], records, strict=False):
        if record.action in (Action.SPARSE, Action.SKIP) and record.step < TOTAL - 1:
            assert record.cache_bytes == max(before.cache_bytes, records[3].cache_bytes)
    assert all(0 < host <= both for host, both in zip(hosted, held, strict=True))
    assert {record.allocated_bytes for record in records} == {None}  # not a CUDA device
    generate(session, generation=2, steps=1)
    assert session.report.steps[0].cache_bytes == held[0]


@pytest.mark.parametrize("overrides", [slow({}), HOSTED], ids=["device", "host"])
def test_branches_of_other_prompts_run_side_by_side(overrides):
    """As with samples called apart, or where a pipeline guides one sample of a batch again."""
    layouts = {
        "cond": replace(layout_of(batch=2), text_tokens=7),
        "uncond": layout_of(),
        "more": replace(layout_of(), text_tokens=0, samples=(1,)),
    }
    tile = {"tile": [1, 2, 2]}
    together, found = session_with(overrides | tile), {name: [] for name in layouts}
    for step in range(len(ACTIONS)):
        for branch, layout in layouts.items():
            context = StepContext(1, step, branch, TOTAL)
            if together.begin(context, layout, CPU).action is Action.SKIP:
                together.end(together.skipped_output())
                continue
            found[branch] += call(together, context, layout)
            together.end(found[branch][-1])
    for branch, layout in layouts.items():
        alone = session_with(overrides | tile)
        assert equal(generate(alone, layout=layout, branches=[branch], known=1), found[branch])
        taken = [record.action for record in alone.report.steps]
        assert [r.action for r in together.report.steps if r.branch == branch] == taken
        assert taken.count(Action.SPARSE) == 4


def test_a_branch_that_changes_its_sizes_starts_anew():
    session = session_with()
    for step, batch in enumerate([1, 1, 1, 2, 2, 2]):
        layout = layout_of(batch=batch)
        context = StepContext(1, step, "cond", TOTAL)
        if session.begin(context, layout, CPU).action is Action.SKIP:
            output = session.skipped_output()
            assert output.shape[0] == batch
            session.end(output)
        else:
            session.end(call(session, context, layout)[-1])
    actions = [record.action.value for record in session.report.steps]
    assert actions == ["dense", "refresh", "sparse", "dense", "skip", "dense"]
    assert session.plan.layout.batch == 2


def test_no_released_slot_is_used():
    assert equal(generate(session_with(HOSTED, poison=True)), on_the_device())


@pytest.mark.parametrize("rule", ["merge", slow("difference")])
def test_caches_in_fp8_give_the_same_bits_wherever_they_live(rule):
    overrides = {"attention.delta_rule": rule, "memory.cache_precision": "fp8"}
    here = session_with(overrides)
    expected = generate(here)
    hosted = session_with(overrides | HOSTED, poison=True)
    assert equal(generate(hosted), expected)
    assert equal(generate(hosted, generation=2), expected)
    full = session_with({"attention.delta_rule": rule})
    exact = generate(full)
    errors = [(a - b).norm() / b.norm() for a, b in zip(expected, exact, strict=True)]
    # Attention's outputs stand before the MLPs'; neither depend on the others here.
    assert 0 < max(errors[::2]) < 0.04
    assert 0 < max(errors[1::2]) < 0.04
    layout = layout_of()
    residual = layout.tokens * layout.channels * 4  # in float32 bytes
    less = layout.layers * (residual * 3 // 4 - layout.tokens * layout.heads * 4)
    for layer in range(layout.layers):
        rows, neurons = layout.mlp_tokens(layer), layout.kind(layer).intermediate_size
        # One byte for four, with what pads the tokens, and scales.
        less += (4 * rows - padded_rows(rows)) * neurons - rows * 4
    assert full.report.cache_bytes - here.report.cache_bytes == 2 * less


def test_caches_are_rounded_where_the_memory_wants_it_and_the_report_says_so(monkeypatch):
    rounded = {"memory.cache_precision": "fp8"}
    expected = generate(session_with(rounded))
    plan = SparsityPlan(CONFIG.override(rounded), layout_of(), len(ACTIONS))
    room = 2 * sum(need.nbytes for need in cache_needs(plan, dtype=torch.float32))
    assert room < wanted()
    with_capacity(monkeypatch, room)
    session = session_with()
    assert equal(generate(session), expected)
    assert equal(generate(session, generation=2), expected)
    assert session.report.fallbacks == []
    (note,) = session.report.notes
    assert note.startswith("caches are in FP8,")
    in_full = session_with({"memory.cache_precision": "full"})
    generate(in_full)
    assert in_full.report.fallbacks != []
    assert in_full.report.notes == []


@pytest.mark.parametrize(
    "overrides",
    [
        slow({"attention.delta_rule": "merge"}),
        {"attention.delta_rule": "difference"},
    ],
)
def test_no_copy_can_overtake_a_layer(overrides):
    traces = []

    def traced(_device):
        traces.append(TracedCopies())
        return traces[-1]

    session = session_with(HOSTED | overrides, copies=traced)
    with WatchComputation(session._pool):
        generate(session)
        generate(session, generation=2, layout=layout_of(grid=(1, 5, 5)))
    assert [trace.races for trace in traces] == [[], []]
    assert all(len(trace.accesses) > 20 for trace in traces)


def test_each_layer_is_fetched_once_and_before_it_is_due():
    """Each sparse call brings every tensor that it reads exactly once."""
    session = session_with(HOSTED)
    generate(session)
    layout = layout_of()
    plan = SparsityPlan(session.config, layout, len(ACTIONS))
    needs = cache_needs(plan, dtype=torch.float32)
    read = {kind for part in ("attention", "mlp") for kind in kept_kinds(plan.config, part)}
    read -= {"lse"}
    nbytes = sum(size for need in needs for kind, size in need.sizes.items() if kind in read)
    for record in session.report.steps:
        if record.action is Action.SPARSE:
            # Activations are planned with their rows padded to 8.
            assert 0.9 * nbytes < record.bytes_to_device <= nbytes
            assert record.bytes_to_host > 0  # the MLPs'
        elif record.action is Action.REFRESH:
            assert record.bytes_to_host > record.bytes_to_device > 0
        elif record.action is Action.SKIP:
            assert record.bytes_to_device == record.bytes_to_host == 0


@pytest.mark.parametrize(("batch", "precision"), [(1, "full"), (3, "full"), (2, "fp8")])
def test_the_planned_bytes_are_the_bytes_that_are_kept(batch, precision):
    precisions = {"memory.cache_precision": precision}
    session = session_with(precisions)
    layout = layout_of(batch=batch)
    generate(session, layout=layout)
    seen = set()
    for (_, layer), cache in ((key, session._caches[key]) for key in session._caches):
        for kind in KINDS.values():
            tensor = getattr(getattr(cache, kind.part), kind.name)
            if tensor is None:
                continue
            planned = kind_bytes(
                kind.name, layer, layout=layout, config=session.config, dtype=torch.float32
            )
            padding = planned // 8 if kind.name == "activation" else 0
            assert planned - padding <= tensor.nbytes <= planned, kind
            seen.add(kind.name)
    assert seen == kept_kinds(session.config, "attention") | kept_kinds(session.config, "mlp")


def test_the_slots_of_hunyuan_720p_are_as_small_as_the_design_says():
    """Two slots of masks and of residual caches, at 118,800 video and 256 text tokens."""
    layout = ModelLayout(
        (LayerKind("block", 60, 12_288),), 24, 128, 1, ((33, 45, 80),), text_tokens=256
    )
    assert layout.tokens == 119_056
    for rows, most in ((192, 452e6), (128, 678e6)):
        config = SparsityConfig().override({"attention.block_size_q": rows})
        options = {"layout": layout, "config": config, "dtype": torch.bfloat16}
        assert 2 * kind_bytes("columns", 0, **options) < most
        assert 2 * kind_bytes("residual", 0, **options) < 1.5e9


# Budgets.


def placement_of(session, branch):
    return session._caches._branches[branch].memory.placement


def with_capacity(monkeypatch, device, host=0):
    """So much memory, on a machine on which everything is worth moving."""
    monkeypatch.setattr(
        chipsparse.cache.store, "available", lambda *args, **kwargs: Capacity(device, host)
    )
    monkeypatch.setattr(memory_plan, "worth_moving", lambda layer, sizes, **_: frozenset(sizes))


def wanted(layout=None, branches=2):
    plan = SparsityPlan(CONFIG, layout or layout_of(), len(ACTIONS))
    return branches * sum(need.nbytes for need in cache_needs(plan, dtype=torch.float32))


def test_layers_that_fit_nowhere_run_dense_and_the_report_says_so(monkeypatch):
    with_capacity(monkeypatch, wanted() // 2)
    session = session_with()
    generate(session)
    fallbacks = session.report.fallbacks
    parts = [each.split(" runs dense in ")[0] for each in fallbacks]
    assert parts in (["attention", "MLP"], ["MLP"])
    assert all("its caches do not fit into the memory budgets" in each for each in fallbacks)
    assert 0 < session.report.cache_bytes <= wanted() // 2
    assert {record.action for record in session.report.steps} >= {Action.SPARSE}


def test_a_part_of_the_layers_in_host_memory(monkeypatch):
    expected = on_the_device()
    with_capacity(monkeypatch, wanted() // 2, wanted())
    session = session_with()
    assert equal(generate(session), expected)
    assert 0 < session.report.host_bytes < session.report.cache_bytes
    assert session.report.fallbacks == []


def test_a_second_generation_lives_where_the_first_one_did(monkeypatch):
    """Less is free then, but not less than the reserve that the first one left."""
    free = []

    def available(*args, reserve=0.2, **kwargs):
        return Capacity(round(free[-1] * (1 - reserve)), 0)

    monkeypatch.setattr(chipsparse.cache.store, "available", available)
    session, found = session_with(), []
    for generation, share in enumerate((0.5, 0.45, 0.25), 1):
        free.append(share * wanted())
        generate(session, generation=generation)
        found.append(placement_of(session, "cond"))
    assert found[1] == found[0]
    assert found[2].device_bytes < found[0].device_bytes


@pytest.mark.parametrize("share", [0.65, 0.8, 0.9, slow(0.78), slow(0.96)])
def test_branches_of_other_sizes_are_rounded_alike_and_so_is_a_second_generation(
    share, monkeypatch
):
    """Each plans for itself, as its text has another length, the second from what is left."""
    layouts = {"cond": layout_of(text_tokens=7), "uncond": layout_of()}
    monkeypatch.setattr(memory_plan, "worth_moving", lambda layer, sizes, **_: frozenset(sizes))
    free = share * wanted(layouts["cond"])

    def available(*args, promised, held, reserve=None, **kwargs):
        left = free - held
        return Capacity(int(left - left * (0.06 if reserve is None else reserve) - promised), 0)

    monkeypatch.setattr(chipsparse.cache.store, "available", available)
    session, found = session_with(), []
    for generation in (1, 2):
        outputs, plans = [], {}
        for step in range(9):
            for branch, layout in layouts.items():
                context = StepContext(generation, step, branch, TOTAL)
                action = session.begin(context, layout, CPU, lambda: BOTH).action
                if action is Action.SKIP:
                    session.end(session.skipped_output())
                    continue
                outputs += call(session, context, layout)
                session.end(outputs[-1])
                plans[branch] = session._caches._branches[branch].memory
        assert plans["cond"].in_fp8 == plans["uncond"].in_fp8
        found.append((outputs, plans))
        free *= 0.97  # half of the reserve is gone
    (first, planned), (second, again) = found
    assert again == planned
    assert equal(second, first)


def test_nothing_fits_is_refused_before_the_first_step_with_the_numbers(monkeypatch):
    with_capacity(monkeypatch, 100, 50)
    session = session_with()
    with pytest.raises(BudgetError, match=r"need .* KiB, .* 100 B on the device and 50 B of host"):
        session.begin(StepContext(1, 0, "cond", 9), layout_of(), CPU, lambda: BOTH)
    assert session.cache_bytes() == 0


def test_parts_that_cannot_run_sparse_need_no_room(monkeypatch):
    with_capacity(monkeypatch, wanted())
    session = session_with()
    dense = frozenset((layer, "attention") for layer in range(4))
    demand = MemoryDemand(branches=2, dense=dense)
    session.begin(StepContext(1, 0, "cond", 9), layout_of(), CPU, lambda: demand)
    kinds = {kind for _, kind in placement_of(session, "cond").device}
    assert kinds == kept_kinds(CONFIG, "mlp")


def test_a_branch_that_was_not_expected_takes_what_is_left(monkeypatch):
    expected = on_the_device()
    with_capacity(monkeypatch, wanted(branches=1) * 3 // 4, 2 * wanted())
    session = session_with({"memory.cache_precision": "full"})
    assert equal(generate(session, known=1), expected)
    assert placement_of(session, "cond") is not placement_of(session, "uncond")
    assert session.report.fallbacks == []


def on_a_machine(monkeypatch, session, device, host):
    """So much memory in all, what the session has taken already not included."""
    memory = session._pool.host

    def available(*args, promised, **kwargs):
        taken = session.cache_bytes() - session._pool.stored_bytes
        slots = SLOTS * sum(session._pool.slots.values())
        return Capacity(device - taken - slots - promised, host - memory.lent_bytes)

    monkeypatch.setattr(chipsparse.cache.store, "available", available)
    monkeypatch.setattr(memory_plan, "worth_moving", lambda layer, sizes, **_: frozenset(sizes))
    return memory


def test_there_is_room_for_a_recorded_call_of_each_branch(monkeypatch):
    """Also for those that nobody announced."""
    config = CONFIG.override({"cuda_graphs": "always"})
    plan, asked = SparsityPlan(config, layout_of(), len(ACTIONS)), []

    def available(*args, working, **kwargs):
        asked.append(working)
        return Capacity(1 << 40, 0)

    monkeypatch.setattr(chipsparse.cache.store, "available", available)
    session = session_with()
    for branch in ("cond", "uncond", "third"):
        session._caches.admit(branch, plan, torch.device("cuda"), BOTH)
    assert plan.captures_steps()
    for found, branches in zip((asked[0], asked[-1]), (2, 3), strict=True):
        assert found == working_bytes(plan, dtype=BOTH.dtype, captured=branches)
    # Processes that share a generation capture none.
    shared = session_with()
    shared._caches.admit("cond", plan, torch.device("cuda"), replace(BOTH, captures=False))
    assert asked[-1] == working_bytes(plan, dtype=BOTH.dtype)


def test_a_later_branch_is_told_what_the_others_have_and_will_take(monkeypatch):
    """Nothing of one that is over."""
    plan, told = SparsityPlan(CONFIG, layout_of(), len(ACTIONS)), []

    def available(*args, promised, held, **kwargs):
        told.append((promised, held))
        return Capacity(1 << 40, 0)

    monkeypatch.setattr(chipsparse.cache.store, "available", available)
    session = session_with()
    for branch in ("cond", "uncond", "third"):
        if branch == "third":
            session._caches.finish("cond")
            session._caches["uncond", 0].attention.lse = torch.zeros(25)
        session._caches.admit(branch, plan, CPU, BOTH)
    of_one = placement_of(session, "uncond").device_bytes
    assert told == [(0, 0), (of_one - 100, 100)]


@pytest.mark.parametrize("share", [slow(0.4), 0.7, slow(1.0), 1.5])
@pytest.mark.parametrize("host_share", [0.0, 0.5, slow(3.0)])
def test_branches_that_nobody_announced_stay_within_the_budgets(share, host_share, monkeypatch):
    """The first has taken little of what it will take when the second one is planned."""
    device, host = (round(part * wanted(branches=1)) for part in (share, host_share))
    session = session_with()
    memory = on_a_machine(monkeypatch, session, device, host)
    layout, most = layout_of(), 0
    for step in range(5):
        for branch in ("cond", "uncond", "third"):
            context = StepContext(1, step, branch, TOTAL)
            if session.begin(context, layout, CPU).action is Action.SKIP:
                session.end(session.skipped_output())
            else:
                session.end(call(session, context, layout)[-1])
            on_device = session.cache_bytes() - session._pool.stored_bytes
            most = max(most, on_device + SLOTS * sum(session._pool.slots.values()))
            assert memory.lent_bytes <= host + 512 * 9 * 4
    kept_fractions = 4 * len(session._caches)
    assert 0 < most <= device + kept_fractions
    said = [each for each in session.report.fallbacks if "its caches do not fit" in each]
    if share + host_share < 3:
        assert any(each.startswith("in branch third, ") for each in said)
    if share + host_share >= 1:
        assert all(each.startswith("in branch ") for each in said)


def test_refused_host_memory_is_noted_and_the_device_takes_over(monkeypatch):
    expected = on_the_device()
    memory = HostMemory()

    def refuse(*args, **kwargs):
        raise MemoryError("3.0 GiB of host memory: cannot allocate memory")

    monkeypatch.setattr(memory, "acquire", refuse)
    with_capacity(monkeypatch, wanted(), wanted())
    session = session_with(HOSTED, memory=memory)
    assert equal(generate(session), expected)
    assert session.report.notes == [
        "host memory for caches was refused (3.0 GiB of host memory: cannot allocate memory): they "
        "stay on the device as far as they fit, and the other layers run dense"
    ]
    assert session.report.fallbacks == []


@pytest.mark.parametrize(("vram", "ram"), [("1T", "1M"), (None, 0)])
def test_the_ram_budget_of_a_cpu_bounds_the_caches(vram, ram):
    session = session_with({"memory.vram": vram, "memory.ram": ram})
    with pytest.raises(BudgetError):
        generate(session, layout=layout_of(grid=(10, 40, 40)))


# Nothing survives, nothing leaks.


def test_generations_of_changing_shape_reuse_one_block_of_memory():
    memory = HostMemory()
    session = session_with(HOSTED, memory=memory)
    small, large = layout_of(grid=(1, 5, 5)), layout_of()
    expected = {shape: generate(session_with(), layout=shape) for shape in (small, large)}
    sizes = set()
    for generation, shape in enumerate([large, large, small, large, large], start=1):
        assert equal(generate(session, generation=generation, layout=shape), expected[shape])
        sizes.add((shape is large, memory.nbytes))
    assert len(sizes) == 2
    session.close()
    assert memory.nbytes == 0


def abort(session, step, error):
    """A generation whose first MLP fails at some step."""

    def fail(*args, **kwargs):
        raise error

    layout, context = layout_of(), StepContext(1, step, "cond", TOTAL)
    generate(session, steps=step)
    session.begin(context, layout, CPU, lambda: BOTH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlp, "dense_step", fail)
        patch.setattr(mlp, "sparse_step", fail)
        call(session, context, layout)


@pytest.mark.parametrize(
    ("error", "step"), [(RuntimeError, 0), (KeyboardInterrupt, 1), (torch.OutOfMemoryError, 3)]
)
def test_after_an_error_the_next_generation_is_right(error, step):
    expected = on_the_device()
    memory = HostMemory()
    session = session_with(HOSTED, memory=memory)
    with pytest.raises(error):
        abort(session, step, error)
    session.reset()  # as whoever opened the call does
    assert memory.lent_bytes == 0
    assert equal(generate(session, generation=2), expected)
    session.close()
    assert memory.nbytes == 0


def test_two_experts_share_the_host_memory():
    memory = HostMemory()
    first, second = (session_with(HOSTED, memory=memory) for _ in range(2))
    expected = on_the_device()
    for _ in range(2):
        assert equal(generate(first), expected)
        held = memory.nbytes
        first.reset()
        assert equal(generate(second), expected)
        assert memory.nbytes == held
        second.reset()
