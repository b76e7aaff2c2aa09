"""Under ``torch.autocast`` a patched model computes what the stock one does, and stays sparse."""

import contextlib

import pytest
import torch

import chipsparse
from chipsparse import SparsityConfig
from tests.pipelines.model_state import actions
from tests.pipelines.small_sparse import error
from tests.pipelines.tiny_runs import FLUX, MODELS
from tests.tiny_models import tiny_flux_pipeline
from tests.variants import slow

BF16 = torch.autocast("cpu", torch.bfloat16)
# Two generations in bf16 that compute the same sums in another order differ by as much.
CLOSE = 2e-2

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")


@pytest.mark.parametrize(
    ("name", "weights"),
    [("flux", torch.float32), slow("flux", torch.float16), ("wan", torch.float32)],
)
def test_sparse_steps_give_what_the_stock_model_gives(name, weights):
    pipe = MODELS[name].make()
    run = MODELS[name].generate
    pipe.transformer.to(weights)
    with BF16:
        expected = run(pipe)
        with chipsparse.enable(pipe, SparsityConfig.dense()):
            assert torch.equal(run(pipe), expected)
        with chipsparse.enable(pipe, FLUX.EXACT) as handle:
            found = run(pipe)
    assert handle.report.fallbacks == []
    assert {r.mlp_kept for r in handle.report.steps if r.action == "sparse"} == {1}
    assert handle.report.dtype == "bfloat16"  # of the caches
    assert error(found.float(), expected.float()) < CLOSE
    assert found.dtype == expected.dtype
    assert {parameter.dtype for parameter in pipe.transformer.parameters()} == {weights}


def test_caches_start_anew_where_autocast_comes_and_goes():
    """Entered for one step alone, behind which the latents are float32 again."""
    pipe = tiny_flux_pipeline()
    entered = contextlib.ExitStack()

    def enter_once(_pipe, step, _timestep, tensors):
        entered.close()
        if step == 4:
            entered.enter_context(BF16)
        return {"latents": tensors["latents"].float()}

    def run():
        with entered:
            return FLUX.generate(pipe, callback_on_step_end=enter_once, num_inference_steps=9)

    expected = run()
    with chipsparse.enable(pipe, FLUX.EXACT) as handle:
        found = run()
    before = ["dense", "refresh", *["sparse"] * 3]
    under = ["dense"]
    after = ["dense", "refresh"]
    assert actions(handle)[:8] == before + under + after
    assert [sentence.split(": ")[1] for sentence in handle.report.fallbacks] == [
        "the model goes on in bfloat16 on cpu, under torch.autocast instead of float32 on cpu",
        "the model goes on in float32 on cpu instead of bfloat16 on cpu, under torch.autocast",
    ]
    assert error(found, expected) < CLOSE
