"""Calibration on random-weight pipelines: exact outputs, and errors that a real run has too."""

import functools
import math

import pytest
import torch

import chipsparse
from chipsparse.api import attach
from chipsparse.tuning.calibration import CalibrationSession
from chipsparse.tuning.error_model import ErrorModel
from chipsparse.tuning.probes import BUDGETS, ProbeSteps
from chipsparse.tuning.recording import Recording, layout_from_json
from chipsparse.tuning.replay import ReplaySession
from tests.tiny_models import (
    PROMPT,
    tiny_flux_pipeline,
    tiny_wan_pipeline,
    tiny_wan_transformer,
)

STEPS = 6
WAN = {"height": 64, "width": 64, "num_frames": 9, "guidance_scale": 3.0}
FLUX = {"height": 64, "width": 64}
CONFIG = chipsparse.SparsityConfig().override(
    {
        "attention.group_rows": 16,
        "attention.random_fraction": 0.05,
        "mlp.group_rows": 16,
        "token_order.voxel": [1, 4, 4],
    }
)
PIPELINES = {
    "wan": (tiny_wan_pipeline, WAN, 3),
    "flux": (tiny_flux_pipeline, FLUX, 5),
}


def generate(pipe, settings, seed=0, steps=STEPS):
    result = pipe(
        prompt=PROMPT,
        num_inference_steps=steps,
        max_sequence_length=16,
        generator=torch.Generator().manual_seed(seed),
        output_type="pt",
        **settings,
    )
    return (result.frames if hasattr(result, "frames") else result.images).double()


def calibrate(pipe, settings, config=CONFIG, probes=None, steps=STEPS, **turns):
    recording = Recording()
    session = functools.partial(
        CalibrationSession,
        probes=probes or ProbeSteps.spread(STEPS),
        recording=recording,
        **turns,
    )
    with attach(pipe, config, session) as handle:
        watches = [adapter.session.watch(adapter.transformer) for adapter in handle._adapters]
        try:
            frames = generate(pipe, settings, steps=steps)
        finally:
            for watch in watches:
                watch.remove()
    return frames, recording


@pytest.mark.parametrize("name", PIPELINES)
def test_a_calibration_generates_what_the_model_generates(name):
    make, settings, layers = PIPELINES[name]
    pipe = make()
    stock = generate(pipe, settings)
    frames, recording = calibrate(pipe, settings)
    torch.testing.assert_close(frames, stock, rtol=0, atol=1e-4)
    assert torch.equal(generate(pipe, settings), stock)  # and leaves nothing behind
    layout = layout_from_json(recording.layout)
    assert layout.layers == layers
    assert recording.branches == (2 if name == "wan" else 1)
    probes = ProbeSteps.spread(STEPS)
    seen = {(e["part"], e["layer"], e["anchor"], e["age"]) for e in recording.errors}
    assert seen == {
        (part, layer, anchor, age)
        for part in ("attention", "mlp")
        for layer in range(layers)
        for anchor in probes.anchors
        for age in probes.ages
        if anchor + age < STEPS
    }
    for entry in recording.errors:
        errors = entry["error"]
        assert len(errors) == len(BUDGETS[entry["part"]])
        assert all(math.isfinite(error) and error >= 0 for error in errors)
    assert recording.to_json().keys() == {
        "layout", "masses", "errors", "disturbed", "skipped", "times", "branches",
    }  # fmt: skip


@pytest.mark.parametrize("rule", ["merge", "difference"])
@pytest.mark.parametrize("name", PIPELINES)
def test_attention_errors_are_those_of_a_real_sparse_step(name, rule, monkeypatch):
    """At the first sparse step the first layer of a real run sees what the calibration saw."""
    monkeypatch.setattr("chipsparse.tuning.calibration.SAMPLED_GROUPS", 1000)
    make, settings, _ = PIPELINES[name]
    pipe, share, anchor = make(), 0.2, 2
    config = CONFIG.override(
        {"attention.delta_rule": rule, "attention.random_fraction": 0.0, "mlp.enabled": False}
    )
    probes = ProbeSteps(STEPS, (anchor,), (1,), (anchor + 1,))
    _, recording = calibrate(pipe, settings, config, probes)
    real = config.override(
        {
            "attention.keep_fraction": share,
            "schedule.warmup_steps": anchor + 1,
            "guard.bound": 1e9,
            "guard.groups": 1000,
        }
    )
    with chipsparse.enable(pipe, real) as handle:
        generate(pipe, settings)
        records = [r for r in handle.report.steps if r.step == anchor + 1]
    budget = BUDGETS["attention"].index(share)
    measured = {
        entry["branch"]: entry["error"][budget]
        for entry in recording.errors
        if entry["layer"] == 0 and entry["part"] == "attention"
    }
    assert measured.keys() == {record.branch for record in records}
    for record in records:
        assert float(record.guard_errors[0]) > 1e-6
        assert measured[record.branch] == pytest.approx(float(record.guard_errors[0]), rel=2e-3)


def test_an_expert_that_starts_late_measures_what_it_has_seen():
    steps = 10
    pipe = tiny_wan_pipeline(transformer_2=tiny_wan_transformer(seed=9), boundary_ratio=0.7)
    stock = generate(pipe, WAN, steps=steps)
    probes = ProbeSteps.spread(steps)
    frames, recording = calibrate(pipe, WAN, probes=probes, steps=steps)
    torch.testing.assert_close(frames, stock, rtol=0, atol=1e-4)
    places = recording.trajectory.outputs
    assert {name for name, _, _ in places} == {"transformer", "transformer_2"}
    late = min(step for name, step, _ in places if name == "transformer_2")
    before = [anchor for anchor in probes.anchors if anchor < late]
    assert before
    assert before != list(probes.anchors)
    # No expert reads what the other one recorded.
    for entry in recording.errors:
        assert (entry["anchor"] < late) == (entry["anchor"] + entry["age"] < late)
    ErrorModel([recording.to_json()], [], steps)


def test_more_columns_hold_more_mass():
    _, recording = calibrate(tiny_flux_pipeline(), FLUX)
    assert recording.masses
    for entry in recording.masses:
        mass = torch.tensor(entry["mass"])  # [budgets, head groups]
        assert bool((mass[1:] >= mass[:-1] - 1e-3).all())
        assert bool((mass > 0).all() & (mass <= 1 + 1e-3).all())


def test_single_layers_are_disturbed_at_each_calibrations_own_steps():
    pipe = tiny_flux_pipeline()
    steps = ProbeSteps.spread(STEPS).disturbed
    seen = []
    for turn in (0, 1):
        _, recording = calibrate(pipe, FLUX, turn=turn, turns=2)
        single = {e["step"] for e in recording.disturbed if e["part"] != "all"}
        assert {e["step"] for e in recording.disturbed if e["part"] == "all"} == set(steps)
        assert {place[1] for place in recording.trajectory.disturbances} == set(steps)
        seen.append(single)
        for entry in recording.disturbed:
            assert entry["change"] > 0
            assert entry["passed"] > 0
    assert seen[0] | seen[1] == set(steps)
    assert not seen[0] & seen[1]


@pytest.mark.parametrize("error", ["sparse", "skip"])
@pytest.mark.parametrize("name", PIPELINES)
def test_a_replay_changes_one_step_only(name, error):
    make, settings, _ = PIPELINES[name]
    pipe = make()
    exact, recording = calibrate(pipe, settings)
    step = ProbeSteps.spread(STEPS).disturbed[1]

    def replay(trajectory, step):
        session = functools.partial(ReplaySession, trajectory=trajectory, step=step, error=error)
        with attach(pipe, CONFIG, session) as handle:
            frames = generate(pipe, settings)
            changes = handle._adapters[0].session.changes
            return frames, changes, handle.report.actions()

    frames, changes, actions = replay(recording.trajectory, step)
    assert actions == {"skip": step + 1, "dense": STEPS - step - 1}
    assert len(changes) == recording.branches
    assert all(change > 0 for change in changes.values())
    assert float((frames - exact).abs().max()) > 1e-5
    place = next(p for p in recording.trajectory.outputs if p[1] == step)
    expected = recording.trajectory.outputs
    if error == "skip":
        before = expected[place[0], step - 2, place[2]]
        change = torch.linalg.vector_norm(before - expected[place])
        relative = float(change / torch.linalg.vector_norm(expected[place]))
        assert changes[place[2]] == pytest.approx(relative, rel=1e-4)
    recording.trajectory.disturbances.clear()
    if error == "sparse":  # nothing to change: the exact result
        frames, changes, _ = replay(recording.trajectory, step)
        torch.testing.assert_close(frames, exact, rtol=0, atol=1e-6)
