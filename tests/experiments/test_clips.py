"""A generation watched: who shows its steps costs it no time, and its warm-up is short."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

import chipsparse
from chipsparse.experiments import clips
from tests.pipelines.families.sections import PIPELINES
from tests.schedules import ACTIONS, listed
from tests.tiny_models import PROMPT, tiny_flux_pipeline

STEPS = 3
SIZE = {"height": 32, "width": 32, "max_sequence_length": 16}
CALL = {"prompt": PROMPT, "num_inference_steps": STEPS, **SIZE}


class Slow:
    """A display that takes a hundred seconds a step, on a clock that nothing else moves."""

    def __init__(self):
        self.now = 0.0
        self.latents = []

    def perf_counter(self):
        return self.now

    def done(self, step, action, latents):
        self.now += 100
        self.latents.append(latents.clone())


def test_showing_takes_no_time_and_sees_the_latents(monkeypatch):
    display = Slow()
    monkeypatch.setattr(clips, "time", SimpleNamespace(perf_counter=display.perf_counter))
    pipe = tiny_flux_pipeline()
    made = clips.generate(pipe, CALL, seed=0, display=display.done, report=None)
    assert display.now == STEPS * 100
    assert [step.seconds for step in made.steps] == [0.0] * STEPS
    assert made.denoising_seconds == made.total_seconds == 0.0
    last = pipe(**CALL, generator=torch.Generator().manual_seed(0), output_type="latent").images
    assert torch.equal(display.latents[-1], last)
    assert len({latents.sum().item() for latents in display.latents}) == STEPS


def test_steps_of_sections_have_their_own_actions():
    make, call, sections = PIPELINES["framepack"]
    taken = ["dense", "refresh", "skip", "sparse", "refresh", "sparse"]
    config = chipsparse.SparsityConfig().override({"schedule.actions": taken, "tile": None})
    pipe = make()
    places = [(section, step) for section in range(sections) for step in range(6)]
    done = lambda step, action, _: shown.append((step, action))  # noqa: E731
    for patched, actions in ((False, ["dense"] * 6), (True, taken)):
        shown = []
        with chipsparse.enable(pipe, config) if patched else contextlib.nullcontext() as handle:
            report = handle and handle.report
            steps = clips.time_steps(pipe, call, seed=0, display=done, report=report)
        assert [(each.section, each.step) for each in steps] == places
        assert [each.action for each in steps] == actions * sections
        assert shown == [*enumerate(actions)] * sections


@pytest.mark.parametrize(("letters", "taken"), [("DKDKDK", "DK"), ("DRKSS", "DRKS")])
def test_a_warm_up_ends_with_the_first_sparse_step_or_where_none_comes(letters, taken):
    config = chipsparse.SparsityConfig().override(listed(letters))
    pipe = tiny_flux_pipeline()
    call = {**CALL, "num_inference_steps": len(letters)}
    with chipsparse.enable(pipe, config) as handle:
        clips.warm_up(pipe, call, seed=0, report=handle.report)
        assert handle.report.actions() == {ACTIONS[letter]: 1 for letter in taken}


def test_a_way_is_warmed_up_once_but_with_caches_in_host_memory_each_time(monkeypatch):
    """These are taken and pinned anew whenever the pipeline is patched."""
    warmed = []
    monkeypatch.setattr(clips, "warm_up", lambda *_, report, **__: warmed.append(report))
    made = SimpleNamespace(host_bytes=0)
    monkeypatch.setattr(clips, "generate", lambda *_, **__: made)
    maker = clips.ClipMaker(lambda: None, lambda prompt: {}, STEPS)
    for made.host_bytes, report in ((0, None), (0, None), (1, "sparse"), (1, "sparse")):
        maker.make("x", seed=0, title="", report=report, way=str(report))
    assert warmed == [None, "sparse", "sparse"]
