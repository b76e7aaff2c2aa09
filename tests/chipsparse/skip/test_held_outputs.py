"""What skipped calls are made from, without a model."""

import pytest
import torch

from chipsparse.skip.held_outputs import HeldOutputs


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
