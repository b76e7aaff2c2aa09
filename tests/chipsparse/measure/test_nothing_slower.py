"""No part of a layer that runs sparse would be faster dense, whatever the sizes."""

import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from chipsparse import SparsityConfig
from chipsparse.cache.memory_plan import MemoryDemand
from chipsparse.cache.tensors import MLPCache
from chipsparse.config import MLPConfig
from chipsparse.experiments.timing import time_in_turn
from chipsparse.layers.mlp import dense_step
from chipsparse.layers.mlp_weights import MLPWeights
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.measure.known_times import KnownTimes
from chipsparse.measure.step_clock import HOST_SECONDS, StepClock
from chipsparse.plan import Action
from chipsparse.report.generation import GenerationReport
from chipsparse.session import Session
from chipsparse.step import StepContext

MOST_SLOWER = 1.05
STEPS = 40  # most of them sparse, so that those of short sequences are captured


class OneLayer:
    """The sparse step of a model of one layer, its sizes and shares drawn at random.

    Args:
        seed: of the draw.
        largest: tokens, up to so many.
        clock: of its session.
        device: where it runs.
        dtype: of its tensors.
    """

    def __init__(self, seed, *, largest, clock, device, dtype):
        draw = random.Random(seed)
        tokens = round(2 ** draw.uniform(6, largest.bit_length() - 1)) + draw.randrange(64)
        heads, head_dim = draw.choice((1, 2, 4, 8, 16)), draw.choice((64, 128))
        channels, neurons = heads * head_dim, heads * head_dim * draw.choice((1, 2, 4))
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
        self.session = Session(self.config, self.report, clock=clock)
        normal = partial(torch.randn, device=device, dtype=dtype)
        self.query, self.key, self.value = normal(3, *shape)
        self.hidden = normal(shape[0], tokens, channels)
        self.weights = MLPWeights(
            normal(neurons, channels) / channels**0.5,
            None,
            (normal(neurons, channels) / neurons**0.5).t(),
            None,
            "gelu-tanh",
        )
        self.steps = {"attention": self.attend, "mlp": self.feed_forward}
        for step in range(3):
            context = StepContext(1, step, "cond", STEPS)
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
        state, tensors = self.session.state, (self.query, self.key, self.value)
        dense = lambda *tensors: F.scaled_dot_product_attention(*tensors[:3])  # noqa: E731
        return self.session.attention[0](state, *tensors, scale=None, unpatched=dense)

    def feed_forward(self):
        return self.session.mlp[0](self.session.state, self.hidden, self.weights)


@pytest.mark.parametrize("seed", range(6))
@torch.inference_mode()
def test_what_the_clock_says_is_done(seed):
    """A clock that is not true, so that both happen to any sizes."""
    draw, times = random.Random(seed), []

    def measure(calls, device, captured):
        for call in calls:
            call()
        times.append([draw.uniform(0.5, 2.0), 1.0])
        return times[-1]

    clock = StepClock(measure=measure, device_type="cpu")
    device = torch.device("cpu")
    layer = OneLayer(seed, largest=256, clock=clock, device=device, dtype=torch.float32)
    most = 0.95 if layer.session.plan.captures_steps() else 0.95 - 1e3 * HOST_SECONDS
    pays = {part for part, (sparse, _) in zip(layer.steps, times, strict=True) if sparse <= most}
    assert layer.sparse == pays
    notes = [note.split(" runs dense")[0] for note in layer.report.notes]
    assert {note.lower() for note in notes} == layer.steps.keys() - pays
    for part, (sparse, dense) in zip(layer.steps, times, strict=True):
        assert part not in pays or sparse <= MOST_SLOWER * dense


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(24))
@torch.inference_mode()
def test_no_sparse_step_is_slower(seed, tmp_path):
    device = torch.device("cuda", 0)
    make = partial(OneLayer, seed, largest=40_000, device=device, dtype=torch.bfloat16)
    layer = make(clock=StepClock(KnownTimes(tmp_path)))
    # Dense as a session runs it, too: nothing pays by this clock.
    plain = make(clock=StepClock(measure=lambda *_: [2.0, 1.0]))
    assert plain.sparse == set()
    captured = layer.session.plan.captures_steps()
    for part in layer.sparse:
        calls = (layer.steps[part], plain.steps[part])
        sparse_ms, dense_ms = time_in_turn(calls, device, captured=captured)
        assert sparse_ms <= MOST_SLOWER * dense_ms, (part, layer.session.plan.layout)


@pytest.mark.gpu
@torch.inference_mode()
def test_a_recorded_dense_step_is_as_fast_with_any_count_of_tokens():
    device = torch.device("cuda", 0)
    normal = partial(torch.randn, device=device, dtype=torch.bfloat16)
    weights = MLPWeights(
        normal(8192, 2048) / 45, normal(8192), normal(2048, 8192) / 90, normal(2048), "gelu-tanh"
    )

    def full(tokens):
        hidden = normal(1, tokens, 2048)
        return partial(dense_step, MLPCache(), hidden, weights, config=MLPConfig(), backend=None)

    odd, even = time_in_turn([full(16_381), full(16_384)], device, captured=False)
    assert odd <= 1.15 * even
