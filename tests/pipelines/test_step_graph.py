"""Sparse steps that are recorded once and launched as a whole: on a GPU, and with a CPU's stand-in.

The stand-in runs none of the model's Python at a launch, and fails where the model is not what it
was when the step was recorded; see `tests/graph_stand_in.py`.
"""

import dataclasses
import gc
import itertools
import threading

import accelerate
import pytest
import torch
from peft import LoraConfig
from tests.pipelines.test_flux import SPARSE as OF_FLUX
from tests.pipelines.test_flux import generate as generate_image

import chipsparse
from chipsparse.cache.memory_plan import working_bytes
from chipsparse.cache.tensors import AttentionCache
from chipsparse.graphs.cuda_capture import CudaCapturer
from chipsparse.graphs.step_graph import (
    MOST_ATTEMPTS,
    MOST_CAPTURES,
    Arguments,
    ModelCall,
    StepGraphs,
    TensorsInPlace,
)
from chipsparse.kernels.column_sparse_attention import column_sparse_attention
from chipsparse.kernels.dense_attention.measure import FastestKernel
from chipsparse.kernels.neuron_selection import neuron_selection
from chipsparse.kernels.sparse_mlp_down import sparse_mlp_down
from chipsparse.kernels.sparse_mlp_up import sparse_mlp_up
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.plan import SparsityPlan
from chipsparse.session import Session
from tests.devices import DEVICES
from tests.graph_stand_in import TapeRecorder
from tests.tiny_models import tiny_flux_pipeline
from tests.variants import slow, slow_unless
from tests.wrapped_backends import wrap_backends

SPARSE = OF_FLUX.override({"cuda_graphs": "always"})  # there are few sparse steps
NEVER = SPARSE.override({"cuda_graphs": "never"})
GUIDED = {"negative_prompt": "a blue square", "true_cfg_scale": 3.0}
# Of the 7 steps: dense, refresh, sparse, sparse, sparse, refresh, sparse.
REPLAYED = [3, 4, 6]


class StandIn(TapeRecorder):
    """A recorder whose launches fail where the model has changed."""

    def __init__(self, model):
        super().__init__()
        self._model = model

    def record(self, call):
        held = facts(self._model)
        result, recording = super().capture(call)
        launch = recording.replay

        def checked():
            assert facts(self._model) == held
            launch()

        recording.replay = checked
        return result, recording


def facts(model):
    """What a launch depends on, found in another way than the product's."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    facts = {name: (tensor.data_ptr(), tensor.device, tensor.dtype) for name, tensor in tensors}
    for name, module in model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        processor = getattr(module, "processor", None)
        facts[name] = (
            type(module),
            list(map(id, hooks)),
            id(processor),
            repr(vars(processor)) if hasattr(processor, "__dict__") else "",
            repr(getattr(module, "scaling", None)),
            repr(getattr(module, "active_adapters", None)),
        )
    facts["adapters"] = sorted(getattr(model, "peft_config", None) or ())
    return facts


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def pipe(device, monkeypatch):
    """A pipeline on the device; ``pipe.stand_in`` records on a CPU."""
    pipe = tiny_flux_pipeline().to(device)
    if device == "cuda":
        first_dense_kernel(monkeypatch)
        pipe.to(torch.bfloat16)
        yield pipe
        return
    pipe.stand_in = stand_in = StandIn(pipe.transformer)

    def session(*args, **kwargs):
        return Session(*args, **kwargs, graphs=StepGraphs(stand_in))

    monkeypatch.setattr("chipsparse.api.Session", session)
    yield pipe
    assert (stand_in.dangling, stand_in.held) == (0, 0)


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


@pytest.mark.parametrize(
    ("rule", "precision"), [("merge", "auto"), slow("difference", "auto"), slow("merge", "fp8")]
)
def test_recorded_steps_give_the_same(rule, precision, pipe):
    precisions = {"memory.residuals": precision, "memory.activations": precision}
    rules = {"attention.delta_rule": rule, **precisions}
    expected, usual = generate(pipe, NEVER.override(rules))
    found, report = generate(pipe, SPARSE.override(rules))
    assert same(found, expected)
    assert (replayed(usual), replayed(report)) == ([], REPLAYED)
    assert [note for note in report.notes if "cuda_graphs" not in note] == usual.notes


def test_every_branch_has_a_graph_of_its_own(pipe):
    expected, _ = generate(pipe, NEVER, **GUIDED)
    found, report = generate(pipe, **GUIDED)
    assert same(found, expected)
    branches = {record.branch for record in report.steps}
    assert len(branches) == 2
    assert all(replayed(report, branch) == REPLAYED for branch in branches)


def test_a_branch_with_less_text_is_recorded_too(pipe, monkeypatch):
    """It has rows of zeros before its queries, and lists with room for the other's columns."""
    encode = pipe.encode_prompt

    def shorter(prompt, **options):
        embeds, pooled, ids = encode(prompt=prompt, **options)
        cut = 5 if prompt == GUIDED["negative_prompt"] else 0
        return embeds[:, cut:], pooled, ids[cut:]

    monkeypatch.setattr(pipe, "encode_prompt", shorter)
    expected, usual = generate(pipe, NEVER, **GUIDED)
    found, report = generate(pipe, **GUIDED)
    assert same(found, expected)
    assert report.fallbacks == []
    kept = {record.branch: record.attention_kept for record in usual.steps}
    assert len(kept) == len(set(kept.values())) == 2
    assert all(replayed(report, branch) == REPLAYED for branch in kept)


def test_layers_are_reported_as_if_they_had_been_launched(pipe):
    _, usual = generate(pipe, NEVER)
    _, report = generate(pipe)

    def layers_of(report):
        return [
            [(layer.layer, layer.part, layer.action, layer.kept, layer.backend) for layer in layers]
            for layers in (record.layers for record in report.steps)
        ]

    assert layers_of(report) == layers_of(usual)
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


@pytest.mark.parametrize("in_place", [slow(True), False])
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
    assert replayed(report) == [3]  # the branch starts anew


@pytest.mark.slow
def test_arguments_that_always_change_end_the_recording(pipe):
    def change(_pipe, step, _time, given):
        return {"prompt_embeds": given["prompt_embeds"].clone()} if step % 2 else {}

    tensors = {"between": change, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
    config = SPARSE.override({"schedule.refresh_every": 100})
    found, report = generate(pipe, config, num_inference_steps=24, **tensors)
    assert len(replayed(report)) == MOST_CAPTURES
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
        "sparse steps are not captured as a CUDA graph: hooks run with "
        f"{place or 'the transformer'}"
    )


CHANGED = "a captured sparse step was dropped: "
LONG = SPARSE.override({"schedule.refresh_every": 100})  # only steps 2 to 6 are sparse, 3 recorded


def add_lora(transformer, name="style"):
    torch.manual_seed(0)
    transformer.add_adapter(
        LoraConfig(r=4, target_modules=["to_q", "to_k"], init_lora_weights=False), name
    )


def replace_processors(transformer):
    for block in transformer.transformer_blocks:
        block.attn.processor = type(block.attn.processor)()


def hook_a_linear(transformer):
    transformer.transformer_blocks[0].ff.net[2].register_forward_hook(
        lambda _module, _args, output: output * 1.5
    )


def move_weights(transformer):
    """As `.to()` a device and back does: other memory with the same values."""
    for parameter in transformer.parameters():
        parameter.data = parameter.data.clone()


def load_weights(transformer):
    changed = {name: value * 0.9 for name, value in transformer.state_dict().items()}
    transformer.load_state_dict(changed, assign=True)


def change_weights(transformer):
    for parameter in transformer.parameters():
        parameter.data.mul_(0.9)


# What a callback may do after a step was recorded: the first name that changes, None where a launch
# sees the change anyway; and the steps that are launched then.
BETWEEN = {
    "weights moved": (move_weights, "_parameters.", [3, 5, 6]),
    "weights exchanged": (load_weights, "_parameters.", [3, 5, 6]),
    "weights changed": (change_weights, None, [3, 4, 5, 6]),
    "LoRA added": (add_lora, "", [3, 5, 6]),
    "hook added": (hook_a_linear, "_forward_hooks", [3]),
    "processors replaced": (replace_processors, "processor", [3, 5, 6]),
}


@pytest.mark.parametrize("name", slow_unless(("weights moved", "hook added"), BETWEEN))
def test_a_model_that_changes_after_the_recording(name, pipe):
    change, why, launched = BETWEEN[name]

    def between(given, step, _time, _tensors):
        if step == 3:
            change(given.transformer)
        return {}

    state = {key: value.clone() for key, value in pipe.transformer.state_dict().items()}
    expected, usual = generate(pipe, LONG.override({"cuda_graphs": "never"}), between=between)
    restore(pipe.transformer, state)
    found, report = generate(pipe, LONG, between=between)
    assert same(found, expected)
    assert replayed(report) == launched
    notes = [note for note in report.notes if note.startswith(CHANGED)]
    assert len(notes) == (why is not None)
    assert all(why in note for note in notes)
    assert report.fallbacks == usual.fallbacks


def test_a_model_that_changes_before_a_skipped_step(pipe):
    def between(given, step, _time, _tensors):
        if step == 3:
            move_weights(given.transformer)
        return {}

    skips = {"schedule.skip_steps": [4]}
    state = {key: value.clone() for key, value in pipe.transformer.state_dict().items()}
    expected, _ = generate(pipe, NEVER.override(skips), between=between)
    restore(pipe.transformer, state)
    found, report = generate(pipe, SPARSE.override(skips), between=between)
    assert same(found, expected)
    assert any(note.startswith(CHANGED) for note in report.notes)


def restore(transformer, state):
    """Takes back what `BETWEEN` does."""
    if getattr(transformer, "peft_config", None):
        transformer.delete_adapters("style")
    for module in transformer.modules():
        module._forward_hooks.clear()
    weights = dict(transformer.named_parameters())
    for key, value in state.items():
        name = key if key in weights else key.replace(".weight", ".base_layer.weight")
        weights.get(name, weights.get(key.replace(".bias", ".base_layer.bias"))).data = value


def test_the_modules_are_looked_at_again_after_a_change(pipe):
    def between(given, step, _time, _tensors):
        if step == 2:
            hook_a_linear(given.transformer)
            replace_processors(given.transformer)
        return {}

    _, report = generate(pipe, LONG, between=between)
    assert any("its second linear has hooks of its own" in each for each in report.fallbacks)
    assert any("its processor was replaced" in each for each in report.fallbacks)


def test_a_processor_whose_settings_change(pipe):
    stock, seen = type(pipe.transformer.transformer_blocks[0].attn.processor), []

    class Scaled(stock):
        strength = 1.0

        def __call__(self, attn, hidden_states, *args, **kwargs):
            seen.append(self.strength)
            return super().__call__(attn, hidden_states * self.strength, *args, **kwargs)

    def between(given, step, _time, _tensors):
        for block in given.transformer.transformer_blocks:
            block.attn.processor.strength = 0.5 if step >= 3 else 1.0
        return {}

    for block in pipe.transformer.transformer_blocks:
        block.attn.processor = Scaled()
    expected, _ = generate(pipe, LONG.override({"cuda_graphs": "never"}), between=between)
    layers, seen[:] = len(pipe.transformer.transformer_blocks), []
    for block in pipe.transformer.transformer_blocks:
        block.attn.processor.strength = 1.0
    found, report = generate(pipe, LONG, between=between)
    assert same(found, expected)
    assert 0.5 in seen
    assert replayed(report) == [3, 5, 6]
    assert len(seen) < 7 * layers


@pytest.mark.parametrize("scaled", [slow(False), True])
def test_a_model_with_adapters_is_recorded(scaled, pipe):
    add_lora(pipe.transformer)

    def between(given, step, _time, _tensors):
        if scaled and step == 3:
            given.transformer.set_adapters(["style"], [0.3])
        return {}

    never = LONG.override({"cuda_graphs": "never"})
    expected, _ = generate(pipe, never, between=between)
    pipe.transformer.set_adapters(["style"], [1.0])
    found, report = generate(pipe, LONG, between=between)
    assert same(found, expected)
    assert replayed(report) == ([3] if scaled else [3, 4, 5, 6])  # it starts anew
    assert any("where the model changes" in each for each in report.fallbacks) is scaled


def test_a_preview_under_model_offload(pipe):
    """The VAE's hook moves the transformer away, and only a call of it brings it back."""
    _, hook = accelerate.cpu_offload_with_hook(pipe.transformer, pipe.device)

    def between(given, step, _time, tensors):
        if step == 3:
            latents = given._unpack_latents(tensors["latents"], 32, 48, given.vae_scale_factor)
            move_weights(given.transformer)
            given.vae.decode(latents)
        return {}

    expected, _ = generate(pipe, LONG.override({"cuda_graphs": "never"}), between=between)
    found, report = generate(pipe, LONG, between=between)
    hook.remove()
    assert same(found, expected)
    assert replayed(report) == [3, 5, 6]


@pytest.mark.parametrize(
    "operation",
    slow_unless(
        (sparse_mlp_up,),
        (neuron_selection, sparse_mlp_up, sparse_mlp_down, column_sparse_attention),
    ),
    ids=lambda operation: operation.__name__,
)
def test_out_of_memory_while_recording(operation, pipe, monkeypatch):
    expected, _ = generate(pipe, NEVER)
    recording = []

    def failing(launch, call):
        if recording:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
        return launch(call)

    recorder = type(pipe.stand_in) if pipe.device.type == "cpu" else CudaCapturer
    record = recorder.capture

    def watched(self, call):
        recording.append(1)
        try:
            return record(self, call)
        finally:
            recording.pop()

    wrap_backends(monkeypatch, operation, failing)
    monkeypatch.setattr(recorder, "capture", watched)
    found, report = generate(pipe)
    assert same(found, expected)
    assert replayed(report) == []
    assert [note for note in report.notes if "CUDA graph" in note] == [
        "sparse steps are not captured as a CUDA graph: CUDA out of memory. Tried to allocate 2 MiB"
    ]


def test_a_recording_is_released_before_the_image_is_decoded(pipe, monkeypatch):
    if pipe.device.type == "cuda":
        pytest.skip("counted by the stand-in")
    held, decode = [], pipe.vae.decode

    def watched(*args, **kwargs):
        held.append(pipe.stand_in.held)
        return decode(*args, **kwargs)

    monkeypatch.setattr(pipe.vae, "decode", watched)
    with chipsparse.enable(pipe, SPARSE) as handle:
        pipe("a red circle", height=32, width=48, num_inference_steps=7, max_sequence_length=16)
    assert len(replayed(handle.report)) == 3
    assert held == [0]


def test_a_call_that_cannot_be_recorded_runs_as_usual(pipe, monkeypatch):
    expected, _ = generate(pipe, NEVER)
    recording = StepGraphs._graph

    def waiting(self, call, *others):
        def forward(*args, **kwargs):
            call.forward(*args, **kwargs)
            if pipe.device.type == "cuda":
                float(torch.zeros(1, device="cuda"))
            raise RuntimeError("no memory\nfor graphs")

        return recording(self, dataclasses.replace(call, forward=forward), *others)

    monkeypatch.setattr(StepGraphs, "_graph", waiting)
    with chipsparse.enable(pipe, SPARSE) as handle:
        for _ in range(2):
            found = generate_image(pipe)
            assert same(found, expected)
            assert replayed(handle.report) == []
            (note,) = [note for note in handle.report.notes if "CUDA graph" in note]
            if pipe.device.type == "cpu":  # a GPU says what it does not permit
                assert note == "sparse steps are not captured as a CUDA graph: no memory"
    torch.randn(3, device=pipe.device)  # nothing is left behind of what was broken off
    if pipe.device.type == "cuda":
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_a_model_that_waits_for_the_device_is_not_recorded(pipe, monkeypatch):
    expected, _ = generate(pipe, NEVER)
    forward, calls = pipe.transformer.time_text_embed.forward, []

    def waiting(*args):
        calls.append(1)
        return _waiting(forward(*args))

    monkeypatch.setattr(pipe.transformer.time_text_embed, "forward", waiting)
    with chipsparse.enable(pipe, SPARSE) as handle:
        for attempts in (MOST_ATTEMPTS, 0):  # a second generation does not try again
            calls.clear()
            assert same(generate_image(pipe), expected)
            assert replayed(handle.report) == []
            assert len(calls) == 7 + attempts
            (note,) = [note for note in handle.report.notes if "CUDA graph" in note]
            assert note.startswith("sparse steps are not captured as a CUDA graph: ")
            assert "permitted" in note


def test_skipped_steps_stand_between(pipe):
    skips = {
        "schedule.skip_steps": [4],
        "schedule.skip_threshold": 0.0,
        "schedule.forecast": 0.5,
    }
    expected, _ = generate(pipe, NEVER.override(skips))
    found, report = generate(pipe, SPARSE.override(skips))
    assert same(found, expected)
    assert replayed(report) == [3, 6]
    assert {record.step for record in report.steps if record.forecast} == {4}


@pytest.mark.parametrize(
    "settings",
    [
        {"cuda_graphs": "never"},
        {"attention.forecast": 0.5},
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
def test_compiled_blocks_are_recorded(monkeypatch):
    first_dense_kernel(monkeypatch)
    pipe = tiny_flux_pipeline().to("cuda", torch.bfloat16)
    pipe.transformer.compile_repeated_blocks(fullgraph=True)
    expected, _ = generate(pipe, NEVER)
    found, report = generate(pipe)
    assert replayed(report) == REPLAYED
    assert same(found, expected)


@pytest.mark.gpu
def test_beside_model_offload(monkeypatch):
    first_dense_kernel(monkeypatch)
    pipe = tiny_flux_pipeline().to(torch.bfloat16)
    pipe.enable_model_cpu_offload()
    expected, _ = generate(pipe, NEVER)
    found, report = generate(pipe)
    assert replayed(report) == REPLAYED
    assert same(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("breaks", [False, True])
def test_recordings_leave_no_memory_behind(breaks, monkeypatch):
    first_dense_kernel(monkeypatch)
    pipe = tiny_flux_pipeline().to("cuda", torch.bfloat16)
    if breaks:
        embed = pipe.transformer.time_text_embed
        forward = embed.forward
        monkeypatch.setattr(embed, "forward", lambda *args: _waiting(forward(*args)))
    held = []
    for _ in range(4):
        generate(pipe)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert held[1:] == held[1:2] * 3


def _waiting(result):
    assert result.isfinite().all().item()
    return result


@pytest.mark.gpu
def test_other_threads_use_the_device_while_a_call_is_recorded():
    """They launch, allocate, copy, wait for their own work and draw random numbers."""
    numbers = torch.arange(1024.0, device="cuda")
    recorder, done, stop = CudaCapturer(), [], threading.Event()

    def other():
        while not stop.is_set():
            torch.randn(8, device="cuda")
            torch.relu(numbers)[-1].item()
            torch.ones(8).pin_memory().to("cuda", non_blocking=True)
            torch.cuda.empty_cache()
            done.append(1)

    thread = threading.Thread(target=other)

    def call():
        thread.start()
        while len(done) < 100:
            assert thread.is_alive()
        return numbers * 2

    state = torch.cuda.get_rng_state()
    try:
        result, recording = recorder.capture(call)
    finally:
        stop.set()
        thread.join()
    recording.replay()
    assert torch.equal(result, numbers * 2)
    recording.release()
    drawn = torch.randn(8, device="cuda")
    torch.cuda.set_rng_state(state)
    for _ in range(len(done)):
        torch.randn(8, device="cuda")
    assert torch.equal(torch.randn(8, device="cuda"), drawn)


# What a user asks for, and what is planned.


@pytest.mark.parametrize(
    ("pays", "expected"), [(True, ([4, 6], [2])), (False, ([], [2]))], ids=["pays", "does not pay"]
)
def test_a_step_is_recorded_where_that_was_measured_to_pay(pays, expected, pipe, monkeypatch):
    """The first may compile, the second is timed, and the third is asked about, once."""
    asked = []

    def measured(*, host, call, device, calls):
        assert 0 < host <= call or pipe.device.type == "cuda"
        assert device > 0
        asked.append(calls)
        return pays

    monkeypatch.setattr("chipsparse.graphs.sparse_calls.capture_pays", measured)
    usual, _ = generate(pipe, NEVER)
    found, report = generate(pipe, SPARSE.override({"cuda_graphs": "auto"}))
    assert (replayed(report), asked) == expected
    assert same(found, usual)
    assert not report.notes


@pytest.mark.slow
def test_each_branch_is_recorded_where_it_pays(pipe, monkeypatch):
    answers = iter((True, False))  # the branches are asked in turn, once each
    monkeypatch.setattr("chipsparse.graphs.sparse_calls.capture_pays", lambda **_: next(answers))
    expected, _ = generate(pipe, NEVER, **GUIDED)
    found, report = generate(pipe, SPARSE.override({"cuda_graphs": "auto"}), **GUIDED)
    branches = dict.fromkeys(record.branch for record in report.steps)
    assert [replayed(report, branch) for branch in branches] == [[4, 6], []]
    assert same(found, expected)


def test_a_plan_says_whether_steps_can_be_recorded():
    layout = ModelLayout((), 4, 16, 1, ((1, 128, 128),))
    layout = dataclasses.replace(layout, kinds=(LayerKind("block", 2, 64),), text_tokens=0)

    def records(**settings):
        return SparsityPlan(OF_FLUX.override(settings), layout, 30).captures_steps()

    assert records()
    assert not records(cuda_graphs="never")
    assert not records(**{"attention.enabled": False, "mlp.enabled": False})
    always = SPARSE.override({"cuda_graphs": "always", "attention.forecast": 0.5})
    assert SparsityPlan(always, layout, 7).notes() == [
        "sparse steps are not captured as a CUDA graph: attention.forecast grows with every step"
    ]
    plan = SparsityPlan(SPARSE, layout, 7)
    once, twice = (
        working_bytes(plan, dtype=torch.bfloat16, captured=captured) for captured in (False, True)
    )
    assert 1.5 * once < twice <= 2 * once


# The parts.


def test_arguments_are_alike_where_only_values_differ():
    def arguments(hidden, *, scale=1.0, extra=None):
        call = ModelCall(len, (hidden,), {"options": {"scale": scale}, "extra": extra})
        return Arguments(call, "cpu")

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
    cache = AttentionCache()
    cache.residual, cache.lse, cache.lists = old, old, lists
    before = TensorsInPlace(cache, {"residual", "columns"})
    cache.residual, cache.lse = new, new
    cache.lists = tuple(part + 1 for part in lists)
    assert before.take(cache)
    assert cache.residual is old
    assert cache.lse is new
    assert cache.lists[0] is lists[0]
    assert torch.equal(old, torch.ones(3))
    assert torch.equal(lists[0], torch.ones(2, dtype=torch.int32))
    cache.residual = torch.ones(4)
    assert not before.take(cache)
    assert len(cache.residual) == 4


def test_longer_lists_of_columns_need_another_recording():
    """Where the lists are made of the columns in every step, their length is the recorded one."""
    cache = AttentionCache()
    cache.columns, cache.capacity = torch.zeros(2, dtype=torch.uint8), 32
    before = TensorsInPlace(cache, {"columns"})
    columns, cache.columns = cache.columns, torch.ones(2, dtype=torch.uint8)
    cache.capacity = 16
    assert before.take(cache)
    assert cache.columns is columns
    cache.capacity = 48
    assert not before.take(cache)


def test_tensors_of_the_host_are_part_of_what_is_recorded():
    def arguments(number, hidden):
        return Arguments(ModelCall(len, (hidden,), {"timestep": number}), "meta")

    number, hidden = torch.tensor([3.0]), torch.ones(2, device="meta")
    first = arguments(number, hidden)
    assert first.are_like(arguments(torch.tensor([3.0]), torch.ones(2, device="meta")))
    assert arguments(torch.tensor([3.0]), torch.ones(2, device="meta")).others(first) == {0}
    assert not first.are_like(arguments(torch.tensor([4.0]), hidden))
    number.add_(1)  # in place, which its identity does not tell
    assert not first.are_like(arguments(number, hidden))
