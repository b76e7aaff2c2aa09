"""The soak: its choices follow from the seed, and each of its checks can fail."""

import gc
import itertools
import json
import os
import random
import signal
import tempfile
import threading
import warnings
from argparse import Namespace
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope

from benchmarks.__main__ import main
from benchmarks.run import Run
from benchmarks.soak import changes, checks, command, fresh
from benchmarks.soak.checks import FEWEST_REPEATS, Memory, ProcessState
from benchmarks.soak.choices import (
    BEFORE_CALLS,
    BETWEEN_STEPS,
    FAULTS,
    SURROUNDINGS,
    WAYS,
    Call,
    Event,
    Fault,
    Script,
    choose,
)
from benchmarks.soak.kept import Kept
from benchmarks.soak.player import Outcome, contradictions
from benchmarks.soak.runner import Findings, Soak, different, same_bits
from benchmarks.soak.settled import settled
from benchmarks.soak.subjects import BASE, FAMILIES, SHARES, Place
from benchmarks.soak.surroundings import PREPARATIONS
from chipsparse.plan import Action
from chipsparse.report.generation import GenerationReport, StepRecord
from chipsparse.session import Session
from tests.graph_stand_in import Tape, TapeRecorder
from tests.tiny_models import tiny_flux_pipeline
from tests.variants import slow, slow_unless

CPU = torch.device("cpu")
PLACE = Place(CPU, torch.float32)
SETTINGS = {"attention.block_size_q": 16, "mlp.block_size": 16, "schedule.refresh_every": 4}


def call(*events, steps=7, decode=False, fault=None):
    return Call(BASE, steps, 0, 0, decode, events, fault)


def script(*calls, ways=("captured", "one handle"), settings=(), surroundings=()):
    settings = {**SETTINGS, **dict(settings)}
    return Script(7, 3, "flux", settings, False, ways, surroundings, "wan 2.1", calls)


@pytest.fixture(autouse=True)
def temporary_files_alone(tmp_path, monkeypatch):
    """What other processes write into the machine's temporary folder is none of a run's files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(scope="module", autouse=True)
def new_objects_alone():
    """What other tests left in the process is not looked at again in each collection."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


# What happens.


def test_a_run_follows_from_the_seed_and_its_number():
    assert choose(1, 2) == choose(1, 2)
    assert choose(1, 2) != choose(1, 3)
    assert choose(1, 2) != choose(2, 2)
    assert choose(1, 2, "wan 2.1").family == "wan 2.1"


def test_everything_happens_sooner_or_later():
    drawn = set().union(*(choose(0, number).kinds() for number in range(400)))
    named = {*SHARES, *WAYS, *BETWEEN_STEPS, *BEFORE_CALLS, *FAULTS}
    assert drawn == named.union(*SURROUNDINGS)
    assert SHARES.keys() <= FAMILIES.keys()
    assert changes.CHANGES.keys() == BETWEEN_STEPS.keys() | BEFORE_CALLS.keys()
    assert PREPARATIONS.keys() == set().union(*SURROUNDINGS)


def test_a_run_is_shown_in_full():
    events = Event("LoRA", None, 5), Event("hook", 2, 6)
    text = "\n".join(script(call(*events, fault=Fault("Ctrl-C", 3, 40), decode=True)).lines())
    for part in (
        "flux, captured, one handle",
        "schedule.refresh_every=4",
        "call: base, 7 steps, seed 0, prompt 0, decoded",
        "before: LoRA 5",
        "after step 2: hook 6",
        "Ctrl-C after step 3 and 40 operations",
    ):
        assert part in text


# What may be left behind in the process.


def left_thread(undo):
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="left")
    thread.start()
    undo.callback(thread.join)
    undo.callback(done.set)


def left_file(undo):
    undo.enter_context(tempfile.NamedTemporaryFile())  # noqa: SIM115


def left_folder(undo):
    undo.enter_context(tempfile.TemporaryDirectory(prefix="chipsparse"))


def left_filter(undo):
    undo.enter_context(warnings.catch_warnings())
    warnings.simplefilter("always")


def left_random_states(undo):
    undo.callback(torch.set_rng_state, torch.get_rng_state())
    undo.callback(random.setstate, random.getstate())
    undo.callback(np.random.set_state, np.random.get_state())
    torch.rand(1), random.random(), np.random.rand()


def left_settings(undo):
    undo.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float64)
    undo.enter_context(torch.inference_mode())
    undo.enter_context(torch.autocast("cpu", torch.bfloat16))
    undo.callback(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    undo.callback(os.environ.pop, "CHIPSPARSE_LEFT")
    os.environ["CHIPSPARSE_LEFT"] = "1"


@pytest.mark.parametrize(
    ("leave", "names"),
    [
        (left_thread, {"threads"}),
        (left_file, {"open files"}),
        (left_folder, {"temporary files"}),
        (left_filter, {"warning filters"}),
        (
            left_random_states,
            {"random state of torch", "random state of Python", "random state of numpy"},
        ),
        (
            left_settings,
            {"default dtype", "gradients", "autocast", "signal handlers", "environment"},
        ),
    ],
)
def test_what_is_left_in_the_process_is_found(leave, names):
    before = ProcessState.now(CPU)
    assert before.changes(ProcessState.now(CPU)) == []
    with ExitStack() as undo:
        leave(undo)
        found = before.changes(ProcessState.now(CPU))
    assert {sentence.partition(":")[0] for sentence in found} >= names
    assert before.changes(ProcessState.now(CPU)) == []


def test_tensors_that_stay_are_found():
    memory = Memory(CPU)
    torch.ones(3)
    assert memory.left() == []
    kept = [torch.ones(3), torch.ones(3), torch.ones(2, dtype=torch.int32)]
    assert memory.left(known=kept) == []
    kept.append(torch.ones(3))
    cycle = [torch.ones(5)]
    cycle.append(cycle)
    del cycle
    (sentence,) = memory.left()
    assert sentence == "1 tensors stay alive: 1 of torch.float32 [3]"
    assert memory.left() == []
    assert len(memory.resident_bytes) == 4


@pytest.mark.slow
def test_what_diffusers_remembers_of_a_model_is_no_leak_for_a_second_memory_either():
    Memory(CPU)  # takes all objects that there are out of the collector's sight
    memory = Memory(CPU)
    rope = QwenEmbedRope(theta=10000, axes_dim=[4, 6, 6])
    rope([(1, 4, 4)], torch.device("cpu"), 8)
    del rope
    assert memory.left() == []


def grown(*sizes):
    """What is said of resident memory of these sizes, each pair a run and its repetition."""
    memory = Memory(CPU)
    for first, second in zip(sizes[::2], sizes[1::2], strict=True):
        memory.resident_bytes += [first, second]
        memory.repeated()
    return memory.growth()


def test_growth_differs_from_what_is_loaded_once(monkeypatch):
    monkeypatch.setattr(Memory, "settle", lambda _: None)
    loading = [size for run in range(9) for size in 2 * [run << 24]]
    assert grown(*loading) == []
    leaking = [run << 20 for run in range(18)]
    assert grown(*leaking) == ["resident memory grows by 1024 KiB with each run"]
    assert grown(*leaking[: 2 * FEWEST_REPEATS - 2]) == []
    leaking[:4] = 0, 90 << 20, 90 << 20, 0  # now and then an allocator keeps, or gives back
    assert grown(*leaking) == ["resident memory grows by 1024 KiB with each run"]


# What may be left behind on a pipeline.


def another_class(pipe, module):
    module.__class__ = type("Patched", (type(module),), {})


@pytest.mark.parametrize(
    ("leave", "sentence"),
    [
        (lambda pipe, m: m.register_forward_hook(print), "hooks of"),
        (lambda pipe, m: setattr(m, "left", 1), "has got left"),
        (lambda pipe, m: delattr(m, "heads"), "has lost heads"),
        (lambda pipe, m: setattr(m.processor, "left", 1), "the processor of"),
        (lambda pipe, m: m.to_q.weight.data.view(torch.int32)[0, 0].add_(1), "the values of"),
        (lambda pipe, m: setattr(m.to_q, "weight", m.to_k.weight), "another tensor stands"),
        (lambda pipe, m: setattr(m.to_q.weight, "data", m.to_q.weight.data.t()), "strides of"),
        (another_class, "class of"),
    ],
)
def test_what_is_left_on_a_pipeline_is_found_and_put_back(leave, sentence):
    pipe = tiny_flux_pipeline()
    kept = Kept(pipe)
    assert kept.left(with_hooks=False, values=True) == []
    leave(pipe, pipe.transformer.transformer_blocks[0].attn)
    found = kept.left(with_hooks=False, values=True)
    assert any(sentence in each for each in found), found
    if sentence in ("the values of", "another tensor stands", "strides of", "has got left"):
        kept.restore()
        assert kept.left(with_hooks=False, values=True) == []


def test_weights_can_be_trained_again():
    pipe = tiny_flux_pipeline()
    weight = pipe.transformer.proj_out.weight
    kept = Kept(pipe)
    weight.requires_grad_(False)  # autocast keeps no copies of such ones
    kept.restore()
    assert weight.requires_grad


# What is compared.


def test_bits_are_compared_and_not_values():
    tensor = torch.tensor([1.0, float("nan"), 0.0])
    assert same_bits(tensor, tensor.clone())
    assert not same_bits(tensor, torch.tensor([1.0, float("nan"), -0.0]))
    assert not same_bits(tensor, tensor.double())
    assert not same_bits(tensor, tensor[:2])
    assert not same_bits(tensor, None)
    assert same_bits(None, None)


def test_outcomes_are_compared_with_those_of_the_reference():
    outcome = Outcome(tensors=torch.zeros(2), facts=[1, 2])
    assert different([outcome], [Outcome(tensors=torch.zeros(2), facts=[1, 2])]) == []
    (found,) = different([outcome], [Outcome(tensors=torch.full((2,), 0.5), facts=[1, 2])])
    assert found == "call 0: other bits than the reference's, up to 0.5 away"
    (found,) = different([outcome], [Outcome(tensors=torch.zeros(2), facts=[1, 3])])
    assert found == "call 0: the report says other things: 2 instead of 3"
    (found,) = different([outcome], [Outcome(error="ValueError: no", facts=[1, 2])])
    assert found == "call 0: a result instead of ValueError: no"
    struck = Outcome(error="Injected: of the soak", struck=True, problems=["wrong"])
    assert different([struck], [outcome]) == ["call 0: wrong"]


def test_a_report_must_explain_itself():
    report = GenerationReport()
    record = StepRecord(3, 7, "cond", Action.SPARSE, finished=True)
    report.begin(1, record)
    assert contradictions(report) == [
        "step 3 of cond is called sparse, but no layer was, and nothing says why"
    ]
    report.fall_back("everything runs dense")
    assert contradictions(report) == []
    record.finished = False
    assert contradictions(report) == ["a transformer call broke off, and the report has no error"]


# Runs on a tiny pipeline.


@pytest.fixture(scope="module")
def soak():
    with settled(CPU):
        yield Soak(PLACE, TapeRecorder())


def test_a_run_without_a_fault_has_no_findings(soak):
    replayed = soak.replayed
    ways = ("captured", "one handle", "model offload", "inference mode")
    found = soak.run(script(call(Event("preview", 2, 0), decode=True), call(), ways=ways))
    assert found == Findings()
    assert soak.replayed > replayed


@pytest.mark.parametrize("name", slow_unless(("out of memory",), FAULTS))
@pytest.mark.parametrize("after", [slow(None), 700])
def test_a_call_that_broke_off_leaves_nothing_to_the_next(name, after, soak):
    struck, broken_off = soak.struck, call(fault=Fault(name, 2, after))
    assert soak.run(script(broken_off, call(), ways=("one handle",))) == Findings()
    assert soak.struck == struck + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LoRA", "weights", "cache on top", "hook", "processor", "dtype"])
def test_the_reference_sees_the_same_changes(name, soak):
    assert soak.run(script(call(), call(Event(name, None, 1)), call(), ways=())) == Findings()


@pytest.mark.slow
@pytest.mark.parametrize("name", PREPARATIONS)
def test_the_reference_has_the_same_surroundings(name, soak):
    assert soak.run(script(call(), surroundings=(name,), ways=())) == Findings()


def test_stale_graphs_are_found(soak, monkeypatch):
    monkeypatch.setattr(Tape, "play", lambda _: None)
    found = soak.run(script(call()))
    assert any("other bits than the reference's" in each for each in found.differences)


@pytest.mark.slow
def test_launches_on_memory_that_is_gone_are_found(soak, monkeypatch):
    monkeypatch.setattr(Tape, "dangles", lambda _: True)
    (found,) = soak.run(script(call())).differences
    assert found == "3 launches used memory that nobody held any more"


@pytest.mark.slow
def test_a_run_that_breaks_off_leaves_no_pipeline(soak, monkeypatch):
    monkeypatch.setattr("benchmarks.soak.runner.reference", lambda *_: [])
    with pytest.raises(ValueError, match="zip"):
        soak.run(script(call()))
    monkeypatch.undo()
    assert soak.run(script(call())) == Findings()


def test_a_changed_bit_of_the_dense_result_is_found(soak, monkeypatch):
    def leave(session):
        closing(session)
        held = list(soak._pipes["flux"].transformer.parameters())[-1]
        held.data.view(torch.int32)[0].add_(1)

    closing = Session.close
    monkeypatch.setattr(Session, "close", leave)
    found = soak.run(script(call()))
    assert "dense after disable: other bits than the stock one's" in found.differences
    assert any("the values of" in each for each in found.leaks)


def test_leaks_of_a_run_are_found(soak, monkeypatch):
    kept, closing, filters = [], Session.close, warnings.filters[:]

    def leave(session):
        closing(session)
        kept.append(torch.ones(11))
        warnings.filters.insert(0, ("ignore", None, UserWarning, None, len(kept)))

    monkeypatch.setattr(Session, "close", leave)
    found = soak.run(script(call()))
    warnings.filters[:] = filters
    assert any("tensors stay alive: " in each and "[11]" in each for each in found.leaks)
    assert any(each.startswith("warning filters") for each in found.leaks)
    monkeypatch.undo()
    assert soak.run(script(call())) == Findings()


@pytest.mark.slow
def test_caches_at_decoding_are_found(soak, monkeypatch):
    monkeypatch.setattr(Session, "_finish", lambda *_: None)
    found = soak.run(script(call(decode=True), ways=()))
    assert any(
        "bytes of caches while the latents are decoded" in each for each in found.differences
    )


# The command.


def test_failures_are_counted_and_shown(capsys, monkeypatch, tmp_path):
    class Failing:
        def __init__(self, *_):
            self.replayed = self.struck = 0
            self.memory = Namespace(growth=lambda: [], repeated=lambda: None)

        def prepare(self, families):
            assert families == SHARES

        def run(self, script, *, in_process):
            if script.number == 5:
                raise RuntimeError("broken")
            return Findings(["other bits"], ["a thread"]) if script.number == 3 else Findings()

    monkeypatch.setattr("benchmarks.soak.runner.Soak", Failing)
    file = tmp_path / "soak.json"
    words = ["--op", "soak", "--device", "cpu", "--seed", "2", "--json", str(file)]
    assert main([*words, "--only", "3", "4", "5"]) == 1
    printed = capsys.readouterr().out
    assert "  DIFFERENCE other bits\n  LEAK a thread\n" in printed
    assert "again: python -m benchmarks --op soak --device cpu --seed 2 --only 3\n" in printed
    assert "FAILED: soak: 2 differences, 1 leaks" in printed
    (record,) = json.loads(file.read_text())
    assert (record["runs"], record["failed_runs"]) == (3, [3, 5])
    assert record["generations"] == sum(len(choose(2, number).calls) for number in (3, 4, 5))
    kinds = {change["change"]: change for change in record["changes"]}
    assert kinds.keys() == set().union(*(choose(2, number).kinds() for number in (3, 4, 5)))
    assert main([*words, "--only", "4"]) == 0
    assert main([*words, "--first", "4", "--generations", "1"]) == 0
    assert json.loads(file.read_text())[0]["generations"] == len(choose(2, 4).calls)


def test_a_fresh_process_is_asked_for_the_same_run(monkeypatch):
    """What that process does is done here."""

    def here(words, **_):
        assert words[1:3] == ["-m", "benchmarks.soak.fresh"]
        fresh.main(words[3:])

    monkeypatch.setattr(fresh.subprocess, "run", here)
    number = next(n for n in range(99) if choose(0, n).family == "flux")
    script = choose(0, number)
    with settled(CPU):
        expected = fresh.reference(script, PLACE)
    assert different(fresh.in_a_fresh_process(script, PLACE), expected) == []


def test_some_runs_are_played_twice_in_a_row():
    args = Namespace(seed=0, first=3, only=[])
    played = list(itertools.islice(command._scripts(args), 2 * command.RUNS_PER_REPEAT))
    twice = [script for script, is_repeated in played if is_repeated]
    assert [script.number for script in twice] == [5, 11]
    assert all(played[played.index((script, True)) - 1] == (script, False) for script in twice)
    assert [script.number for script, _ in command._scripts(Namespace(seed=0, only=[7, 5]))] == [
        7,
        5,
    ]


@pytest.mark.slow
def test_a_short_soak_finds_nothing(capsys):
    run = Run()
    args = Namespace(seed=0, first=0, generations=60, only=[])
    command.run(args, CPU, torch.float32, run)
    assert run.failed == [], capsys.readouterr().out
    (record,) = run.records
    assert record["generations"] >= 60
    # 21 to 32 were seen: what fits into free memory decides which steps are recorded.
    assert record["replayed_calls"] > 10
    assert record["broken_off_generations"] > 5


def test_device_memory_that_stays_is_found_also_bit_by_bit(monkeypatch):
    held = {"allocated on the GPU": 0}
    monkeypatch.setattr(Memory, "_on_device", lambda _: dict(held))
    memory = Memory(CPU)
    held["allocated on the GPU"] += checks.MOST_LOOSE + 1
    assert memory.left() == [
        f"allocated on the GPU: {checks.MOST_LOOSE + 1} bytes more than before"
    ]
    for _ in range(checks.MOST_LOOSE_IN_ALL // checks.MOST_LOOSE):
        held["allocated on the GPU"] += checks.MOST_LOOSE
        assert memory.left() == []
    assert memory.growth() == []
    held["allocated on the GPU"] += 512
    assert memory.left() == []
    (sentence,) = memory.growth()
    assert sentence.endswith("bytes more than before, bit by bit")


def test_buffers_that_moved_are_the_same_and_other_values_are_not():
    pipe = SimpleNamespace(components={"model": torch.nn.BatchNorm1d(2)}, _internal_dict={})
    kept = Kept(pipe)
    model = pipe.components["model"]
    model.running_mean = model.running_mean.clone()
    assert kept.left(with_hooks=False, values=True) == []
    model.running_mean = model.running_mean + 1
    assert kept.left(with_hooks=False, values=True) == ["the values of running_mean are others"]
    model.weight = torch.nn.Parameter(model.weight.detach().clone())
    assert "another tensor stands for weight" in kept.left(with_hooks=False, values=True)
