"""Random generations with everything changing, as seeded rounds; each leaves no trace.

A round draws a pipeline, a config, how generations are made, and what changes. The reference makes
the same on a fresh pipeline: a fresh `enable` for each, nothing recorded, no faults.
"""

import copy
import gc
import random
import re
import warnings
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from unittest import mock

import peft
import pytest
import torch
from torch._subclasses.fake_tensor import is_fake
from torch.utils import _pytree as pytree

import chipsparse
from chipsparse import SparsityConfig
from chipsparse.sparse.session import SparseSession
from tests.graph_stand_in import Tape, TapeRecorder
from tests.pipelines.families import flux, hunyuan_video, wan
from tests.pipelines.model_state import process_state, state_of
from tests.pipelines.small_sparse import generate
from tests.pipelines.test_broken_calls import BreaksOff
from tests.pipelines.test_families import transformers_of

ROUNDS = 160
FAMILIES = {each.name: each for each in (*flux.FAMILIES, *hunyuan_video.FAMILIES, *wan.FAMILIES)}
DRAWN = ("flux", "flux", "wan 2.1", "wan 2.1", "wan 2.2 two experts", "hunyuan video")
PROMPTS = ("a red circle moves left", "a blue square", "the triangle grows and shrinks")
# What a result must not depend on, with the chance that a round does it.
WAYS = {"recorded": 0.6, "one handle": 0.6, "caches on the host": 0.25, "inference mode": 0.1}
# Settings that every round draws, and those that few rounds have.
USUAL = {
    "attention.density": (0.1, 0.25, 0.5),
    "block_size": (16, 16, 32),
    "attention.delta_rule": ("difference", "block_means", "block_means"),
    "mlp.density": (0.1, 0.3),
    "tile": ([2, 2, 2], [1, 4, 4], None),
}
RARE = {
    "mlp.density": ("dense",),
    "schedule.forecast": (0.5, 1.0),
    "layers": (
        [{"index": "0", "attention": "dense", "mlp": "dense"}],
        [{"index": "0", "attention": "dense", "mlp": 0.5}],
    ),
    "memory.ram": ("64K", "1M"),
    "memory.cache_precision": ("model", "fp8"),
}
SCHEDULES = (
    {"schedule.periodic.refresh_every": 6},
    {"schedule.periodic.refresh_every": 6, "schedule.periodic.warmup": 3},
    {"schedule.actions": ["dense", "dense", "refresh", "sparse", "skip", "sparse"]},
    {"schedule.spread.full": 0.5, "schedule.spread.sparse": 0.2},
    {"schedule.listed.full": [0, 1, 4], "schedule.listed.sparse": "others"},
    {"schedule.listed.full": [0, 1, 4]},
)
FAULTS = (RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError)
MOST_OPERATIONS = 9000  # of a short generation: where among them a fault strikes
MOST_BYTES = 64 << 10  # of tensors that a round may leave


@dataclass(frozen=True)
class Call:
    """One generation; an event is (step or None for before it, change, seed of the change)."""

    variant: str = ""  # of the family's calls
    steps: int = 9
    seed: int = 0  # of the noise and of the prompt
    events: tuple[tuple[int | None, str, int], ...] = ()
    fault: tuple[int, type[BaseException]] | None = None  # at which operation, which


def drawn_round(number):
    draw = random.Random(number)
    settings = {path: draw.choice(values) for path, values in USUAL.items()}
    settings |= {p: draw.choice(values) for p, values in RARE.items() if draw.random() < 0.1}
    settings |= draw.choice(SCHEDULES)
    ways = tuple(way for way, chance in WAYS.items() if draw.random() < chance)
    family = draw.choice(DRAWN)
    calls = [drawn_call(draw, family, ways) for _ in range(draw.choice((1, 2, 2)))]
    return SimpleNamespace(family=family, settings=settings, ways=ways, calls=calls)


def drawn_call(draw, family, ways):
    steps = draw.randint(6, 9)
    events = []
    fault = None
    # In inference mode nothing can be made that has a gradient outside.
    changes = CHANGES[1:] if "inference mode" in ways else CHANGES
    if draw.random() < 0.35:
        events.append((None, draw.choice(changes), 0))
    for step in sorted(draw.choices(range(1, steps - 1), k=draw.choice((0, 1, 1, 2)))):
        events.append((step, draw.choice(changes + WITHIN), draw.randrange(99)))
    if draw.random() < 0.25:
        events = []  # what a broken call leaves of a change is its own matter
        fault = draw.randrange(MOST_OPERATIONS), draw.choice(FAULTS)
    variant = draw.choice(("", "", *FAMILIES[family].variants))
    return Call(variant, steps, draw.randrange(3), tuple(events), fault)


class Stage:
    """A pipeline in the middle of a round, and what users change; ``undo`` takes changes back."""

    def __init__(self, pipe, undo):
        self.pipe = pipe
        self.undo = undo
        self.handle = None

    def lora(self, draw, _given):
        model = draw.choice(transformers_of(self.pipe))
        if not getattr(model, "peft_config", None):
            targets = f"^({'|'.join(map(re.escape, draw.sample([*linears(model)], 2)))})$"
            config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model.add_adapter(config, adapter_name="style")
            self.undo.callback(self.unload, model)
        elif (action := draw.choice(("scale", "disable", "unload"))) == "scale":
            model.enable_lora()
            model.set_adapters(["style"], [draw.choice((0.3, 1.7))])
        else:
            model.disable_lora() if action == "disable" else self.unload(model)

    def unload(self, model):
        if getattr(model, "peft_config", None):
            model.unload_lora()
        for name in ("_hf_peft_config_loaded", "_safe_fusing", "lora_scale"):  # left by PEFT
            vars(model).pop(name, None)

    def weights(self, draw, _given):
        weight = draw.choice([*linears(self.pipe.transformer).values()]).weight
        if draw.random() < 0.5:  # in its memory, or in other memory
            weight.data.mul_(1.25)
        else:
            weight.data = weight.data * 0.75

    def hook(self, draw, _given):
        linear = draw.choice([*linears(self.pipe.transformer).values()])
        hook = linear.register_forward_hook(lambda _module, _args, output: output * 1.1)
        self.undo.callback(hook.remove)

    def guidance(self, draw, _given):
        self.pipe._guidance_scale = min(self.pipe._guidance_scale, draw.choice((1.0, 6.0)))

    def prompt(self, draw, given):
        embeds = given["prompt_embeds"]
        # PyTorch does not count writes to tensors of inference mode, so nothing can notice them.
        in_place = draw.random() < 0.5 and not torch.is_inference_mode_enabled()
        return {"prompt_embeds": embeds.mul_(-1) if in_place else embeds * -1}

    def scheduler(self, _draw, given):
        """A scheduler with other noise levels before a call, a copy in the middle of one."""
        stock = self.pipe.scheduler
        self.undo.callback(setattr, self.pipe, "scheduler", stock)
        shifted = {k: 5.0 if k.endswith("shift") and v else v for k, v in stock.config.items()}
        self.pipe.scheduler = copy.deepcopy(stock) if given else type(stock).from_config(shifted)

    def disable(self, _draw, _given):
        """The remaining steps run without chipsparse, the next call with it."""
        if self.handle is not None:
            self.handle = self.handle.disable()

    def interrupt(self, _draw, _given):
        self.pipe._interrupt = True


CHANGES = ("lora", "weights", "hook", "scheduler")
WITHIN = ("guidance", "prompt", "disable", "interrupt")  # a call, not before it


def play(round_, pipe, recorder=None):
    """The outcomes of a round and what it left on the modules; without recorder the reference."""
    before = facts_of(pipe)
    ways = round_.ways if recorder is not None else ()
    with ExitStack() as undo:
        stage = Stage(pipe, undo)
        outcomes = [play_call(stage, round_, call, ways, recorder) for call in round_.calls]
        if "one handle" in ways:  # changes are taken back before or after it ends
            undo.close()
        stage.disable(None, None)
    names = {name for call in round_.calls for _, name, _ in call.events}
    after = facts_of(pipe)
    ignored = "weight" if names & {"weights", "lora"} else "nothing"
    left = [name for name in before | after if before.get(name) != after.get(name)]
    return outcomes, [name for name in left if not name.startswith(ignored)]


def play_call(stage, round_, call, ways, recorder):
    outcome = SimpleNamespace(tensors=None, error="", struck=False, replayed=0, facts=[])
    family = FAMILIES[round_.family]
    breaks = BreaksOff(*call.fault) if call.fault and recorder is not None else nullcontext()

    def apply(step, given=None):
        returned = {}
        for at, name, seed in call.events:
            if at == step and (stage.handle is not None or step is None):
                returned |= getattr(stage, name)(random.Random(seed), given) or {}
        return returned

    arguments = {**family.call, **(family.variants[call.variant] if call.variant else {})}
    arguments = pytree.tree_map_only(torch.Tensor, torch.clone, arguments)
    if isinstance(arguments.get("prompt"), str):
        arguments["prompt"] = PROMPTS[call.seed]
    if any(name == "prompt" for _, name, _ in call.events):
        arguments["callback_on_step_end_tensor_inputs"] = ["prompt_embeds"]
    apply(None)
    if "one handle" not in ways:
        stage.disable(None, None)
    if stage.handle is None:
        stage.handle = enabled(stage.pipe, round_.settings, ways, recorder)
    report = stage.handle.report
    try:
        with torch.inference_mode("inference mode" in ways), breaks:
            arguments["callback_on_step_end"] = lambda _, step, _time, given: apply(step, given)
            steps = {"num_inference_steps": call.steps, "seed": call.seed}
            outcome.tensors = generate(stage.pipe, arguments, **steps).detach().clone()
    except (Exception, KeyboardInterrupt) as error:
        outcome.error = f"{type(error).__name__}: {error}".partition("\n")[0]
        outcome.struck = str(error) == "here"
        if not (outcome.struck or isinstance(error, Exception)):
            raise
    for step in report.steps:
        layers = [(layer.layer, layer.part, layer.kept) for layer in step.layers]
        outcome.facts.append((step.transformer, step.step, step.branch, step.action, layers))
    outcome.replayed = sum(step.replayed for step in report.steps)
    return outcome


def enabled(pipe, settings, ways, recorder):
    settings = {**settings, "cuda_graphs": "always" if "recorded" in ways else "never"}
    if "caches on the host" in ways and "memory.ram" not in settings:
        settings["memory.offload"] = "always"
    config = SparsityConfig().override(settings)
    session = partial(SparseSession, capturer=recorder) if "recorded" in ways else SparseSession
    with mock.patch("chipsparse.api.SparseSession", session):
        return chipsparse.enable(pipe, config)


def linears(model):
    linears = {n: m for n, m in model.named_modules() if type(m) is torch.nn.Linear}
    return {name: linear for name, linear in linears.items() if "blocks" in name}


def models_of(pipe):
    return {n: m for n, m in pipe.components.items() if isinstance(m, torch.nn.Module)}


def facts_of(pipe):
    found = {}
    for name, model in models_of(pipe).items():
        found |= {f"state of {name}.{inner}": state for inner, state in state_of(model).items()}
        found |= {f"weight {name}.{k}": bits(w) for k, w in model.named_parameters()}
    return found


def bits(tensor):
    if tensor is None:
        return None
    raw = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return tensor.shape, tensor.dtype, raw


class Soak:
    def __init__(self):
        self.pipes = {}
        self.replayed = 0
        self.struck = 0

    def play(self, round_):
        """Plays a round and its reference; returns everything that is wrong."""
        family = round_.family
        pipe = self.pipes[family] = self.pipes.get(family) or FAMILIES[family].make()
        short = partial(generate, pipe, FAMILIES[family].call, num_inference_steps=3)
        stock = bits(short())
        weights = [copy.deepcopy(model.state_dict()) for model in transformers_of(pipe)]
        expected, _ = play(round_, FAMILIES[family].make())
        process = process_state()
        gc.collect()
        gc.freeze()  # from here on the collector sees new objects alone
        outcomes, left = play(round_, pipe, recorder := TapeRecorder())
        now = process_state()
        wrong = [f"{each} left on the model" for each in left]
        wrong += [f"{name} changed" for name in process if process[name] != now[name]]
        for number, (outcome, other) in enumerate(zip(outcomes, expected, strict=True)):
            self.replayed += outcome.replayed
            self.struck += outcome.struck
            wrong += [f"call {number}: {each}" for each in differences(outcome, other)]
        if recorder.dangling:
            wrong.append("launches used memory that nobody held any more")
        del outcomes, outcome
        if (count := left_bytes(self.pipes.values())) > MOST_BYTES:
            wrong.append(f"{count} bytes of tensors stay alive")
        for model, values in zip(transformers_of(pipe), weights, strict=True):
            model.load_state_dict(values)
        with chipsparse.enable(pipe, SparsityConfig.dense()):
            dense = bits(short())
        if dense != stock or bits(short()) != stock:
            wrong.append("other bits than stock after disable or with a dense config")
        if wrong:
            self.pipes.clear()  # the next rounds are judged for themselves
        return wrong


def left_bytes(pipes):
    """Bytes of the tensors that came since the last freeze and that no pipeline holds."""
    gc.collect()
    modules = [m for pipe in pipes for model in models_of(pipe).values() for m in model.modules()]
    holders = [*modules, *pipes, *(pipe.scheduler for pipe in pipes)]
    held = {id(leaf) for leaf in pytree.tree_leaves([vars(each) for each in holders])}
    new = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return sum(x.nbytes for x in new if id(x) not in held and not is_fake(x))


def differences(outcome, expected):
    if outcome.struck:
        return
    too_small = outcome.error.startswith("BudgetError") and outcome.error == expected.error
    if (outcome.error or expected.error) and not too_small:
        yield f"{outcome.error or 'a result'}, reference: {expected.error or 'a result'}"
    if outcome.tensors is not None and not outcome.tensors.isfinite().all():
        yield "values that are not finite"
    if bits(outcome.tensors) != bits(expected.tensors):
        yield "other bits than the reference's"
    if outcome.facts != expected.facts:
        yield "the report says other things"


@pytest.fixture(scope="module")
def soak():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums of several may be rounded in another order
    yield Soak()
    torch.set_num_threads(threads)
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, ROUNDS, 40))
def test_random_rounds_leave_no_trace(soak, first):
    rounds = {number: drawn_round(number) for number in range(first, first + 40)}
    soak.replayed = soak.struck = 0
    wrong = {number: soak.play(round_) for number, round_ in rounds.items()}
    assert {number: (rounds[number], each) for number, each in wrong.items() if each} == {}
    assert soak.replayed > 5  # recorded steps and faults are among them
    assert soak.struck > 2


KEPT = []


def double_a_weight(model):
    model.proj_out.weight.data.mul_(2)


def double_the_output(model):
    model.register_forward_hook(lambda _model, _args, output: output[0] * 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "name", "at_the_end", "said"),
    [
        (Tape, "play", None, "call 0: other bits than the reference's"),
        (
            SparseSession,
            "close",
            lambda model: model.proj_out.weight.data.mul_(2),
            "left on the model",
        ),
        (SparseSession, "close", double_the_output, "other bits than stock"),
        (SparseSession, "close", lambda _: KEPT.append(torch.ones(1 << 20)), "bytes of tensors"),
        (SparseSession, "close", lambda _: torch.rand(1), "random state changed"),
        (SparseSession, "close", lambda _: warnings.filters.append(()), "warning filters changed"),
    ],
)
def test_what_a_round_leaves_is_found(soak, monkeypatch, target, name, at_the_end, said):
    settings = {"block_size": 16, "schedule.periodic.refresh_every": 6}
    round_ = drawn_round(0)
    vars(round_).update(family="flux", settings=settings, ways=("recorded",), calls=(Call(),))
    original = getattr(target, name)
    filters = warnings.filters[:]
    assert soak.play(round_) == []

    def planted(self, *args):
        if at_the_end is not None:
            original(self, *args)
            at_the_end(soak.pipes["flux"].transformer)

    monkeypatch.setattr(target, name, planted)
    problems = soak.play(round_)
    warnings.filters[:] = filters
    KEPT.clear()
    assert any(said in problem for problem in problems), problems
