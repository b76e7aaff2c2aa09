"""What a session tells of its layers, without a model around it."""

import gc
from dataclasses import replace

import pytest
import torch

import chipsparse.layers.attention
from chipsparse import SparsityConfig
from chipsparse.cache.memory_plan import MemoryDemand
from chipsparse.kernels.mask_packing import packed_to_indices, unpack_mask
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.plan import Action
from chipsparse.report.generation import GenerationReport
from chipsparse.session import Session
from chipsparse.step import StepContext
from tests.chipsparse.attend import attend
from tests.wrapped_backends import wrap_backends

LAYOUT = ModelLayout(
    kinds=(LayerKind("block", layers=2, intermediate_size=16),),
    heads=2,
    head_dim=8,
    batch=1,
    grids=((3, 4, 5),),
)
CONFIG = SparsityConfig().override(
    {
        "attention.density": 0.2,
        "attention.block_size_q": 16,
        "tile": None,
        "schedule.actions": ["dense", "refresh", "sparse", "refresh", "sparse"],
    }
)
CPU = torch.device("cpu")


def run(
    session,
    *,
    generation=1,
    branches=("cond", "uncond"),
    spoil=lambda step, layer: False,
    turned=lambda step: False,
):
    """A generation of five steps; returns all outputs.

    Spoiled refreshes meet a NaN LSE. Turned queries lie in memory channel by channel.
    """
    outputs = []
    for step in range(5):
        for branch in branches:
            # Of six steps: after the last one nothing would be left to look at.
            session.begin(StepContext(generation, step, branch, 6), LAYOUT, CPU)
            for layer in range(LAYOUT.layers):
                generator = torch.Generator().manual_seed(10 * step + layer)
                query, key, value = torch.randn(3, 1, 2, 60, 8, generator=generator)
                if turned(step):
                    query = query.mT.contiguous().mT
                if spoil(step, layer):
                    session._caches[branch, layer].attention.lse[0, 0, 3] = torch.nan
                outputs.append(attend(session, layer, query, key, value))
            session.end(query)
    return outputs


def test_reports_each_op_with_its_backend_and_the_reasons():
    report = GenerationReport()
    run(Session(CONFIG, report))
    assert report.fallbacks == []
    assert report.backends["dense_attention"] == "library"
    assert report.backends["column_sparse_attention"] == "reference"
    assert list(report.passed_over["dense_attention"]) == ["gluon"]
    assert list(report.passed_over["column_sparse_attention"]) == ["gluon", "triton"]
    gluon = report.passed_over["column_sparse_attention"]["gluon"]
    assert report.backend_reasons()[0] == f"dense_attention not on gluon: {gluon}"
    assert report.backend_reasons()[1].startswith(
        f"dense_attention_column_sums, column_sparse_attention not on gluon: {gluon}; triton: "
    )


def test_a_new_generation_forgets_the_backends_of_the_last():
    report = GenerationReport()
    session = Session(CONFIG, report)
    run(session)
    session.begin(StepContext(2, 0, "cond", 6), LAYOUT, CPU)
    assert (report.backends, report.passed_over, report.backend_reasons()) == ({}, {}, [])


def test_backends_are_chosen_once_for_tensors_of_one_kind(monkeypatch):
    chosen = []
    choose = chipsparse.layers.attention.backend_choices

    def counted(inputs, **settings):
        chosen.append(inputs.query.stride())
        return choose(inputs, **settings)

    monkeypatch.setattr(chipsparse.layers.attention, "backend_choices", counted)
    usual, other = (960, 480, 8, 1), (960, 480, 1, 60)
    run(Session(CONFIG, GenerationReport()))
    assert chosen == [usual]
    run(Session(CONFIG, GenerationReport()), turned=lambda step: step == 3)
    assert chosen == [usual, usual, other]


def test_column_sums_of_nan_are_reported_once_per_layer_of_a_generation():
    session = Session(CONFIG, GenerationReport())
    for number in (1, 2):
        outputs = run(
            session, generation=number, spoil=lambda step, layer: step in (1, 3) and layer == 1
        )
        assert session.report.fallbacks == [
            "attention of layer 1 keeps up to 60 columns from step 1 on instead of 12 at most: "
            "column sums were NaN, and their query blocks keep every column"
        ]
        assert all(output.isfinite().all() for output in outputs)


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
    monkeypatch.setattr(chipsparse.layers.attention, "READY_DEVICES", ())


@pytest.mark.parametrize(("density", "capacity"), [(0.2, 16), (0.26, 32)])
def test_a_refresh_need_not_wait_for_the_length_of_its_lists(density, capacity, request):
    """Of 12 columns or 16; a list that is full would be taken for one that was cut."""
    config = CONFIG.override({"attention.density": density})
    expected = run(Session(config, GenerationReport()))
    request.getfixturevalue("slow_device")
    session = Session(config, GenerationReport())
    torch.testing.assert_close(run(session), expected)
    assert session.report.fallbacks == []
    assert {cache.attention.capacity for cache in session._caches.values()} == {capacity}


def test_lists_that_were_cut_are_made_anew_where_the_layer_is_reached_again(request):
    def spoil(step, layer):
        return step == 1 and layer == 1

    expected = run(Session(CONFIG, GenerationReport()), spoil=spoil)
    request.getfixturevalue("slow_device")
    session = Session(CONFIG, GenerationReport())
    found = run(session, spoil=spoil)
    (once_more,) = session.report.fallbacks
    assert once_more == (
        "attention of layer 1 runs in full once more at step 2: column sums were NaN at its "
        "refresh, which made its lists longer than any choice does"
    )
    actions = [
        [entry.action.value for entry in record.layers if entry.part == "attention"]
        for record in session.report.steps
        if record.branch == "cond"
    ]
    assert actions[2] == ["sparse", "refresh"]
    assert actions[4] == ["sparse", "sparse"]
    in_full = ["dense", "refresh", "refresh", "refresh", "sparse"]
    full = run(Session(CONFIG.override({"schedule.actions": in_full}), GenerationReport()))
    for step in (0, 1, 3):
        places = slice(4 * step, 4 * step + 4)
        torch.testing.assert_close(found[places], expected[places])
    torch.testing.assert_close(found[9:12:2], full[9:12:2])  # layer 1 at step 2
    assert all(output.isfinite().all() for output in found)


@pytest.mark.parametrize("rule", ["merge", "difference"])
def test_a_second_generation_gives_the_same(rule):
    session = Session(CONFIG.override({"attention.delta_rule": rule}), GenerationReport())
    first, second = run(session), run(session, generation=2)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    capacities = {cache.attention.capacity for cache in session._caches.values()}
    assert capacities == {12}
    session.reset()
    assert not session._caches


def watch_choices(monkeypatch, session):
    """The branches that choose columns, as they do."""
    choices = []
    choose = chipsparse.layers.attention.column_selection.run
    monkeypatch.setattr(
        chipsparse.layers.attention.column_selection,
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
    session = Session(
        CONFIG.override({"memory.offload": offload, "schedule.actions": actions}),
        GenerationReport(),
    )
    choices, held = watch_choices(monkeypatch, session), []
    for step in range(4):
        for branch in ("cond", "uncond")[: 1 + (step < guided_steps)]:
            session.begin(StepContext(1, step, branch, 4), LAYOUT, CPU)
            query, key, value = torch.randn(3, 1, 2, 60, 8)
            attend(session, 0, query, key, value)
            session.end(query)
            held.append(session.cache_bytes())
    guided = guided_steps == 4
    if guided:
        assert held[6] == held[5] / 2 > 0
    assert held[-1] == 0
    assert session.report.cache_bytes == held[3]
    assert choices == ["cond", "cond", *["uncond"] * guided]


def outputs_that_live():
    """How many tensors there are of the shape that a test gives its outputs and latents."""
    return sum(torch.is_tensor(each) and each.shape == (3, 1009) for each in gc.get_objects())


def test_no_output_is_kept_after_the_last_step():
    """Where a branch is called again after all, it is computed: what it would give is gone."""
    changes = {"schedule.actions": ["dense", "dense", "skip"], "schedule.forecast": 0.5}
    session = Session(CONFIG.override(changes), GenerationReport())
    for step in range(3):
        for branch in ("cond", "uncond"):
            context = StepContext(1, step, branch, 3, timestep=3.0 - step)
            state = session.begin(context, LAYOUT, CPU)
            if step < 2 or branch == "uncond":
                assert state.action is not Action.SKIP
            session.end(torch.randn(3, 1009), is_last_branch=step == 2)
            del state
            assert (outputs_that_live() == 0) == (step == 2)


def packed_columns(session, branch):
    with session._caches.acquire(
        branch, 0, "attention", frozenset({"columns"}), frozenset()
    ) as cache:
        return cache.columns.clone()


@pytest.mark.parametrize("offload", ["never", "always"])
@pytest.mark.parametrize("rule", ["merge", "difference"])
def test_branches_keep_the_columns_that_the_first_of_them_chose(offload, rule, monkeypatch):
    config = CONFIG.override(
        {"memory.offload": offload, "mlp.density": "dense", "attention.delta_rule": rule}
    )
    session = Session(config, GenerationReport())
    choices = watch_choices(monkeypatch, session)
    for step in range(4):
        for number, branch in enumerate(("cond", "uncond")):
            generator = torch.Generator().manual_seed(10 * step + number)
            tensors = torch.randn(3, 1, 2, 60, 8, generator=generator)
            session.begin(StepContext(1, step, branch, 6), LAYOUT, CPU)
            output = attend(session, 0, *tensors)
            session.end(tensors[0])
            dense = torch.nn.functional.scaled_dot_product_attention(*tensors)
            is_dense = torch.allclose(output, dense, atol=1e-5)
            assert is_dense == (session.report.steps[-1].action.value != "sparse")
        if step > 0:
            assert torch.equal(*(packed_columns(session, name) for name in ("cond", "uncond")))
    assert choices == ["cond", "cond"]
    assert session.report.fallbacks == []


def masks_of(session, branch, layout):
    """Which columns of layer 0 are kept: those of the video, and those of the text."""
    text = layout.text_tokens
    mask = unpack_mask(packed_columns(session, branch), layout.tokens)
    parts = mask.split([text, 60] if layout.text_first else [60, text], dim=-1)
    return parts[layout.text_first], parts[not layout.text_first]


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("text_first", [False, True])
def test_branches_whose_prompts_differ_in_length(text_first, waits, request):
    """The first chooses for both; each keeps its text, and neither makes the other start anew."""
    if not waits:
        request.getfixturevalue("slow_device")
    config = CONFIG.override(
        {
            "attention.density": 0.4,
            "memory.offload": "always",
            "mlp.density": "dense",
        }
    )
    session = Session(config, GenerationReport())
    texts = {"cond": 4, "uncond": 40}
    layouts = {
        branch: replace(LAYOUT, text_tokens=text, text_first=text_first)
        for branch, text in texts.items()
    }
    for step in range(3):
        for branch, layout in layouts.items():
            context = StepContext(1, step, branch, 6)
            session.begin(context, layout, CPU, lambda: MemoryDemand(branches=2))
            # Images start at row 4 of a block, and at row 40 + 12.
            before = 12 if text_first and branch == "uncond" else 0
            assert session.plan.layout == replace(layout, rows_before=before)
            query, key, value = torch.randn(3, 1, 2, layout.tokens, 8)
            dense = torch.nn.functional.scaled_dot_product_attention(query, key, value)
            for layer in range(layout.layers):
                output = attend(session, layer, query, key, value)
                assert output.shape == query.shape
                is_dense = torch.allclose(output, dense, atol=1e-5)
                assert is_dense == (session.report.steps[-1].action is not Action.SPARSE)
            session.end(query)
    assert [record.action for record in session.report.steps] == [
        action for action in ("dense", "refresh", "sparse") for _ in texts
    ]
    assert session.report.fallbacks == []  # such as caches larger than planned, or lists cut
    (video, text), (other_video, other_text) = (
        masks_of(session, branch, layout) for branch, layout in layouts.items()
    )
    assert text.all()
    assert other_text.all()
    # Blocks of 16 rows: 4 of the first branch, 7 of the other; 3 of them are of text.
    blocks = [0, 0, 0, 0, 1, 2, 3] if text_first else [0, 1, 2, 3, 3, 3, 3]
    chosen = video[:, :, blocks]
    assert torch.equal(chosen, other_video)


OTHER_PROMPT, OTHER_SIZE = replace(LAYOUT, text_tokens=5), replace(LAYOUT, grids=((3, 4, 6),))


@pytest.mark.parametrize(
    "calls",
    [
        [(0, "cond", LAYOUT), (1, "cond", LAYOUT), (2, "cond", OTHER_PROMPT)],
        [(0, "cond", LAYOUT), (1, "cond", LAYOUT), (1, "other", OTHER_SIZE), (2, "cond", LAYOUT)],
    ],
    ids=["prompt", "size"],
)
def test_a_branch_of_another_prompt_and_one_of_another_size_start_anew(calls):
    session = Session(CONFIG, GenerationReport())
    for step, branch, layout in calls:
        session.begin(StepContext(1, step, branch, 6), layout, CPU)
        query, key, value = torch.randn(3, 1, 2, layout.tokens, 8)
        attend(session, 0, query, key, value)
        session.end(query)
    actions = [record.action for record in session.report.steps]
    assert actions == ["dense", "refresh", *["dense"] * (len(calls) - 2)]


def test_an_observer_runs_every_layer_and_changes_nothing():
    class Observer:
        def __init__(self):
            self.seen = []

        def attention(self, layer, state, *tensors, **options):
            self.seen.append((state.context.step, state.action.value, layer.number))
            return layer(state, *tensors, **options)

    observer = Observer()
    watched, plain = (Session(CONFIG, GenerationReport(), observer=o) for o in (observer, None))
    outputs, expected = (run(session, branches=("cond",)) for session in (watched, plain))
    assert all(map(torch.equal, outputs, expected))
    actions = ["dense", "refresh", "sparse", "refresh", "sparse"]
    assert observer.seen == [(step, a, layer) for step, a in enumerate(actions) for layer in (0, 1)]
