"""A session and its attention layers, without a model around them."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

import chipsparse.sparse.layers.attention
from chipsparse.config import Action
from chipsparse.kernels.mask_packing import packed_to_indices, unpack_mask
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.report.generation import GenerationReport
from chipsparse.skip.conditions import Conditions
from chipsparse.skip.position import Place
from chipsparse.sparse.cache.memory_plan import MemoryDemand
from chipsparse.sparse.cache.tensors import Kept
from tests.chipsparse.sparse import sessions
from tests.chipsparse.sparse.sessions import CPU, Session, attend
from tests.wrapped_backends import wrap_backends

LAYOUT = ModelLayout((LayerKind("block", 2, 16),), 2, 8, 1, ((3, 4, 5),))
ACTIONS = ["dense", "refresh", "sparse", "refresh", "sparse"]
CONFIG = sessions.CONFIG.override({"schedule.actions": ACTIONS})


def run(session, *, generation=1, branches=("cond", "uncond"), turned=lambda step: False):
    """A generation of five steps; returns all outputs.

    Turned queries lie in memory channel by channel.
    """
    outputs = []
    for step in range(5):
        for branch in branches:
            # Of six steps: after the last one nothing would be left to look at.
            session.begin(Place(generation, step, branch, 6), LAYOUT, CPU)
            for layer in range(LAYOUT.layers):
                generator = torch.Generator().manual_seed(10 * step + layer)
                query, key, value = torch.randn(3, 1, 2, 60, 8, generator=generator)
                if turned(step):
                    query = query.mT.contiguous().mT
                outputs.append(attend(session, layer, query, key, value))
            session.end(query)
    return outputs


def test_a_report_has_each_ops_backend_with_its_reasons_until_the_next_generation():
    report = GenerationReport()
    session = Session(CONFIG, report)
    run(session)
    backends = {"dense_attention": "library", "column_sparse_attention": "reference"}
    assert backends.items() <= report.backends.items()
    passed_over = {op: list(report.passed_over[op]) for op in backends}
    assert list(passed_over.values()) == [["gluon"], ["gluon", "triton"]]
    session.begin(Place(2, 0, "cond", 6), LAYOUT, CPU)
    assert (report.backends, report.passed_over) == ({}, {})


def test_backends_are_chosen_once_for_tensors_of_one_kind(monkeypatch):
    chosen = []
    choose = chipsparse.sparse.layers.attention.backend_choices

    def counted(inputs, **settings):
        chosen.append(inputs.query.stride())
        return choose(inputs, **settings)

    monkeypatch.setattr(chipsparse.sparse.layers.attention, "backend_choices", counted)
    usual = (960, 480, 8, 1)
    other = (960, 480, 1, 60)
    run(Session(CONFIG, GenerationReport()))
    assert chosen == [usual]
    run(Session(CONFIG, GenerationReport()), turned=lambda step: step == 3)
    assert chosen == [usual, usual, other]


@pytest.fixture
def slow_device(monkeypatch):
    """A CPU that is treated as a device for which the host would have to wait."""

    def cutting(launch, call):
        capacity = call.capacity
        indices, counts = launch(replace(call, capacity=None))
        if capacity is None:
            return indices, counts
        room = torch.zeros(*indices.shape[:-1], max(capacity, indices.shape[-1]), dtype=torch.int32)
        room[..., : indices.shape[-1]] = indices
        return room[..., :capacity].contiguous(), counts.clamp(max=capacity)

    wrap_backends(monkeypatch, packed_to_indices, cutting)
    monkeypatch.setattr(chipsparse.sparse.layers.attention, "READY_DEVICES", ())


@pytest.mark.parametrize(("density", "capacity"), [(0.2, 16), (0.26, 16), (0.3, 32)])
def test_a_refresh_need_not_wait_for_the_length_of_its_lists(density, capacity, request):
    config = CONFIG.override({"attention.density": density})
    expected = run(Session(config, GenerationReport()))
    request.getfixturevalue("slow_device")
    session = Session(config, GenerationReport())
    torch.testing.assert_close(run(session), expected)
    assert session.report.fallbacks == []
    assert {session._caches[key].attention.capacity for key in session._caches} == {capacity}


def one_call(session, step, branch="cond", layout=LAYOUT, *, steps=6, layers=1):
    """A call that is checked to compute full attention unless its step is sparse."""
    context = Place(1, step, branch, steps)
    session.begin(context, layout, CPU, lambda: MemoryDemand(branches=2))
    generator = torch.Generator().manual_seed(10 * step + len(branch))
    tensors = torch.randn(3, layout.batch, 2, layout.tokens, 8, generator=generator)
    dense = torch.nn.functional.scaled_dot_product_attention(*tensors)
    for layer in range(layers):
        output = attend(session, layer, *tensors)
        assert output.shape == dense.shape
        is_dense = torch.allclose(output, dense, atol=1e-5)
        assert is_dense == (session.report.steps[-1].action is not Action.SPARSE)
    session.end(tensors[0])


def watch_choices(monkeypatch, session):
    """The branches that choose columns, as they do."""
    choices = []
    selection = chipsparse.sparse.layers.attention.column_selection
    choose = selection.run
    monkeypatch.setattr(
        selection,
        "run",
        lambda call: choices.append(session.state.branch) or choose(call),
    )
    return choices


@pytest.mark.parametrize("offload", ["never", "always"])
@pytest.mark.parametrize("guided_steps", [4, 2])
def test_a_branch_is_freed_after_its_last_step(guided_steps, offload, monkeypatch):
    """What decodes the latents needs the memory, and the pipeline says too late that it is done.

    So at a last step that is a refresh, a branch finds no columns of the first one, wherever they
    lived. A branch that ended before is freed with the others.
    """
    actions = ["dense", "refresh", "sparse", "refresh"]
    changes = {"memory.offload": offload, "schedule.actions": actions}
    session = Session(CONFIG.override(changes), GenerationReport())
    choices = watch_choices(monkeypatch, session)
    held = []
    for step in range(4):
        branches = ("cond", "uncond") if step < guided_steps else ("cond",)
        for branch in branches:
            one_call(session, step, branch, steps=4)
            held.append(session.cache_bytes())
    guided = guided_steps == 4
    assert not guided or held[6] == held[5] / 2 > 0
    assert (held[-1], session.report.cache_bytes) == (0, held[3])
    assert choices == ["cond", "cond", *["uncond"] * guided]


def test_no_output_is_kept_after_the_last_step():
    """Where a branch is called again after all, it is computed: what it would give is gone."""
    changes = {"schedule.actions": ["dense", "dense", "skip"], "schedule.forecast": 0.5}
    session = Session(CONFIG.override(changes), GenerationReport())
    for step in range(3):
        for branch in ("cond", "uncond"):
            context = Place(1, step, branch, 3, timestep=3.0 - step)
            state = session.begin(context, LAYOUT, CPU)
            if step < 2 or branch == "uncond":
                assert state.action is not Action.SKIP
            session.end(torch.randn(3, 1009), is_last_branch=step == 2)
            del state
            shapes = {item.shape for item in gc.get_objects() if torch.is_tensor(item)}
            assert ((3, 1009) in shapes) == (step < 2)


@pytest.mark.parametrize(("forecast", "count"), [(0.0, 1), (0.5, 2)])
def test_only_the_outputs_that_skipped_steps_read_are_kept(forecast, count):
    """The last one, and the one before it where a line goes through both."""
    changes = {"schedule.actions": ["dense"] * 4 + ["skip"], "schedule.forecast": forecast}
    session = Session(CONFIG.override(changes), GenerationReport())
    shape = (3, 1013)
    for step in range(4):
        session.begin(Place(1, step, "cond", 6, timestep=6.0 - step), LAYOUT, CPU)
        session.end(torch.randn(shape))
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    assert sum(tensor.shape == shape for tensor in tensors) == count


def test_no_conditions_are_kept_after_the_last_step():
    """Up to then they are, so that nothing else comes to lie in their memory."""
    session = Session(CONFIG, GenerationReport())
    alive = []
    for step in range(5):
        prompt = torch.randn(2, 3)
        conditions = Conditions({"encoder_hidden_states": prompt}, {})
        context = Place(1, step, "cond", 5)
        session.begin(context, LAYOUT, CPU, conditioning=conditions)
        session.end(torch.randn(2, 3))
        kept = weakref.ref(prompt)
        del prompt, conditions
        gc.collect()
        alive.append(kept() is not None)
    assert alive == [True] * 4 + [False]


def masks_of(session, branch, layout):
    """Which columns of layer 0 are kept: those of the video, and those of the text."""
    read = frozenset({Kept.COLUMNS})
    with session._caches.acquire(branch, 0, "attention", read, frozenset()) as cache:
        mask = unpack_mask(cache.columns, layout.tokens)
    parts = mask.split([layout.text_tokens, 60][:: 1 if layout.text_first else -1], dim=-1)
    return parts[layout.text_first], parts[not layout.text_first]


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(
    ("texts", "text_first", "offload", "blocks"),
    [
        ((0, 0), False, "never", [0, 1, 2, 3]),
        ((0, 0), False, "always", [0, 1, 2, 3]),
        # Blocks of 16 rows: 4 of the first branch, 7 of the other; 3 of them are of text.
        ((4, 40), False, "always", [0, 1, 2, 3, 3, 3, 3]),
        ((4, 40), True, "always", [0, 0, 0, 0, 1, 2, 3]),
    ],
)
def test_branches_keep_the_columns_that_the_first_of_them_chose(
    texts,
    text_first,
    offload,
    blocks,
    waits,
    request,
    monkeypatch,
):
    """Each keeps its own text, and neither makes the other start anew."""
    if not waits:
        request.getfixturevalue("slow_device")
    changes = {"attention.density": 0.4, "memory.offload": offload, "mlp.density": "dense"}
    session = Session(CONFIG.override(changes), GenerationReport())
    choices = watch_choices(monkeypatch, session)
    layouts = {
        branch: replace(LAYOUT, text_tokens=text, text_first=text_first)
        for branch, text in zip(("cond", "uncond"), texts, strict=True)
    }
    for step in range(4):
        for branch, layout in layouts.items():
            one_call(session, step, branch, layout, layers=2)
            # Images start at row 4 of a block, and at row 40 + 12.
            before = 12 if text_first and branch == "uncond" else 0
            assert session.plan.layout == replace(layout, padding_rows=before)
    actions = [record.action.value for record in session.report.steps[::2]]
    assert actions == ["dense", "refresh", "sparse", "refresh"]
    assert choices == ["cond"] * 4
    assert session.report.fallbacks == []  # such as caches larger than planned, or lists cut
    (video, text), (other_video, other_text) = (
        masks_of(session, branch, layout) for branch, layout in layouts.items()
    )
    assert text.all()
    assert other_text.all()
    assert torch.equal(video[:, :, blocks], other_video)


OTHER_PROMPT = replace(LAYOUT, text_tokens=5)
OTHER_SIZE = replace(LAYOUT, grids=((3, 4, 6),))


@pytest.mark.parametrize("offload", ["never", "always"])
def test_columns_of_a_prompt_before_are_not_kept_any_more(offload):
    report = GenerationReport()
    session = Session(CONFIG.override({"memory.offload": offload}), report)
    bytes_kept = []
    kept = []
    for step, prompt in enumerate([1.0, 1.0, 2.0]):
        for branch in ("cond", "uncond"):
            given = prompt if branch == "cond" else 1.0
            conditions = Conditions({"encoder_hidden_states": given}, {})
            position = Place(1, step, branch, 6)
            session.begin(position, LAYOUT, CPU, conditioning=conditions)
            bytes_kept.append(session.cache_bytes())
            if step == 2:
                caches = session._caches
                kept.append({key for key in list(caches) if caches.has(*key, Kept.COLUMNS)})
            for layer in range(LAYOUT.layers):
                attend(session, layer, *torch.randn(3, 1, 2, 60, 8))
            session.end(torch.zeros(1))
    assert kept == [{("uncond", 0), ("uncond", 1)}] * 2
    full = bytes_kept[3]
    dropped = bytes_kept[4]
    assert dropped < full
    assert [record.restarted for record in report.steps[-2:]] == [True, False]


@pytest.mark.parametrize(
    "calls",
    [
        [(0, "cond", LAYOUT), (1, "cond", LAYOUT), (2, "cond", OTHER_PROMPT)],
        [(0, "cond", LAYOUT), (1, "cond", LAYOUT), (2, "cond", replace(LAYOUT, batch=2))],
        [(0, "cond", LAYOUT), (1, "cond", LAYOUT), (1, "other", OTHER_SIZE), (2, "cond", LAYOUT)],
    ],
    ids=["prompt", "batch", "size"],
)
def test_a_branch_starts_anew_with_another_prompt_batch_or_size(calls):
    session = Session(CONFIG, GenerationReport())
    for step, branch, layout in calls:
        one_call(session, step, branch, layout)
        assert session.plan.layout == layout
    actions = [record.action for record in session.report.steps]
    assert actions == ["dense", "refresh", *["dense"] * (len(calls) - 2)]
