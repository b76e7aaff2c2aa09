"""The benchmark of equal work: what it counts, compares and makes of it, on random weights."""


import pytest
import torch

from benchmarks.computed_work import WorkCounter
from benchmarks.equal_work.work import DenseWork
from chipsparse.api import attach
from chipsparse.session import Session
from tests.pipelines.test_wan import SPARSE
from tests.tiny_models import PROMPT, tiny_flux_pipeline, tiny_wan_pipeline

SIZE = {"height": 64, "width": 64, "max_sequence_length": 16}


def generate(pipe, steps=6):
    frames = {"num_frames": 9} if hasattr(pipe, "video_processor") else {}
    return pipe(
        PROMPT,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
        num_inference_steps=steps,
        **SIZE,
        **frames,
    )


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
