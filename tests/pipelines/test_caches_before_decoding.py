"""However a generation ends, its caches are gone before the latents are decoded."""

import pytest

import chipsparse
from tests.pipelines.test_wan import SPARSE
from tests.tiny_models import tiny_wan_pipeline

STEPS = 7


@pytest.fixture
def decoded(monkeypatch):
    """Runs a guided generation; returns the bytes of the caches before and while it decodes."""
    pipe = tiny_wan_pipeline()

    def run(between, config=SPARSE):
        held, decoding = [], []
        decode = pipe.vae.decode

        def watched(*args, **kwargs):
            decoding.append(session.cache_bytes())
            return decode(*args, **kwargs)

        def each_step(given, step, time, tensors):
            held.append(session.cache_bytes())
            between(given, step)
            return {}

        with monkeypatch.context() as patch, chipsparse.enable(pipe, config) as handle:
            patch.setattr(pipe.vae, "decode", watched)
            session = handle._adapters[0].session
            pipe(
                "a red circle",
                height=32,
                width=32,
                num_frames=5,
                num_inference_steps=STEPS,
                guidance_scale=3.0,
                max_sequence_length=16,
                callback_on_step_end=each_step,
            )
        return held, decoding

    return run


@pytest.mark.parametrize("last", [0, 3, STEPS - 1])
def test_an_interrupted_call(last, decoded):
    def between(pipe, step):
        if step == last:
            pipe._interrupt = True

    held, decoding = decoded(between)
    assert len(held) == last + 1
    assert (held[-1] > 0) == (last < STEPS - 1)
    assert decoding == [0]


@pytest.mark.parametrize("last_guided", [None, 3, STEPS - 2])
def test_guidance_that_ends_early(last_guided, decoded):
    def between(pipe, step):
        if step == last_guided:
            pipe._guidance_scale = 1.0

    held, decoding = decoded(between)
    assert min(held[:-1]) > 0
    assert (held[-1], decoding) == (0, [0])
