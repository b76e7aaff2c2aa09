"""Schedulers: what calls the transformer once per step works, what calls it twice is refused."""

import diffusers
import pytest
import torch

import chipsparse
from chipsparse.pipelines.runner import RUNNER
from tests.pipelines.small_sparse import SPARSE
from tests.pipelines.test_families import FAMILIES
from tests.pipelines.tiny_runs import WAN
from tests.tiny_models import tiny_wan_pipeline

# Of diffusers' older schedulers, which mix tensors and NumPy arrays.
pytestmark = pytest.mark.filterwarnings("ignore:.*__array:DeprecationWarning")

TWICE = ["FlowMatchHeunDiscreteScheduler", "HeunDiscreteScheduler", "KDPM2DiscreteScheduler"]


def refusal(name):
    return pytest.raises(
        ValueError,
        match=rf"^{name} calls the transformer 2 times per denoising step, .* once",
    )


def test_what_calls_twice_per_step_is_refused_when_enabled_and_by_the_first_call():
    """The scheduler may be exchanged while enabled, in the middle of everything."""
    pipe = tiny_wan_pipeline()
    ran = []
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
    for name in TWICE:
        pipe.scheduler = getattr(diffusers, name)()
        with refusal(name):
            chipsparse.enable(pipe, WAN.SPARSE)
        assert RUNNER not in vars(pipe.transformer)
    pipe.scheduler = getattr(diffusers, TWICE[0])()
    assert WAN.generate(pipe).isfinite().all()  # unpatched, it is nobody's business


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
        (runner,) = handle._runners
        reader = runner.sparse.reader
        pipe.scheduler.set_timesteps(12)
        schedule = pipe.scheduler.timesteps
        for dtype in dtypes:
            for value in schedule:
                called = (value.expand(2).to(dtype) / scale).to(dtype)
                assert reader.scheduled_timestep(called, schedule) == float(value)
        own = reader.scheduled_timestep(torch.tensor([0.5]), None)
        # Without a schedule those that rise count down, as where they rise a generation begins.
        assert own == pytest.approx((-0.5 if name == "mochi" else 0.5) * scale)
