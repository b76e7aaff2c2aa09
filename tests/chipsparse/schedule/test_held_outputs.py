"""What skipped calls are made from, without a model."""

import pytest
import torch

from chipsparse.schedule.held_outputs import HeldOutputs


def tensors(dtype, count=3):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 5, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("times", [(999.0, 750.5, 500.0), (0.1, 0.2, 0.7)])
def test_a_forecast_is_rounded_once(dtype, times):
    first, before, last = tensors(dtype)
    held = HeldOutputs()
    for time, output in zip((1.0, *times), (first, before, last), strict=False):
        held.hold("cond", time, output, both=True)
    t0, t1, t = times[0], times[1], times[2]
    reach = 0.5 * held.reach("cond", t)
    assert reach == pytest.approx(0.5 * (t - t1) / (t1 - t0), rel=1e-12)
    new, old = last.double(), before.double()
    found, expected = held.output("cond", reach), new + reach * (new - old)
    assert found.dtype == dtype
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=2 * rounding)


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
    assert len(held) == 1


def test_what_is_held_is_nobody_elses():
    held = HeldOutputs()
    (output,) = tensors(torch.float32, 1)
    expected = output.clone()
    held.hold("cond", 1.0, output)
    output.zero_()
    held.output("cond").zero_()
    assert torch.equal(held.output("cond"), expected)


def test_no_line_through_one_timestep_nor_through_outputs_that_were_not_asked_for():
    held = HeldOutputs()
    old, new, _ = tensors(torch.float32)
    held.hold("cond", 999.0, old, both=True)
    held.hold("cond", 999.0, new, both=True)  # schedulers round their first timesteps
    assert held.reach("cond", 998.0) == 0.0
    held.hold("cond", 998.0, new)
    assert held.reach("cond", 997.0) == 0.0
