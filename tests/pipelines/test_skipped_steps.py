"""Skipped denoising steps in real pipelines: which are, what they return, and forecasts of it."""

import dataclasses

import pytest
import torch

import chipsparse
from chipsparse.reasons.calls import controlnet_unread
from chipsparse.skip.outputs import flatten
from chipsparse.skip.session import SkipSession
from tests.pipelines import test_families as families
from tests.pipelines.model_state import actions
from tests.pipelines.test_families import FAMILIES, SPARSE
from tests.pipelines.tiny_runs import WAN
from tests.schedules import letters_of, listed
from tests.tiny_models import tiny_wan_pipeline, tiny_wan_transformer
from tests.variants import slow

STEPS = 12


def test_an_expert_that_takes_over_computes_before_it_skips():
    pipe = tiny_wan_pipeline(transformer_2=tiny_wan_transformer(seed=9), boundary_ratio=0.9)
    config = WAN.SPARSE.override(listed("DRSKKKKKKRSS"))
    with chipsparse.enable(pipe, config) as handle:
        computed = []
        for expert in (pipe.transformer, pipe.transformer_2):
            expert.register_forward_hook(lambda model, *_: computed.append(model))
        WAN.generate(pipe, num_inference_steps=STEPS, guidance_scale=1.0)
        taken = letters_of(actions(handle))
    switch = taken.index("D", 1)
    assert switch in (3, 4)
    assert taken[switch:] == "D" + "K" * (8 - switch) + "RSS"
    assert computed == [pipe.transformer] * 3 + [pipe.transformer_2] * 4


def test_a_controlnet_that_runs_for_skipped_steps_is_noted():
    pipe = FAMILIES["flux controlnet"].make()
    with chipsparse.enable(pipe, SPARSE.override(listed("DRSKSKRSS"))) as handle:
        families.generate(pipe, "flux controlnet")
        assert handle.report.notes.count(controlnet_unread().text) == 1


def streams(output):
    if isinstance(output, tuple):
        return output
    return tuple(getattr(output, field.name) for field in dataclasses.fields(output))


@pytest.mark.parametrize(
    ("name", "variant"),
    [("ltx-2", ""), ("minimax h3", ""), slow("cosmos 3", "sound, prompts of two lengths")],
)
@pytest.mark.parametrize("return_dict", [False, True])
def test_a_skipped_step_gives_all_streams_again(name, variant, return_dict):
    pipe = FAMILIES[name].make()
    outputs = {}
    with chipsparse.enable(pipe, SPARSE.override(listed("DRSK"))) as handle:
        (runner,) = handle._runners
        call = runner.call

        def look(forward, args, kwargs):
            found = call(forward, args, {**kwargs, "return_dict": return_dict})
            outputs.setdefault(handle.report.steps[-1].branch, []).append(found)
            return streams(found)

        runner.call = look
        families.generate(pipe, name, variant, steps=4)
    for _, refresh, sparse, skip in outputs.values():
        assert type(skip) is type(sparse)
        assert isinstance(skip, tuple) is not return_dict
        made = list(map(streams, (refresh, sparse, skip)))
        for three in zip(*made, strict=True):
            before, last, again = (each[0] if isinstance(each, list) else each for each in three)
            if last is not None:
                assert torch.equal(again, last)
                assert not torch.equal(last, before)
        assert sum(each is not None for each in made[-1]) == 2


LISTED = SPARSE.override({"schedule": {"listed": {"full": [0, 1, 2, 5, 9], "sparse": [4, 7, 11]}}})
# A branch and an expert each have their own outputs; guidance may double the batch; a picture to
# start from makes the first steps fall away; Mochi's timesteps rise, and those of H3, which has two
# outputs. The share that is forecast, and the step from which on it is.
FORECASTS = [
    ("wan 2.2 two experts", "", 0.5, 0),
    ("flux", "", 1.0, 6),
    slow("flux", "batch", 0.5, 0),
    slow("flux image to image", "", 0.5, 0),
    slow("sd3", "guided", 0.5, 0),
    ("mochi", "guided", 0.5, 0),
    ("minimax h3", "first frame", 0.5, 0),
]


@pytest.mark.parametrize(("name", "variant", "share", "after"), FORECASTS)
def test_forecast_outputs_are_the_formulas(name, variant, share, after, monkeypatch):
    """In float64, and only what it needs is held."""
    returned = {}
    held = []
    end = SkipSession.end

    def watched(session, decision, schedule, action, output, **more):
        place = decision.place
        calls = returned.setdefault((session, place.branch), [])
        tensors, _ = flatten(output)
        numbers = torch.cat([tensor.flatten() for tensor in tensors])
        calls.append((place.step, decision.is_skipped, decision.is_forecast, numbers))
        over = end(session, decision, schedule, action, output, **more)
        held.append(max(map(len, session._generation.outputs._held.values()), default=0))
        return over

    monkeypatch.setattr(SkipSession, "end", watched)
    pipe = FAMILIES[name].make()
    changes = {"schedule.forecast": share, "schedule.forecast_after": after / STEPS}
    with chipsparse.enable(pipe, LISTED.override(changes)) as handle:
        families.generate(pipe, name, variant, steps=STEPS)
    times = pipe.scheduler.timesteps.double().tolist()
    forecasts = 0
    for calls in returned.values():
        computed = []
        for step, is_skipped, forecast, output in calls:
            if not is_skipped:
                computed.append((times[step], output.double()))
                continue
            t1, v1 = computed[-1]
            assert forecast == (len(computed) > 1 and step >= after)
            if not forecast:
                assert torch.equal(output.double(), v1)
                continue
            t0, v0 = computed[-2]
            expected = v1 + share * (times[step] - t1) / (t1 - t0) * (v1 - v0)
            assert not torch.equal(output.double(), v1)
            torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-6)
            forecasts += 1
    assert forecasts == sum(record.forecast for record in handle.report.steps) > 0
    assert (max(held), held[-1]) == (2, 0)
