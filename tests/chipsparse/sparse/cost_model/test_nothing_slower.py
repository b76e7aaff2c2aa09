"""No part of a layer that runs sparse would be faster dense, whatever the sizes."""

import math
import random
import statistics
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from chipsparse import SparsityConfig
from chipsparse.config import PARTS, Action
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.report.generation import GenerationReport
from chipsparse.skip.position import Place
from chipsparse.sparse.cache.memory_plan import MemoryDemand
from chipsparse.sparse.cache.tensors import MLPCache
from chipsparse.sparse.cost_model.layer_times import Rates, captures, known_rates, part_times
from chipsparse.sparse.graphs.cuda_capture import CudaCapturer
from chipsparse.sparse.layers.mlp import dense_step
from chipsparse.sparse.layers.mlp_weights import MLPWeights
from tests.chipsparse.sparse.sessions import Session

MOST_SLOWER = 1.05
STEPS = 40  # most of them sparse, so that those of short sequences are captured


def time_in_turn(calls, device, *, captured):
    """Milliseconds of each call: medians of five rounds in which all take turns.

    What changes while they run, such as the clocks of a GPU, so meets all of them alike. Calls of
    less than 2 ms are repeated, and the host runs ahead of them as far as it can.
    """
    runs = []
    with torch.cuda.device(device):
        for call in calls:
            call()  # compiles, tunes, allocates
            launches = min(100, math.ceil(2 / max(elapsed_ms(call), 1e-3)))
            run = partial(repeat, call, launches)
            if captured:
                run = CudaCapturer().capture(run)[1].replay
            runs.append((run, launches))
        rounds = [[elapsed_ms(run) / launches for run, launches in runs] for _ in range(5)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def repeat(call, launches):
    for _ in range(launches):
        call()


def elapsed_ms(call):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


class OneLayer:
    """The sparse step of a model of one layer, its sizes and shares drawn at random.

    It has up to ``largest`` tokens; without ``rates`` nothing is left dense.
    """

    def __init__(self, seed, *, largest, rates, device, dtype):
        draw = random.Random(seed)
        tokens = round(2 ** draw.uniform(6, largest.bit_length() - 1)) + draw.randrange(64)
        heads = draw.choice((1, 2, 4, 8, 16))
        head_dim = draw.choice((64, 128))
        channels = heads * head_dim
        neurons = heads * head_dim * draw.choice((1, 2, 4))
        shape = draw.choice((1, 1, 2)), heads, tokens, head_dim
        kind = LayerKind("block", 1, neurons)
        layout = ModelLayout((kind,), heads, head_dim, shape[0], ((1, 1, tokens),))
        options = {
            "attention.density": draw.choice((0.05, 0.1, 0.3, 0.6)),
            "mlp.density": draw.choice((0.1, 0.3, 0.6)),
            "cuda_graphs": draw.choice(("auto", "never")),
            "tile": None,
            "schedule.actions": ["dense", "refresh", "sparse"],
        }
        self.config = SparsityConfig().override(options)
        self.report = GenerationReport()
        self.session = Session(self.config, self.report)
        normal = partial(torch.randn, device=device, dtype=dtype)
        self.query, self.key, self.value = normal(3, *shape)
        self.hidden = normal(shape[0], tokens, channels)
        up = normal(neurons, channels) / channels**0.5
        down = (normal(neurons, channels) / neurons**0.5).t()
        self.weights = MLPWeights(up, None, down, None, "gelu-tanh")
        self.steps = {"attention": self.attend, "mlp": self.feed_forward}
        for step in range(3):
            context = Place(1, step, "cond", STEPS)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("chipsparse.sparse.session.known_rates", lambda *_: rates)
                self.session.begin(context, layout, device, lambda: MemoryDemand(dtype))
            for run in self.steps.values():
                run()
            if step < 2:
                self.session.end(self.hidden)
        self.sparse = {
            entry.part
            for entry in self.report.steps[-1].layers
            if entry.action is Action.SPARSE and entry.reason is None
        }

    def attend(self):
        state = self.session.state
        tensors = (self.query, self.key, self.value)
        dense = lambda *tensors: F.scaled_dot_product_attention(*tensors[:3])  # noqa: E731
        return self.session.attention[0](state, *tensors, scale=None, unpatched=dense)

    def feed_forward(self):
        return self.session.mlp[0](self.session.state, self.hidden, self.weights)


@pytest.mark.parametrize("seed", range(6))
@torch.inference_mode()
def test_what_the_rates_say_is_done(seed):
    """A device so slow that launches take no time beside its work, or so fast that nothing pays."""
    make = partial(OneLayer, seed, largest=256, device=torch.device("cpu"), dtype=torch.float32)
    known = Rates()
    slow = replace(known, attention=1e7, linear=1e7, memory=1e12, multiprocessors=1)
    for rates in (slow, known):
        layer = make(rates=rates)
        plan = layer.session.plan
        dtype = torch.float32
        times = part_times(plan, rates=rates, dtype=dtype, captured=captures(plan, dtype, rates))
        pays = {part for (_, part), seconds in times.items() if seconds.pays}
        assert layer.sparse == pays
        assert (pays == set()) == (rates is known)
        notes = [note.split(" runs dense")[0].lower() for note in layer.report.notes]
        assert set(notes) == set(PARTS) - pays
    assert make(rates=None).sparse == set(PARTS)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(24))
@torch.inference_mode()
def test_no_sparse_step_is_slower(seed):
    device = torch.device("cuda", 0)
    dtype = torch.bfloat16
    rates = known_rates(device, dtype)
    if rates is None:
        pytest.skip("the rates of this GPU are not known")
    make = partial(OneLayer, seed, largest=40_000, device=device, dtype=dtype)
    layer = make(rates=rates)
    plain = make(rates=replace(rates, attention=1e20, linear=1e20, memory=1e20))  # nothing pays
    assert plain.sparse == set()
    plan = layer.session.plan
    captured = captures(plan, dtype, rates)
    times = part_times(plan, rates=rates, dtype=dtype, captured=captured)
    for part in layer.sparse:
        calls = (layer.steps[part], plain.steps[part])
        sparse_ms, dense_ms = time_in_turn(calls, device, captured=captured)
        assert sparse_ms <= MOST_SLOWER * dense_ms, (part, plan.layout, times[0, part])


@pytest.mark.gpu
@torch.inference_mode()
def test_a_recorded_dense_step_is_as_fast_with_any_count_of_tokens():
    device = torch.device("cuda", 0)
    normal = partial(torch.randn, device=device, dtype=torch.bfloat16)
    up = normal(8192, 2048) / 45
    down = normal(2048, 8192) / 90
    weights = MLPWeights(up, normal(8192), down, normal(2048), "gelu-tanh")

    def full(tokens):
        hidden = normal(1, tokens, 2048)
        return partial(dense_step, MLPCache(), hidden, weights, block_size=128, backend=None)

    odd, even = time_in_turn([full(16_381), full(16_384)], device, captured=False)
    assert odd <= 1.15 * even
