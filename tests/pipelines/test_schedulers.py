"""Schedulers: what calls the transformer once per step works, what calls it twice is refused."""

import diffusers
import pytest
import torch

import chipsparse
from chipsparse.pipelines.adapter import ADAPTER
from tests.pipelines.model_state import actions
from tests.pipelines.small_sparse import SPARSE, assert_close
from tests.pipelines.test_families import FAMILIES
from tests.pipelines.tiny_runs import FLUX, WAN
from tests.tiny_models import tiny_flux_pipeline, tiny_flux_transformer, tiny_wan_pipeline
from tests.variants import slow

# Of diffusers' older schedulers, which mix tensors and NumPy arrays.
pytestmark = pytest.mark.filterwarnings("ignore:.*__array:DeprecationWarning")

TWICE = ["FlowMatchHeunDiscreteScheduler", "HeunDiscreteScheduler", "KDPM2DiscreteScheduler"]
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}


def refusal(name):
    return pytest.raises(
        ValueError, match=rf"^{name} calls the transformer 2 times per denoising step, .* once"
    )


@pytest.mark.parametrize("name", TWICE)
def test_what_calls_twice_per_step_is_refused_when_enabled(name):
    pipe = tiny_flux_pipeline(scheduler=getattr(diffusers, name)())
    with refusal(name):
        chipsparse.enable(pipe, FLUX.SPARSE)
    assert ADAPTER not in vars(pipe.transformer)


def test_what_calls_twice_per_step_is_refused_by_the_first_call():
    """The scheduler may be exchanged while enabled, in the middle of everything."""
    pipe, ran = tiny_wan_pipeline(), []
    euler = pipe.scheduler
    with chipsparse.enable(pipe, WAN.SPARSE) as handle:
        expected = WAN.generate(pipe)
        pipe.scheduler = getattr(diffusers, TWICE[0])()
        hook = pipe.transformer.register_forward_hook(lambda *call: ran.append(call))
        with refusal(TWICE[0]):
            WAN.generate(pipe)
        assert ran == []
        hook.remove()
        pipe.scheduler = euler
        assert torch.equal(WAN.generate(pipe), expected)
        assert handle.report.fallbacks == []
    pipe.scheduler = getattr(diffusers, TWICE[0])()
    assert WAN.generate(pipe).isfinite().all()  # unpatched, it is nobody's business


@pytest.mark.parametrize(
    "scheduler",
    [
        diffusers.UniPCMultistepScheduler(solver_order=3, **FLOW),
        slow(diffusers.DPMSolverMultistepScheduler(solver_order=3, **FLOW)),
        slow(diffusers.DEISMultistepScheduler(**FLOW)),
    ],
    ids=lambda scheduler: f"{type(scheduler).__name__} {scheduler.config.solver_order}",
)
def test_multistep_solvers_call_once_per_step(scheduler):
    pipe = tiny_wan_pipeline(scheduler=scheduler)
    expected = WAN.generate(pipe)
    with chipsparse.enable(pipe, WAN.EXACT) as handle:
        found = WAN.generate(pipe)
    made = ["dense", "refresh", "sparse", "sparse", "sparse", "refresh", "sparse"]
    assert actions(handle) == actions(handle, "uncond") == made
    assert_close(found, expected, 2e-4)


# Timesteps as pipelines pass them.


@pytest.mark.parametrize(
    ("name", "scale", "dtypes"),
    [
        ("flux", 1000, (torch.float32, torch.bfloat16, torch.float16)),
        ("hunyuan video 1.5", 1, (torch.float32, torch.bfloat16)),
        ("mochi", 1, (torch.float32, torch.bfloat16)),  # which rise
        ("wan 2.1", 1, (torch.float32,)),
    ],
)
def test_timesteps_are_read_as_pipelines_round_them(name, scale, dtypes):
    pipe = FAMILIES[name].make()
    with chipsparse.enable(pipe, SPARSE) as handle:
        (adapter,) = handle._adapters
        pipe.scheduler.set_timesteps(12)
        schedule = pipe.scheduler.timesteps
        for dtype in dtypes:
            for value in schedule:
                called = (value.expand(2).to(dtype) / scale).to(dtype)
                assert adapter.scheduled_timestep(called, schedule) == float(value)
        own = adapter.scheduled_timestep(torch.tensor([0.5]), None)
        assert abs(own) == pytest.approx(0.5 * scale)


def test_many_steps_in_half_precision_are_separate():
    """1,000 steps: neighbouring timesteps are the same number in bfloat16."""
    pipe = tiny_flux_pipeline(transformer=tiny_flux_transformer(num_layers=1, num_single_layers=1))
    for model in (pipe.transformer, pipe.text_encoder, pipe.text_encoder_2):
        model.to(torch.bfloat16)

    def stop(pipe, step, _t, tensors):
        pipe._interrupt = step == 6
        return tensors

    with chipsparse.enable(pipe, FLUX.SPARSE) as handle:
        call = {"num_inference_steps": 1000, "height": 8, "width": 8}
        FLUX.generate(pipe, **call, callback_on_step_end=stop)
    assert [record.step for record in handle.report.steps] == list(range(7))
    assert actions(handle)[:3] == ["dense", "refresh", "sparse"]


def test_timesteps_that_rise_are_no_new_generations():
    """A caller of Mochi's transformer without a scheduler: nothing else tells the step."""
    pipe = FAMILIES["mochi"].make()
    pipe.scheduler = None
    with chipsparse.enable(pipe, SPARSE) as handle, torch.no_grad():
        for step in range(4):
            pipe.transformer(
                hidden_states=torch.ones(1, 12, 1, 4, 4),
                encoder_hidden_states=torch.ones(1, 12, 16),
                timestep=torch.tensor([100.0 * step]),
                encoder_attention_mask=torch.ones(1, 12),
            )
        assert actions(handle, "call0") == ["dense", "refresh", "sparse", "sparse"]
