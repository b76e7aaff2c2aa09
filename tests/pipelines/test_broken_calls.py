"""A generation may break off at any operation: nothing is left, and the next one is right."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import chipsparse
from tests.pipelines import test_flux, test_wan
from tests.tiny_models import tiny_flux_pipeline, tiny_wan_pipeline
from tests.variants import slow_unless

POINTS = 7  # of each generation, spread evenly: every action is among them
EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd


class BreaksOff(TorchDispatchMode):
    """Raises before the operation of a number; counts them."""

    def __init__(self, number=None, error=KeyboardInterrupt):
        super().__init__()
        self.count, self._number, self._error = 0, number, error

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.count == self._number:
            raise self._error("here")
        self.count += 1
        if function.namespace == "chipsparse":  # Python of ours, with operations of its own
            with self:
                return function._op_dk(EXPLICIT, *args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module", params=[("flux", "never"), ("wan", "always")])
def patched(request):
    """A patched pipeline, with its caches on the device or on the host, and its picture."""
    name, offload = request.param
    module, make = {
        "flux": (test_flux, tiny_flux_pipeline),
        "wan": (test_wan, tiny_wan_pipeline),
    }[name]
    pipe = make()
    stock = module.generate(pipe)
    config = module.SPARSE.override({"memory.offload": offload})
    with chipsparse.enable(pipe, config) as handle, BreaksOff() as counting:
        expected = module.generate(pipe)
    with chipsparse.enable(pipe, config) as handle:
        yield pipe, handle, module.generate, expected, counting.count
    assert torch.equal(module.generate(pipe), stock)


@pytest.mark.parametrize("point", slow_unless((2, 5), range(POINTS)))
def test_the_next_generation_is_right(point, patched):
    error = (KeyboardInterrupt, torch.OutOfMemoryError)[point % 2]
    pipe, handle, generate, expected, operations = patched
    number = (2 * point + 1) * operations // (2 * POINTS)
    with pytest.raises(error, match="here"), BreaksOff(number, error):
        generate(pipe)
    (adapter,) = handle._adapters
    assert adapter.session.cache_bytes() == 0
    assert torch.equal(generate(pipe), expected)
    assert handle.report.error is None


def test_breaking_off_in_a_callback(patched):
    pipe, handle, generate, expected, _ = patched

    def between(_pipe, step, _time, _tensors):
        if step == 4:
            raise KeyboardInterrupt
        return {}

    with pytest.raises(KeyboardInterrupt):
        generate(pipe, callback_on_step_end=between)
    (adapter,) = handle._adapters
    assert adapter.session.cache_bytes() == 0
    assert torch.equal(generate(pipe), expected)
