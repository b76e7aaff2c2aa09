"""Under ``torch.autocast`` a patched model computes what the stock one does, and stays sparse."""

import contextlib

import pytest
import torch

import chipsparse
from chipsparse import SparsityConfig
from chipsparse.plan import Action
from tests.pipelines import test_flux as flux
from tests.pipelines import test_flux2 as flux2
from tests.pipelines import test_wan as wan
from tests.pipelines.model_state import actions
from tests.tiny_models import tiny_flux_pipeline, tiny_wan_pipeline
from tests.variants import slow

MODELS = {
    "flux": (tiny_flux_pipeline, flux),
    "flux2": (flux2.tiny_flux2_pipeline, flux2),
    "wan": (tiny_wan_pipeline, wan),
}
BF16 = torch.autocast("cpu", torch.bfloat16)
# Two generations in bf16 that compute the same sums in another order differ by as much.
CLOSE = 2e-2

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")


def error(found, expected):
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("flux", torch.float32),
        slow("flux", torch.float16),
        slow("flux2", torch.float32),
        ("wan", torch.float32),
    ],
)
def test_sparse_steps_give_what_the_stock_model_gives(name, weights):
    make, module = MODELS[name]
    pipe = make()
    pipe.transformer.to(weights)
    with BF16:
        expected = module.generate(pipe)
        with chipsparse.enable(pipe, SparsityConfig.dense()):
            assert torch.equal(module.generate(pipe), expected)
        with chipsparse.enable(pipe, module.EXACT) as handle:
            found = module.generate(pipe)
        assert handle.report.fallbacks == []
        last = [record for record in handle.report.steps if record.action is Action.SPARSE][-1]
        assert last.attention_kept == last.mlp_kept == 1
        assert handle.report.dtype == torch.bfloat16
        assert error(found, expected) < CLOSE
        assert found.dtype == expected.dtype
    with torch.no_grad():
        parameters = {parameter.dtype for parameter in pipe.transformer.parameters()}
    assert parameters == {weights}


def test_attention_alone():
    pipe = tiny_flux_pipeline()
    with BF16:
        expected = flux.generate(pipe)
        with chipsparse.enable(pipe, flux.EXACT.override({"mlp.density": "dense"})) as handle:
            assert error(flux.generate(pipe), expected) < CLOSE
    assert handle.report.fallbacks == []


def test_caches_are_half_as_large_as_in_float32():
    pipe = tiny_flux_pipeline()
    sizes = []
    with chipsparse.enable(pipe, flux.SPARSE) as handle:
        for context in (contextlib.nullcontext(), BF16):
            with context:
                flux.generate(pipe)
            sizes.append(handle.report.cache_bytes)
    assert 0.45 * sizes[0] < sizes[1] < 0.75 * sizes[0]


def test_caches_start_anew_where_autocast_comes_and_goes():
    """Entered for one step alone, behind which the latents are float32 again."""
    pipe = tiny_flux_pipeline()
    entered = contextlib.ExitStack()

    def enter_once(_pipe, step, _timestep, tensors):
        entered.close()
        if step == 4:
            entered.enter_context(BF16)
        return {"latents": tensors["latents"].float()}

    def generate():
        with entered:
            return flux.generate(pipe, callback_on_step_end=enter_once, num_inference_steps=9)

    expected = generate()
    with chipsparse.enable(pipe, flux.EXACT) as handle:
        found = generate()
    assert actions(handle)[:8] == [
        "dense",
        "refresh",
        "sparse",
        "sparse",
        "sparse",
        "dense",  # under autocast
        "dense",
        "refresh",
    ]
    assert [sentence.split(": ")[1] for sentence in handle.report.fallbacks] == [
        "the model goes on in bfloat16 on cpu, under torch.autocast instead of float32 on cpu",
        "the model goes on in float32 on cpu instead of bfloat16 on cpu, under torch.autocast",
    ]
    assert error(found, expected) < CLOSE


@pytest.mark.slow
def test_blocks_that_are_compiled():
    pipe = tiny_flux_pipeline()
    torch._dynamo.reset()
    with BF16:
        expected = flux.generate(pipe)
        with chipsparse.enable(pipe, flux.EXACT) as handle:
            for block in pipe.transformer.transformer_blocks:
                block.compile(backend="aot_eager", fullgraph=True)
            assert error(flux.generate(pipe), expected) < CLOSE
        assert handle.report.fallbacks == []
    torch._dynamo.reset()
