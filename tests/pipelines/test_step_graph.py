"""Sparse steps that are recorded once and launched as a whole: on a GPU, and with a CPU's stand-in.

The stand-in runs none of the model's Python at a launch; see `tests/graph_stand_in.py`.
"""

import functools
import gc
import threading

import pytest
import torch

import chipsparse
from chipsparse.sparse.cache.tensors import AttentionCache, IndexLists, Kept
from chipsparse.sparse.graphs.cuda_capture import CudaCapturer
from chipsparse.sparse.graphs.step_graph import MOST_ATTEMPTS, MOST_CAPTURES, Arguments, put_back
from tests.graph_stand_in import TapeRecorder
from tests.pipelines.changes import add_lora
from tests.pipelines.tiny_runs import FLUX
from tests.tiny_models import tiny_flux_pipeline
from tests.variants import DEVICES, slow, slow_unless

SPARSE = FLUX.SPARSE.override({"cuda_graphs": "always"})  # there are few sparse steps
NEVER = SPARSE.override({"cuda_graphs": "never"})
GUIDED = {"negative_prompt": "a blue square", "true_cfg_scale": 3.0}
REPLAYED = [3, 4, 6]  # of dense, refresh, sparse, sparse, sparse, refresh, sparse
LONG = SPARSE.override(
    {"schedule.periodic.refresh_every": 100},
)  # only steps 2 to 6 are sparse, 3 recorded
LONG_NEVER = LONG.override({"cuda_graphs": "never"})
NOT_CAPTURED = "sparse steps are not captured as a CUDA graph: "


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def pipe(device, request):
    """A pipeline on the device, whose steps a stand-in records on a CPU."""
    request.getfixturevalue("recorder" if device == "cpu" else "first_dense_kernel")
    return tiny_flux_pipeline().to(device, torch.float32 if device == "cpu" else torch.bfloat16)


def generate(pipe, config=SPARSE, *, between=None, **arguments):
    with chipsparse.enable(pipe, config) as handle:
        if between is not None:
            arguments["callback_on_step_end"] = between
        return FLUX.generate(pipe, **arguments), handle.report


def replayed(report, branch=None):
    branch = report.steps[0].branch if branch is None else branch
    return [record.step for record in report.steps if record.replayed and record.branch == branch]


def captures(report):
    return [note for note in report.notes if "CUDA graph" in note]


@pytest.mark.parametrize("precision", ["auto", slow("fp8")])
def test_recorded_steps_give_the_same_and_are_reported_alike(precision, pipe):
    precisions = {"memory.cache_precision": precision}
    expected, usual = generate(pipe, NEVER.override(precisions))
    found, report = generate(pipe, SPARSE.override(precisions))
    assert torch.equal(found, expected)
    assert (replayed(usual), replayed(report)) == ([], REPLAYED)
    assert [note for note in report.notes if "cuda_graphs" not in note] == usual.notes
    both = [
        [[(e.layer, e.part, e.action, e.kept, e.backend) for e in r.layers] for r in each.steps]
        for each in (report, usual)
    ]
    assert both[0] == both[1]
    assert [step["replayed"] for step in report.to_dict()["steps"]].count(True) == len(REPLAYED)
    assert all(record.seconds > 0 for record in report.steps)


def test_every_branch_has_a_graph_of_its_own_also_one_with_less_text(pipe, monkeypatch):
    """It has rows of zeros before its queries, and lists with room for the other's columns."""
    encode = pipe.encode_prompt

    def shorter(prompt, **options):
        embeds, pooled, ids = encode(prompt=prompt, **options)
        cut = 5 if prompt == GUIDED["negative_prompt"] else 0
        return embeds[:, cut:], pooled, ids[cut:]

    monkeypatch.setattr(pipe, "encode_prompt", shorter)
    expected, usual = generate(pipe, NEVER, **GUIDED)
    found, report = generate(pipe, **GUIDED)
    assert torch.equal(found, expected)
    assert report.fallbacks == []
    kept = {record.branch: record.attention_kept for record in usual.steps}
    assert len(kept) == len(set(kept.values())) == 2
    assert all(replayed(report, branch) == REPLAYED for branch in kept)


def test_generations_are_recorded_one_by_one(pipe):
    with chipsparse.enable(pipe, SPARSE) as handle:
        (runner,) = handle._runners
        pictures = [FLUX.generate(pipe, seed=seed) for seed in (0, 1, 0)]
        assert replayed(handle.report) == REPLAYED
        assert runner.sparse.session.graphs._graphs == {}
        wider = FLUX.generate(pipe, width=64)
        assert replayed(handle.report) == REPLAYED
    assert torch.equal(pictures[2], pictures[0])
    assert torch.equal(pictures[1], generate(pipe, NEVER, seed=1)[0])
    assert torch.equal(wider, generate(pipe, NEVER, width=64)[0])


def move_weights(given, _tensors):
    """Other memory with the same values, like `.to()` a device and back."""
    for parameter in given.transformer.parameters():
        parameter.data = parameter.data.clone()


def hook_a_linear(given, _tensors):
    linear = given.transformer.transformer_blocks[0].ff.net[2]
    linear.register_forward_hook(lambda _module, _args, output: output * 1.5)


# What a callback may do after a step was recorded: the steps that are launched then (a branch that
# starts anew has no sparse step to record), and the first name that the report says has changed;
# None where a launch sees the change anyway, or the branch starts anew.
CHANGES = {
    "prompt": (lambda _, tensors: {"prompt_embeds": -tensors["prompt_embeds"]}, [3], None),
    "memory": (move_weights, [3, 5, 6], "_parameters."),
    "a LoRA comes": (lambda given, _: add_lora(given, "to_q"), [3], None),
    "scale of a LoRA": (lambda given, _: given.transformer.set_adapters("style", 0.3), [3], None),
    "a hook": (hook_a_linear, [3], "_forward_hooks"),
}


@pytest.mark.parametrize(
    "name",
    slow_unless(("prompt", "memory", "scale of a LoRA", "a hook"), CHANGES),
)
def test_what_changes_after_the_recording_counts(name, device, pipe):
    change, launched, why = CHANGES[name]

    def between(given, step, _time, tensors):
        return (change(given, tensors) or {}) if step == 3 else {}

    def run(config):
        fresh = tiny_flux_pipeline().to(device, pipe.dtype)
        if name == "scale of a LoRA":
            add_lora(fresh, "to_q")
        tensors = ["latents", "prompt_embeds"]
        options = {"between": between, "callback_on_step_end_tensor_inputs": tensors}
        return generate(fresh, config, **options)

    expected, usual = run(LONG_NEVER)
    found, report = run(LONG)
    assert torch.equal(found, expected)
    assert replayed(report) == launched
    notes = [note for note in report.notes if note.startswith("a captured sparse step was dropped")]
    assert len(notes) == (why is not None)
    assert all(why in note for note in notes)
    assert report.fallbacks == usual.fallbacks


def test_arguments_that_always_change_end_the_recording(pipe):
    def change(_pipe, step, _time, given):
        return {"prompt_embeds": given["prompt_embeds"].clone()} if step % 2 else {}

    tensors = {"between": change, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
    found, report = generate(pipe, LONG, num_inference_steps=24, **tensors)
    assert len(replayed(report)) == MOST_CAPTURES
    assert torch.equal(found, generate(pipe, LONG_NEVER, num_inference_steps=24, **tensors)[0])


@pytest.mark.parametrize("place", ["", "transformer_blocks.0.attn"])
def test_hooks_of_others_run_at_every_step(place, pipe):
    calls = []
    pipe.transformer.get_submodule(place).register_forward_hook(lambda *_: calls.append(1))
    _, report = generate(pipe)
    assert (len(calls), replayed(report)) == (7, [])
    assert captures(report) == [f"{NOT_CAPTURED}hooks run with {place or 'the transformer'}"]


def test_a_model_that_waits_for_the_device_is_not_recorded(pipe, monkeypatch):
    expected, _ = generate(pipe, NEVER)
    forward = pipe.transformer.time_text_embed.forward
    calls = []

    def waiting(*args):
        calls.append(1)
        return _waiting(forward(*args))

    monkeypatch.setattr(pipe.transformer.time_text_embed, "forward", waiting)
    with chipsparse.enable(pipe, SPARSE) as handle:
        for attempts in (MOST_ATTEMPTS, 0):  # a second generation does not try again
            calls.clear()
            assert torch.equal(FLUX.generate(pipe), expected)
            assert replayed(handle.report) == []
            assert len(calls) == 7 + attempts
            (note,) = captures(handle.report)
            assert note.startswith(NOT_CAPTURED)
            assert "permitted" in note
    torch.randn(3, device=pipe.device)  # nothing is left behind of what was broken off


def _waiting(result):
    assert result.isfinite().all().item()
    return result


def test_other_ways_to_run_are_not_recorded(pipe):
    _, report = generate(pipe, SPARSE.override({"memory.offload": "always"}))
    assert replayed(report) == []
    with chipsparse.enable(pipe, SPARSE, layer_times=True) as handle:  # it needs every launch
        FLUX.generate(pipe)
    assert replayed(handle.report) == []
    assert all(layer.seconds > 0 for record in handle.report.steps for layer in record.layers)


@pytest.mark.parametrize("pays", [True, False])
def test_steps_are_recorded_where_the_plan_says_that_it_pays(pays, pipe, monkeypatch):
    monkeypatch.setattr("chipsparse.sparse.session.captures", lambda *_: pays)
    usual, _ = generate(pipe, NEVER)
    output, report = generate(pipe, SPARSE.override({"cuda_graphs": "auto"}))
    assert replayed(report) == (REPLAYED if pays else [])
    assert torch.equal(output, usual)
    assert not report.notes


@pytest.mark.gpu
@pytest.mark.usefixtures("first_dense_kernel")
@pytest.mark.parametrize("beside", ["compiled blocks", "model offload"])
def test_beside_what_others_do(beside):
    pipe = tiny_flux_pipeline().to(torch.bfloat16)
    if beside == "model offload":
        pipe.enable_model_cpu_offload()
    else:
        pipe.to("cuda").transformer.compile_repeated_blocks(fullgraph=True)
    expected, _ = generate(pipe, NEVER)
    found, report = generate(pipe)
    assert replayed(report) == REPLAYED
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("first_dense_kernel")
@pytest.mark.parametrize("breaks", [False, True])
def test_recordings_leave_no_memory_behind(breaks, monkeypatch):
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


def test_arguments_are_alike_where_only_values_on_the_device_differ():
    def arguments(hidden, *, device="cpu", **options):
        return Arguments(functools.partial(len, hidden, options=options), device)

    thing = object()
    first = arguments(torch.zeros(2, 3), scale=1.0)
    assert first.are_like(arguments(torch.ones(2, 3), scale=1.0))
    for other in (torch.ones(3, 2), torch.ones(2, 3, dtype=torch.float64)):
        assert not first.are_like(arguments(other, scale=1.0))
    for scale in (2.0, True, torch.ones(1), None):
        assert not first.are_like(arguments(torch.ones(2, 3), scale=scale))
    hidden = torch.ones(1)
    assert arguments(hidden, extra=thing).are_like(arguments(hidden, extra=thing))
    assert not arguments(hidden, extra=thing).are_like(arguments(hidden, extra=object()))
    # Tensors of the host are read where they are, and part of what is recorded.
    number = torch.tensor([3.0])
    hidden = torch.ones(2, device="meta")
    first = arguments(hidden, device="meta", timestep=number)
    other = arguments(torch.ones(2, device="meta"), device="meta", timestep=torch.tensor([3.0]))
    assert first.are_like(other)
    assert other.others(first) == {0}
    number.add_(1)  # in place, which its identity does not tell
    assert not first.are_like(arguments(hidden, device="meta", timestep=number))


def test_what_is_kept_in_place_is_what_was_recorded():
    """Lists that are made of the columns in every step have the length that was recorded."""
    old = torch.zeros(3)
    new = torch.ones(3)
    lists = torch.zeros(2, dtype=torch.int32)
    counts = torch.zeros(1, dtype=torch.int32)
    cache = AttentionCache()
    cache.residual = old
    cache.lse = old
    cache.lists = IndexLists(lists, counts)
    cache.capacity = 32
    before = {**vars(cache)}
    read = {Kept.RESIDUAL, Kept.COLUMNS, Kept.LISTS}
    cache.residual = new
    cache.lse = new
    cache.lists = IndexLists(lists + 1, counts + 2)
    cache.capacity = 16
    assert put_back(cache, before, read)
    assert cache.residual is old
    assert cache.lse is new
    assert cache.lists.indices is lists
    assert cache.lists.counts is counts
    assert torch.equal(old, torch.ones(3))
    assert torch.equal(lists, torch.ones(2, dtype=torch.int32))
    assert counts.item() == 2
    cache.capacity = 48
    assert not put_back(cache, before, read)
    cache.residual = torch.ones(4)
    cache.capacity = 32
    assert not put_back(cache, before, read)
    assert len(cache.residual) == 4


@pytest.mark.gpu
def test_other_threads_use_the_device_while_a_call_is_recorded():
    """They launch, allocate, copy, wait for their own work and draw random numbers."""
    numbers = torch.arange(1024.0, device="cuda")
    recorder = CudaCapturer()
    done = []
    stop = threading.Event()

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


def test_the_stand_in_reads_a_weight_where_it_was():
    linear = torch.nn.Linear(3, 3).requires_grad_(False)
    hidden = torch.randn(2, 3)
    recorder = TapeRecorder()
    result, recording = recorder.capture(lambda: linear(hidden))
    linear.weight.mul_(2)  # in place
    recording.replay()
    assert torch.equal(result, linear(hidden))
    assert recorder.dangling == 0
    stale = linear(hidden)
    linear.weight.data = torch.zeros(3, 3)
    recording.replay()
    assert torch.equal(result, stale)
    assert recorder.dangling == 1
