"""The benchmark of equal work: what it counts, compares and makes of it, on random weights."""

import json
from collections import Counter

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.computed_work import WorkCounter
from benchmarks.equal_work import curves, figure
from benchmarks.equal_work import run as bench
from benchmarks.equal_work.beneath_hooks import with_cache
from benchmarks.equal_work.curves import OURS, SKIPS, at_share, chosen, lead, qualities
from benchmarks.equal_work.methods import entries
from benchmarks.equal_work.records import joined
from benchmarks.equal_work.tables import quality_rows, step_rows
from benchmarks.equal_work.work import DenseWork, attention_of, blocks_of
from chipsparse.api import attach
from chipsparse.pipelines.diffusers_caches import CacheRun
from chipsparse.session import Session
from tests.pipelines.test_wan import SPARSE
from tests.tiny_models import PROMPT, tiny_flux_pipeline, tiny_wan_pipeline

SIZE = {"height": 64, "width": 64, "max_sequence_length": 16}
STEPS = 12


def generate(pipe, steps=6):
    frames = {"num_frames": 9} if hasattr(pipe, "video_processor") else {}
    found = pipe(
        PROMPT,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
        num_inference_steps=steps,
        **SIZE,
        **frames,
    )
    return found.frames if frames else found.images


def as_it_is(forward):
    return forward


# The work.


def test_products_and_attention_are_counted_in_a_modules_calls_alone():
    linear, counter = torch.nn.Linear(5, 7), WorkCounter()
    x, q = torch.rand(2, 3, 5), torch.rand(1, 2, 11, 8)

    class Both(torch.nn.Module):
        def forward(self, q):
            linear(x)
            return torch.nn.functional.scaled_dot_product_attention(q, q[:, :, :4], q[:, :, :4])

    module = Both()
    with torch.no_grad(), counter.of(module):
        linear(x)
        module(q)
        x @ x.mT
    assert counter.multiply_adds == 2 * 3 * 5 * 7 + 2 * (2 * 11 * 4 * 8)
    with torch.no_grad(), counter.of(module):
        pass
    assert counter.multiply_adds == 0


@pytest.mark.parametrize("make", [tiny_wan_pipeline, tiny_flux_pipeline])
@pytest.mark.parametrize("rule", ["difference", "merge", "kept_only", "reuse"])
def test_the_work_of_sparse_steps_is_what_pytorch_computes(make, rule):
    pipe, counter = make(), WorkCounter()
    dense = DenseWork.measured(pipe.transformer, lambda: generate(pipe, 2))
    config = SPARSE.override(
        {
            "attention.delta_rule": rule,
            "mlp.enabled": rule != "difference",
            "schedule.actions": ("dense", "refresh", "sparse", "skip", "refresh", "sparse"),
        }
    )
    handle = attach(pipe, config, counter.sessions(Session))
    with counter.of(pipe.transformer):
        generate(pipe)
    handle.disable()
    assert dense.of_report(handle.report) == pytest.approx(counter.multiply_adds, rel=0.01)


SOME = {
    ("MagCache", "first 10%, at most 5 skipped", "threshold 0.5"),
    ("SeaCache", "order 1, first 1, at most 3 skipped", "threshold 1"),
    ("FirstBlockCache", "", "threshold 0.4"),
    ("TaylorSeer", "whole steps, first 3, order 1", "every 3"),
    ("TaylorSeer", "attention, first 3, order 1", "every 3"),
    ("PAB", "timesteps 950 to 0", "every 3"),
    ("FasterCache", "timesteps 950 to 0", "every 3"),
}


@pytest.fixture(scope="module")
def wan():
    return tiny_wan_pipeline()


@pytest.fixture(scope="module")
def dense_work(wan):
    return DenseWork.measured(wan.transformer, lambda: generate(wan, 2))


@pytest.mark.parametrize("name", sorted(SOME), ids=lambda name: ", ".join(name))
def test_the_work_of_caches_is_what_pytorch_computes(name, wan, dense_work):
    """Compiled beneath their hooks, too, where they give the same and leave nothing behind."""
    (entry,) = (each for each in entries(STEPS, []) if (each.method, *each.curve[1:], each.setting) == name)
    run = CacheRun(wan, STEPS, tuple(1 - 0.01 * i for i in range(STEPS)))
    counter, made = WorkCounter(), Counter()
    with with_cache(run, entry, made, as_it_is), counter.of(wan.transformer):
        expected = generate(wan, STEPS)
    assert counter.multiply_adds < 0.95 * 2 * STEPS * dense_work.call
    found = dense_work.of_calls(made, 2 * STEPS)
    assert found == pytest.approx(counter.multiply_adds, rel=1e-6)

    ran = []

    def backend(graph, _):
        def compiled(*args):
            ran.append(graph)
            return graph(*args)

        return compiled

    again = Counter()
    with torch._dynamo.config.patch(**bench.COMPILATIONS):
        torch._dynamo.reset()
        with with_cache(run, entry, again, lambda f: torch.compile(f, backend=backend)):
            torch.testing.assert_close(generate(wan, STEPS), expected, atol=1e-5, rtol=1e-5)
    assert again == made
    blocks = blocks_of(wan.transformer)
    # Each computed block ran as compiled code, and so did its attention where that is hooked.
    least = sum(again[block] for block in blocks)
    if entry.reuses_attention:
        least += sum(again[attention_of(block)] for block in blocks)
    assert len(ran) >= least
    assert not any("forward" in vars(module) for module in wan.transformer.modules())
