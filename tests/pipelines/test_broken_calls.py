"""However a generation ends, nothing is left, its caches are gone, and the next one is right."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import chipsparse
from chipsparse.sparse.cache.copies import HostCopies
from tests.pipelines.tiny_runs import MODELS, STEPS, WAN
from tests.variants import slow_unless

POINTS = 7  # of each generation, spread evenly: every action is among them
EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd


class BreaksOff(TorchDispatchMode):
    """Raises before the operation of a number; counts them."""

    def __init__(self, number=None, error=KeyboardInterrupt):
        super().__init__()
        self.count = 0
        self._number = number
        self._error = error

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
    model = MODELS[name]
    pipe = model.make()
    stock = model.generate(pipe)
    config = model.SPARSE.override({"memory.offload": offload})
    with chipsparse.enable(pipe, config) as handle, BreaksOff() as counting:
        expected = model.generate(pipe)
    with chipsparse.enable(pipe, config) as handle:
        yield pipe, handle, model.generate, expected, counting.count
    assert torch.equal(model.generate(pipe), stock)


@pytest.mark.parametrize("point", slow_unless((2, 5), range(POINTS)))
def test_the_next_generation_is_right(point, patched):
    error = (KeyboardInterrupt, torch.OutOfMemoryError)[point % 2]
    pipe, handle, generate, expected, operations = patched
    number = (2 * point + 1) * operations // (2 * POINTS)
    with pytest.raises(error, match="here"), BreaksOff(number, error):
        generate(pipe)
    (adapter,) = handle._adapters
    assert adapter.session.cache_bytes() == adapter.session._pool.host.lent_bytes == 0
    assert adapter._skip._generation.branches == {}
    assert torch.equal(generate(pipe), expected)
    assert handle.report.error is None


@pytest.mark.parametrize("raises", [False, True])
def test_breaking_off_in_a_callback(raises, patched):
    pipe, handle, generate, expected, _ = patched
    (adapter,) = handle._adapters

    def between(pipe, step, _time, _tensors):
        if step == 4:
            assert adapter.session.cache_bytes() > 0
            pipe._interrupt = True
            if raises:
                raise RuntimeError("injected")
        return {}

    ends = pytest.raises(RuntimeError, match="injected") if raises else contextlib.nullcontext()
    with ends:
        generate(pipe, callback_on_step_end=between)
    assert adapter.session.cache_bytes() == 0
    assert torch.equal(generate(pipe), expected)


@pytest.mark.parametrize(
    ("change", "at", "steps", "offload"),
    [
        ("interrupted", 3, 4, "never"),
        (None, None, STEPS, "never"),
        (None, None, STEPS, "always"),
        ("unguided", 3, STEPS, "never"),
        ("unguided", STEPS - 2, STEPS, "never"),
    ],
)
def test_caches_are_gone_before_the_latents_are_decoded(change, at, steps, offload, monkeypatch):
    pipe = WAN.make()
    held = []
    decoding = []
    decode = pipe.vae.decode

    def between(given, step, _time, _tensors):
        held.append(session.cache_bytes())
        if step == at and change == "unguided":
            given._guidance_scale = 1.0
        given._interrupt = step == at and change == "interrupted"
        return {}

    def watched(*args, **kwargs):
        decoding.append((session.cache_bytes(), session._pool.slots))
        return decode(*args, **kwargs)

    monkeypatch.setattr(pipe.vae, "decode", watched)
    with chipsparse.enable(pipe, WAN.SPARSE.override({"memory.offload": offload})) as handle:
        session = handle._adapters[0].session
        small = {"height": 32, "width": 32, "num_frames": 5, "guidance_scale": 3.0}
        WAN.generate(pipe, **small, output_type="np", callback_on_step_end=between)
    assert len(held) == steps
    assert min(held[:-1]) > 0
    assert (held[-1] > 0) == (steps < STEPS)
    assert decoding == [(0, {})]


def test_nothing_waits_for_a_gpu_that_is_stuck(patched, monkeypatch):
    pipe, handle, generate, expected, _ = patched
    (adapter,) = handle._adapters

    def between(*_):
        monkeypatch.setattr(adapter, "team", SimpleNamespace(stuck=True, failed=lambda *_: None))
        monkeypatch.setattr(HostCopies, "synchronize", pytest.fail)
        raise RuntimeError("injected")

    with pytest.raises(RuntimeError, match="injected"):
        generate(pipe, callback_on_step_end=between)
    assert adapter.session.cache_bytes() == adapter.session._pool.host.nbytes == 0
    monkeypatch.undo()
    assert torch.equal(generate(pipe), expected)
