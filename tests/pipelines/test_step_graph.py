"""Sparse steps that are recorded once and launched as a whole: on a GPU, and with a CPU's stand-in.

The stand-in computes a call, takes back what that changed, and computes it again at every launch:
like a graph it reads and writes the memory that the recorded call did, and nothing else.
"""

import contextlib
import dataclasses
import functools

import pytest
import torch
from torch.utils import _pytree as pytree

import chipsparse
import chipsparse.session
from chipsparse.cache import AttentionCache
from chipsparse.kernels.dense_attention.measure import FastestKernel
from chipsparse.memory_plan import working_bytes
from chipsparse.plan import SparsityPlan
from chipsparse.step_graph import (
    MOST_RECORDINGS,
    Arguments,
    StepGraphs,
    keep_in_place,
    tensors_in_place,
)
from tests.devices import DEVICES
from tests.pipelines.test_flux import SPARSE
from tests.pipelines.test_flux import generate as generate_image
from tests.tiny_models import tiny_flux_pipeline

NEVER = SPARSE.override({"cuda_graphs": "never"})
GUIDED = {"negative_prompt": "a blue square", "true_cfg_scale": 3.0}
# Of the 7 steps: dense, refresh, sparse, sparse, sparse, refresh, sparse.
REPLAYED = [3, 4, 6]


class StandIn:
    """Records calls of the sessions that are made while it is in place."""

    device_type = "cpu"

    def __init__(self):
        self.sessions = []
        self.recorded = self.launched = 0
        self.waits = False

    def on(self, device):
        assert device.type == "cpu"
        return contextlib.nullcontext()

    def watch(self, call):
        return call(), self.waits

    def record(self, call):
        self.recorded += 1
        with _nothing_written(self.sessions):
            result = call()
        return result, functools.partial(self._launch, call, result)

    def _launch(self, call, result):
        self.launched += 1
        (session,) = [each for each in self.sessions if each._record is not None]
        layers, session._record.layers = session._record.layers, []
        new = call()
        session._record.layers = layers
        for target, source in zip(pytree.tree_leaves(result), pytree.tree_leaves(new), strict=True):
            target.copy_(source)


class _nothing_written:
    def __init__(self, sessions):
        self._caches = [part for each in sessions for part in parts_of(each)]

    def __enter__(self):
        self._before = [
            (tensor, tensor.clone())
            for cache in self._caches
            for tensor in vars(cache).values()
            if isinstance(tensor, torch.Tensor)
        ]

    def __exit__(self, *_):
        for tensor, before in self._before:
            tensor.copy_(before)


def parts_of(session):
    return [part for cache in session._caches.values() for part in (cache.attention, cache.mlp)]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def pipe(device, monkeypatch):
    """A pipeline on the device; ``pipe.stand_in`` is None on a GPU."""
    pipe = tiny_flux_pipeline().to(device)
    if device == "cuda":
        first_dense_kernel(monkeypatch)
        pipe.to(torch.bfloat16)
        return pipe
    pipe.stand_in = stand_in = StandIn()

    class Watched(chipsparse.session.Session):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs, graphs=StepGraphs(stand_in))
            stand_in.sessions.append(self)

    monkeypatch.setattr("chipsparse.api.Session", Watched)
    return pipe


def first_dense_kernel(monkeypatch):
    """Two sessions may find another dense kernel the fastest, and so round otherwise."""
    monkeypatch.setattr(FastestKernel, "pick", lambda _, kernels, *inputs: next(iter(kernels)))


def generate(pipe, config=SPARSE, *, between=None, **arguments):
    """Pictures of one generation, and its report."""
    with chipsparse.enable(pipe, config) as handle:
        if between is not None:
            arguments["callback_on_step_end"] = between
        return generate_image(pipe, **arguments), handle.report


def replayed(report, branch=None):
    branch = report.steps[0].branch if branch is None else branch
    return [record.step for record in report.steps if record.replayed and record.branch == branch]


def same(found, expected):
    return torch.equal(found.cpu(), expected.cpu())


@pytest.mark.parametrize("rule", ["merge", "difference", "kept_only", "reuse"])
def test_recorded_steps_give_the_same(rule, pipe):
    rules = {"attention.delta_rule": rule}
    expected, usual = generate(pipe, NEVER.override(rules))
    found, report = generate(pipe, SPARSE.override(rules))
    assert same(found, expected)
    assert (replayed(usual), replayed(report)) == ([], REPLAYED)
    assert report.notes == usual.notes


def test_every_branch_has_a_graph_of_its_own(pipe):
    expected, _ = generate(pipe, NEVER, **GUIDED)
    found, report = generate(pipe, **GUIDED)
    assert same(found, expected)
    branches = {record.branch for record in report.steps}
    assert len(branches) == 2
    assert all(replayed(report, branch) == REPLAYED for branch in branches)


def test_layers_are_reported_as_if_they_had_been_launched(pipe):
    _, usual = generate(pipe, NEVER)
    _, report = generate(pipe)

    def told(report):
        return [
            [(layer.layer, layer.part, layer.action, layer.kept, layer.backend) for layer in layers]
            for layers in (record.layers for record in report.steps)
        ]

    assert told(report) == told(usual)
    assert [step["replayed"] for step in report.to_dict()["steps"]].count(True) == len(REPLAYED)
    assert all(record.seconds > 0 for record in report.steps)


def test_generations_are_recorded_one_by_one(pipe):
    with chipsparse.enable(pipe, SPARSE) as handle:
        (adapter,) = handle._adapters
        pictures = [generate_image(pipe, seed=seed) for seed in (0, 1, 0)]
        assert replayed(handle.report) == REPLAYED
        assert adapter.session._graphs._graphs == {}
        wider = generate_image(pipe, width=64)
        assert replayed(handle.report) == REPLAYED
    assert same(pictures[2], pictures[0])
    assert not same(pictures[1], pictures[0])
    assert same(pictures[1], generate(pipe, NEVER, seed=1)[0])
    assert same(wider, generate(pipe, NEVER, width=64)[0])


def test_caches_stay_where_a_graph_reads_them(pipe):
    places = []

    def look(pipe, step, _time, given):
        if step in (4, 5, 6):
            (adapter,) = look.handle._adapters
            places.append([cache.mlp.activation.data_ptr() for cache in look.caches(adapter)])
            places.append([cache.attention.residual.data_ptr() for cache in look.caches(adapter)])
        return given

    look.caches = lambda adapter: adapter.session._caches.values()
    # One step more than are looked at, since the last one frees the caches.
    with chipsparse.enable(pipe, SPARSE) as look.handle:
        generate_image(pipe, callback_on_step_end=look, num_inference_steps=8)
    assert places[0::2] == [places[0]] * 3
    assert places[1::2] == [places[1]] * 3


@pytest.mark.parametrize("in_place", [True, False])
def test_what_a_pipeline_changes_between_steps_counts(in_place, pipe):
    def change(_pipe, step, _time, given):
        if step == 3:
            prompt = given["prompt_embeds"]
            return {"prompt_embeds": prompt.mul_(-1) if in_place else -prompt}
        return {}

    tensors = {"between": change, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
    expected, _ = generate(pipe, NEVER, **tensors)
    found, report = generate(pipe, **tensors)
    assert same(found, expected)
    assert not same(found, generate(pipe)[0])
    # Another tensor makes a new graph, after a step that is launched as usual.
    assert replayed(report) == (REPLAYED if in_place else [3, 6])


def test_arguments_that_always_change_end_the_recording(pipe):
    def change(_pipe, step, _time, given):
        return {"prompt_embeds": given["prompt_embeds"].clone()} if step % 2 else {}

    tensors = {"between": change, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
    config = SPARSE.override({"schedule.refresh_every": 100})
    found, report = generate(pipe, config, num_inference_steps=24, **tensors)
    assert len(replayed(report)) == MOST_RECORDINGS
    never = config.override({"cuda_graphs": "never"})
    assert same(found, generate(pipe, never, num_inference_steps=24, **tensors)[0])


@pytest.mark.parametrize("place", ["", "transformer_blocks.0.attn"])
def test_hooks_of_others_run_at_every_step(place, pipe):
    calls = []
    module = pipe.transformer.get_submodule(place)
    handle = module.register_forward_hook(lambda *_: calls.append(1))
    _, report = generate(pipe)
    handle.remove()
    assert (len(calls), replayed(report)) == (7, [])
    (note,) = [note for note in report.notes if "CUDA graph" in note]
    assert note == (
        "sparse steps are not launched as a CUDA graph: hooks run with "
        f"{place or 'the transformer'}"
    )


def test_a_model_with_adapters_is_launched_as_usual(pipe, monkeypatch):
    monkeypatch.setattr(pipe.transformer, "peft_config", {"style": object()}, raising=False)
    _, report = generate(pipe)
    assert replayed(report) == []
    assert [note for note in report.notes if "CUDA graph" in note] == [
        "sparse steps are not launched as a CUDA graph: the model has adapters (LoRA), which may "
        "change between steps"
    ]


def test_a_call_that_cannot_be_recorded_runs_as_usual(pipe, monkeypatch):
    expected, _ = generate(pipe, NEVER)
    recording = StepGraphs._graph

    def waiting(self, forward, *others):
        def call(*args, **kwargs):
            forward(*args, **kwargs)
            if pipe.device.type == "cuda":
                float(torch.zeros(1, device="cuda"))
            raise RuntimeError("no memory\nfor graphs")

        return recording(self, call, *others)

    monkeypatch.setattr(StepGraphs, "_graph", waiting)
    with chipsparse.enable(pipe, SPARSE) as handle:
        for _ in range(2):
            found = generate_image(pipe)
            assert same(found, expected)
            assert replayed(handle.report) == []
            (note,) = [note for note in handle.report.notes if "CUDA graph" in note]
            if pipe.device.type == "cpu":  # a GPU says what it does not permit
                assert note == "sparse steps are not launched as a CUDA graph: no memory"
    torch.randn(3, device=pipe.device)  # nothing is left behind of what was broken off
    if pipe.device.type == "cuda":
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_a_model_that_waits_for_the_device_is_not_recorded(pipe, monkeypatch):
    expected, _ = generate(pipe, NEVER)
    if pipe.device.type == "cuda":
        forward = pipe.transformer.time_text_embed.forward

        def waiting(*args):
            result = forward(*args)
            assert result.isfinite().all().item()
            return result

        monkeypatch.setattr(pipe.transformer.time_text_embed, "forward", waiting)
    else:
        pipe.stand_in.waits = True
    found, report = generate(pipe)
    assert same(found, expected)
    assert replayed(report) == []
    assert [note for note in report.notes if "CUDA graph" in note] == [
        "sparse steps are not launched as a CUDA graph: the model makes the host wait for the "
        "device in every step"
    ]


def test_skipped_steps_stand_between(pipe):
    skips = {"schedule.skip_steps": [4], "schedule.skip_threshold": 0.0}
    expected, _ = generate(pipe, NEVER.override(skips))
    found, report = generate(pipe, SPARSE.override(skips))
    assert same(found, expected)
    assert replayed(report) == [3, 6]


@pytest.mark.parametrize(
    "settings",
    [
        {"cuda_graphs": "never"},
        {"guard.bound": 10.0},
        {"attention.forecast": 0.5},
        {"mlp.reselect_every": 2},
        {"memory.offload": "always"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_steps_that_differ_are_not_recorded(settings, pipe):
    _, report = generate(pipe, SPARSE.override(settings))
    assert replayed(report) == []
    assert report.actions()["sparse"] == 4


def test_layer_times_need_every_launch(pipe):
    with chipsparse.enable(pipe, SPARSE, layer_times=True) as handle:
        generate_image(pipe)
    assert replayed(handle.report) == []
    assert all(layer.seconds > 0 for record in handle.report.steps for layer in record.layers)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_compiled_blocks_are_recorded(monkeypatch):
    first_dense_kernel(monkeypatch)
    pipe = tiny_flux_pipeline().to("cuda", torch.bfloat16)
    pipe.transformer.compile_repeated_blocks(fullgraph=True)
    expected, _ = generate(pipe, NEVER)
    found, report = generate(pipe)
    assert replayed(report) == REPLAYED
    assert same(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_beside_model_offload(monkeypatch):
    first_dense_kernel(monkeypatch)
    pipe = tiny_flux_pipeline().to(torch.bfloat16)
    pipe.enable_model_cpu_offload()
    expected, _ = generate(pipe, NEVER)
    found, report = generate(pipe)
    assert replayed(report) == REPLAYED
    assert same(found, expected)


# What a user asks for, and what is planned.


def test_a_plan_says_whether_steps_are_recorded():
    layout = chipsparse.session.ModelLayout((), 4, 16, 1, ((1, 128, 128),))
    layout = dataclasses.replace(
        layout, kinds=(chipsparse.layout.LayerKind("block", 2, 64),), text_tokens=0
    )
    longer = dataclasses.replace(layout, text_tokens=1)

    def records(settings=None, layout=layout):
        return SparsityPlan(SPARSE.override(settings or {}), layout, 7).records_steps()

    assert records()
    assert not records(layout=longer)
    assert records({"cuda_graphs": "always"}, longer)
    assert not records({"attention.enabled": False, "mlp.enabled": False})
    always = SPARSE.override({"cuda_graphs": "always", "mlp.reselect_every": 3})
    assert SparsityPlan(always, layout, 7).remarks() == [
        "sparse steps are not launched as a CUDA graph: mlp.reselect_every is 3"
    ]
    plan = SparsityPlan(SPARSE, layout, 7)
    once, twice = (
        working_bytes(plan, dtype=torch.bfloat16, recorded=recorded) for recorded in (False, True)
    )
    assert 1.5 * once < twice <= 2 * once


# The parts.


def test_arguments_are_alike_where_only_values_differ():
    def arguments(hidden, *, scale=1.0, extra=None):
        return Arguments((hidden,), {"options": {"scale": scale}, "extra": extra})

    first = arguments(torch.zeros(2, 3))
    assert first.are_like(arguments(torch.ones(2, 3)))
    assert not first.are_like(arguments(torch.ones(3, 2)))
    assert not first.are_like(arguments(torch.ones(2, 3, dtype=torch.float64)))
    assert not first.are_like(arguments(torch.ones(2, 3), scale=2.0))
    assert not first.are_like(arguments(torch.ones(2, 3), scale=True))
    assert not first.are_like(arguments(torch.ones(2, 3), extra=torch.ones(1)))
    thing = object()
    assert arguments(torch.ones(1), extra=thing).are_like(arguments(torch.ones(1), extra=thing))
    assert not arguments(torch.ones(1), extra=thing).are_like(
        arguments(torch.ones(1), extra=object())
    )


def test_what_is_kept_in_place_is_what_was_recorded():
    old, new = torch.zeros(3), torch.ones(3)
    lists = (torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    cache = AttentionCache(residual=old, lse=old, lists=lists)
    before = tensors_in_place(cache, {"residual", "columns"})
    cache.residual, cache.lse = new, new
    cache.lists = tuple(part + 1 for part in lists)
    assert keep_in_place(cache, before)
    assert cache.residual is old
    assert cache.lse is new
    assert cache.lists[0] is lists[0]
    assert torch.equal(old, torch.ones(3))
    assert torch.equal(lists[0], torch.ones(2, dtype=torch.int32))
    cache.residual = torch.ones(4)
    assert not keep_in_place(cache, before)
    assert len(cache.residual) == 4
