"""Schedulers with another flow shift: their noise levels, and those that have none."""

import math

import diffusers
import numpy as np
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler as Euler
from diffusers import UniPCMultistepScheduler as UniPC

from chipsparse.pipelines.flow_shift import with_flow_shift

STEPS = 7
TRAINED = 1000  # levels
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}


def shifted(levels, shift):
    return shift * levels / (1 + (shift - 1) * levels)


def sigmas(scheduler):
    scheduler.set_timesteps(STEPS)
    return scheduler.sigmas.double().numpy()


EULER = Euler(shift=3.0, num_train_timesteps=TRAINED)
UNIPC = UniPC(**FLOW, flow_shift=3.0, solver_order=3)


@pytest.mark.parametrize("own", [EULER, UNIPC], ids=["euler", "unipc"])
@pytest.mark.parametrize("shift", [0.5, 1, 6.0])
def test_levels_of_another_shift(own, shift):
    made = with_flow_shift(own, shift)
    if own is EULER:  # diffusers also shifts the least level, before it spaces those above it
        levels = np.linspace(1, shifted(1 / TRAINED, shift), STEPS)
    else:
        levels = np.linspace(1, 1 / TRAINED, STEPS + 1)[:-1]
    assert sigmas(made) == pytest.approx([*shifted(levels, shift), 0], abs=2e-6)
    if own is EULER:
        assert made.timesteps.numpy() == pytest.approx(TRAINED * shifted(levels, shift), abs=1e-3)
    assert sigmas(own) != pytest.approx(sigmas(made), abs=1e-2)
    assert type(made) is type(own)
    differing = {name for name, value in made.config.items() if own.config[name] != value}
    assert differing - {"_use_default_values"} in ({"shift"}, {"flow_shift"})


@pytest.mark.parametrize("shift", [0, 0.0, -3.0, math.nan, math.inf])
def test_what_is_no_shift(shift):
    with pytest.raises(ValueError, match=r"^the flow shift must be above 0 and finite, got "):
        with_flow_shift(Euler(shift=3.0), shift)


@pytest.mark.parametrize(
    ("scheduler", "sentence"),
    [
        (Euler(use_dynamic_shifting=True), "takes its flow shift from the size here"),  # as FLUX
        (UniPC(**FLOW, use_dynamic_shifting=True), "takes its flow shift from the size here"),
        (UniPC(**FLOW, use_karras_sigmas=True), r"spaces its noise .* \(use_karras_sigmas\)"),
        (UniPC(), "has no flow shift"),
        (diffusers.DDIMScheduler(), "has no flow shift"),
        (diffusers.CogVideoXDDIMScheduler(), "has no flow shift"),
    ],
)
def test_schedulers_without_one(scheduler, sentence):
    with pytest.raises(ValueError, match=f"^{type(scheduler).__name__} {sentence}"):
        with_flow_shift(scheduler, 6.0)
