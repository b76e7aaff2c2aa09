"""Schedulers: what calls the transformer once per step works, what calls it twice is refused."""

import diffusers
import pytest
import torch

import chipsparse
from chipsparse.pipelines.adapter import ADAPTER
from tests.pipelines import test_flux as flux
from tests.pipelines import test_wan as wan
from tests.pipelines.model_state import actions
from tests.tiny_models import tiny_flux_pipeline, tiny_wan_pipeline
from tests.variants import slow, slow_unless

# Of diffusers' older schedulers, which mix tensors and NumPy arrays.
pytestmark = pytest.mark.filterwarnings("ignore:.*__array:DeprecationWarning")

TWICE = [
    "FlowMatchHeunDiscreteScheduler",
    "HeunDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
]
MODELS = {"wan": (tiny_wan_pipeline, wan), "flux": (tiny_flux_pipeline, flux)}
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}


def refusal(name):
    return pytest.raises(
        ValueError, match=rf"^{name} calls the transformer 2 times per denoising step, .* once"
    )


@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("model", slow_unless(("flux",), MODELS))
def test_what_calls_twice_per_step_is_refused_when_enabled(model, name):
    make, module = MODELS[model]
    pipe = make(scheduler=getattr(diffusers, name)())
    with refusal(name):
        chipsparse.enable(pipe, module.SPARSE)
    assert ADAPTER not in vars(pipe.transformer)


@pytest.mark.parametrize("name", [TWICE[0], slow(TWICE[1])])
def test_what_calls_twice_per_step_is_refused_by_the_first_call(name):
    """The scheduler may be exchanged while enabled, in the middle of everything."""
    pipe = tiny_wan_pipeline()
    euler = pipe.scheduler
    ran = []
    with chipsparse.enable(pipe, wan.SPARSE) as handle:
        expected = wan.generate(pipe)
        pipe.scheduler = getattr(diffusers, name)()
        hook = pipe.transformer.register_forward_hook(lambda *call: ran.append(call))
        with refusal(name):
            wan.generate(pipe)
        assert ran == []
        hook.remove()
        pipe.scheduler = euler
        assert torch.equal(wan.generate(pipe), expected)
        assert handle.report.fallbacks == []
    pipe.scheduler = getattr(diffusers, name)()
    assert wan.generate(pipe).isfinite().all()  # unpatched, it is nobody's business


@pytest.mark.parametrize(
    "scheduler",
    [
        slow(diffusers.UniPCMultistepScheduler(solver_order=2, **FLOW)),
        diffusers.UniPCMultistepScheduler(solver_order=3, **FLOW),
        slow(diffusers.DPMSolverMultistepScheduler(solver_order=2, **FLOW)),
        diffusers.DPMSolverMultistepScheduler(solver_order=3, **FLOW),
        diffusers.DEISMultistepScheduler(**FLOW),
    ],
    ids=lambda scheduler: f"{type(scheduler).__name__} {scheduler.config.solver_order}",
)
def test_multistep_solvers_call_once_per_step(scheduler):
    pipe = tiny_wan_pipeline(scheduler=scheduler)
    expected = wan.generate(pipe)
    with chipsparse.enable(pipe, wan.EXACT) as handle:
        found = wan.generate(pipe)
    made = ["dense", "refresh", "sparse", "sparse", "sparse", "refresh", "sparse"]
    assert actions(handle) == actions(handle, "uncond") == made
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
