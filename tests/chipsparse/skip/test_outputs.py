"""What skipped calls are made from, without a model."""

import gc
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from chipsparse.skip.outputs import HeldOutputs, flatten, rebuild


def tensors(dtype, count=3):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 5, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("t0", "t1", "t"), [(999.0, 750.5, 500.0), (0.1, 0.2, 0.7)])
def test_a_forecast_is_rounded_once(dtype, t0, t1, t):
    first, old, new = tensors(dtype)
    held = HeldOutputs()
    for time, output in ((1.0, first), (t0, old), (t1, new)):
        held.hold("cond", time, output, both=True)
    reach = 0.5 * held.reach("cond", t)
    assert reach == pytest.approx(0.5 * (t - t1) / (t1 - t0), rel=1e-12)
    result = held.output("cond", reach)
    change = new.double() - old.double()
    assert result.dtype == dtype
    rounding = {"rtol": torch.finfo(dtype).eps, "atol": 2 * torch.finfo(dtype).eps}
    torch.testing.assert_close(result.double(), new.double() + reach * change, **rounding)


def test_branches_are_kept_apart():
    held = HeldOutputs()
    cond, uncond, other = tensors(torch.float32)
    for branch, output in (("cond", cond), ("uncond", uncond)):
        held.hold(branch, 3.0, output, both=True)
        assert held.reach(branch, 1.0) == 0.0  # a single output says nothing of its change
    held.hold("cond", 2.0, other, both=True)
    assert (held.reach("cond", 1.0), held.reach("uncond", 1.0)) == (1.0, 0.0)
    torch.testing.assert_close(held.output("cond", 1.0), 2 * other - cond)
    assert torch.equal(held.output("uncond"), uncond)
    held.drop("cond")
    with pytest.raises(KeyError):
        held.output("cond")


def test_no_line_through_one_timestep_nor_through_outputs_that_were_not_asked_for():
    held = HeldOutputs()
    old, new, _ = tensors(torch.float32)
    held.hold("cond", 999.0, old, both=True)
    held.hold("cond", 999.0, new, both=True)  # schedulers round their first timesteps
    assert held.reach("cond", 998.0) == 0.0
    held.hold("cond", 998.0, expected := new.clone())
    assert held.reach("cond", 997.0) == 0.0
    expected.zero_()  # what is held and what is given are tensors of their own
    held.output("cond").zero_()
    assert torch.equal(held.output("cond"), new)


class Pair(NamedTuple):
    """A result with names."""

    first: Any
    second: Any


@dataclass
class Streams:
    """A result of somebody's own class."""

    video: torch.Tensor
    sound: list[torch.Tensor] | None = None
    rate: int = 40


def scaled(result, factor):
    """A result with all tensors times a factor, by its own class."""
    tensors, form = flatten(result)
    return rebuild(form, tuple(tensor * factor for tensor in tensors))


ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    "result",
    [
        pytest.param(ONES, id="tensor"),
        pytest.param((ONES,), id="tuple"),
        pytest.param((ONES, None, [ONES, 2 * ONES]), id="nested, with None"),
        pytest.param([ONES, 2 * ONES], id="list"),
        pytest.param({"b": ONES, "a": 2 * ONES, "size": (3, 4)}, id="dict"),
        pytest.param(OrderedDict(sample=ONES), id="ordered dict"),
        pytest.param(Pair(ONES, 7), id="named tuple"),
        pytest.param(Transformer2DModelOutput(sample=ONES), id="output of diffusers"),
        pytest.param(Transformer2DModelOutput(sample=[ONES, 2 * ONES]), id="its list"),
        pytest.param(Streams(ONES, [2 * ONES], 48), id="dataclass"),
        pytest.param((Streams(ONES),), id="dataclass in a tuple"),
    ],
)
def test_a_result_of_any_form_is_made_again(result):
    tensors, form = flatten(result)
    assert form == flatten(scaled(result, 3.0))[1]
    again = rebuild(form, tensors)
    assert type(again) is type(result)
    assert repr(again) == repr(result)
    others, _ = flatten(scaled(result, 3.0))
    assert all(torch.equal(3.0 * old, new) for old, new in zip(tensors, others, strict=True))


def test_results_of_other_forms_are_told_apart():
    forms = [
        flatten(result)[1]
        for result in (ONES, (ONES,), [ONES], (ONES, None), (ONES, 1), (ONES, 2), Streams(ONES))
    ]
    assert all((one == other) is (one is other) for one in forms for other in forms)


def test_an_object_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match="the model returns a Generator"):
        flatten((ONES, torch.Generator()))


def test_streams_are_held_and_forecast_each_by_itself():
    held = HeldOutputs()
    held.hold("cond", 3.0, Streams(ONES, [2 * ONES]), both=True)
    held.hold("cond", 2.0, given := Streams(2 * ONES, [6 * ONES]), both=True)
    given.video.zero_()  # what is held is a copy
    forecast = held.output("cond", 1.0)
    assert isinstance(forecast, Streams)
    assert torch.equal(forecast.video, 3 * ONES)
    assert torch.equal(forecast.sound[0], 10 * ONES)
    assert torch.equal(held.output("cond").video, 2 * ONES)


@pytest.mark.parametrize("other", [(ONES,), torch.ones(2, 4), ONES.double()])
def test_no_line_through_outputs_of_two_forms(other):
    held = HeldOutputs()
    held.hold("cond", 3.0, other, both=True)
    held.hold("cond", 2.0, ONES, both=True)
    assert held.reach("cond", 1.0) == 0.0


def test_whole_numbers_are_given_again():
    held = HeldOutputs()
    for time, count in ((3.0, 5), (2.0, 9)):
        held.hold("cond", time, (ONES, torch.tensor(count)), both=True)
    assert held.output("cond", 1.0)[1] == 9


def test_a_rebuilt_result_is_freed_with_its_last_use():
    tensors, form = flatten((ONES.clone(),))
    seen = weakref.ref(tensors[0])
    gc.disable()
    try:
        rebuild(form, tensors)
        del tensors
        assert seen() is None
    finally:
        gc.enable()
