"""Skipped denoising steps whose output is forecast, in real pipelines."""

import pytest
import torch

import chipsparse
from chipsparse.session import Session
from tests.pipelines import test_families as families
from tests.pipelines.model_state import actions
from tests.pipelines.test_families import FAMILIES, SPARSE
from tests.variants import slow

STEPS = 12
LISTED = SPARSE.override(
    {
        "schedule": {
            "full_steps": [0, 1, 2, 5, 9],
            "between": [4, 7, 11],
            "forecast": 0.5,
        },
    }
)
# A branch and an expert each have their own outputs; guidance may double the batch; a picture to
# start from makes the first steps fall away; Mochi's timesteps rise, and those of H3, which has two
# outputs.
CALLS = [
    slow("wan 2.1", ""),
    ("wan 2.2 two experts", ""),
    slow("flux", "batch"),
    ("flux image to image", ""),
    slow("sd3", "guided"),
    ("mochi", "guided"),
    ("minimax h3", "first frame"),
]


@pytest.fixture
def returned(monkeypatch):
    """What each transformer returned, in order: by name and branch, steps with their outputs."""
    calls, end = {}, Session.end

    def watched(session, output, **more):
        context, record = session.state.context, session.state.record
        found = calls.setdefault((session.name, context.branch), [])
        found.append((context.step, record.action.value, record.forecast, output.clone()))
        end(session, output, **more)

    monkeypatch.setattr(Session, "end", watched)
    return calls


def check(returned, timesteps, share, after=0):
    """Compares every skipped output with the formula, in float64; counts the forecast ones."""
    forecasts = 0
    for calls in returned.values():
        computed = []
        for step, action, forecast, output in calls:
            if action != "skip":
                computed.append((timesteps[step], output.double()))
                continue
            t1, v1 = computed[-1]
            assert forecast == (len(computed) > 1 and step >= after)
            if not forecast:
                assert torch.equal(output.double(), v1)
                continue
            t0, v0 = computed[-2]
            expected = v1 + share * (timesteps[step] - t1) / (t1 - t0) * (v1 - v0)
            assert not torch.equal(output.double(), v1)
            torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-6)
            forecasts += 1
    return forecasts


@pytest.mark.parametrize(("name", "variant"), CALLS)
def test_skipped_outputs_are_the_formulas(name, variant, returned):
    pipe = FAMILIES[name].make()
    with chipsparse.enable(pipe, LISTED) as handle:
        families.generate(pipe, name, variant, steps=STEPS)
        assert sum(record.forecast for record in handle.report.steps) == check(
            returned, pipe.scheduler.timesteps.double().tolist(), 0.5
        )
    assert any(forecast for calls in returned.values() for _, _, forecast, _ in calls)


def test_the_actions_are_those_of_the_list(returned):
    pipe = FAMILIES["wan 2.1"].make()
    with chipsparse.enable(pipe, LISTED) as handle:
        families.generate(pipe, "wan 2.1", steps=STEPS)
        letters = {"dense": "D", "refresh": "R", "sparse": "S", "skip": "K"}
        for branch in ("cond", "uncond"):
            assert "".join(letters[each] for each in actions(handle, branch)) == "DDRKSRKSKRKS"
        summary = handle.report.summary()
        assert "4 skip (4 forecast, 3 corrected)" in summary
        assert handle.report.to_dict()["steps"][-3]["forecast"]
        assert handle.report.fallbacks == handle.report.notes == []
        plan = handle.report.to_dict()["transformers"]["transformer"]["schedule"]
        assert plan.startswith("5 of 12 steps in full, as listed, 3 sparse, likewise, ")


def test_a_forecast_that_begins_late(returned):
    pipe = FAMILIES["flux"].make()
    config = LISTED.override({"schedule.forecast": 1.0, "schedule.forecast_after": 0.5})
    with chipsparse.enable(pipe, config):
        families.generate(pipe, "flux", steps=STEPS)
    assert check(returned, pipe.scheduler.timesteps.double().tolist(), 1.0, after=6) == 3


def test_the_output_before_the_last_is_held_only_for_a_forecast(monkeypatch):
    pipe, kept = FAMILIES["flux"].make(), []
    end = Session.end

    def watched(session, output, **more):
        end(session, output, **more)
        kept.append(max(map(len, session._generation.held._held.values()), default=0))

    monkeypatch.setattr(Session, "end", watched)
    for share, most in ((0.5, 2), (0.0, 1)):
        kept.clear()
        with chipsparse.enable(pipe, LISTED.override({"schedule.forecast": share})):
            families.generate(pipe, "flux", steps=STEPS)
        assert (max(kept), kept[-1]) == (most, 0)
