"""A guidance scale that switches starts branches anew; one that changes at every step does not."""

from types import SimpleNamespace

import pytest

import chipsparse
from chipsparse.pipelines.guidance_scales import GuidanceScales, scales_of
from tests.pipelines.families.cogvideox import tiny_pipeline
from tests.pipelines.model_state import actions
from tests.pipelines.small_sparse import SPARSE, generate
from tests.pipelines.test_families import BASE, arguments_of
from tests.schedules import letters_of, listed


@pytest.mark.parametrize(
    ("values", "switches"),
    [
        ([4.0, 4.0, 4.0, 4.0], [0, 0, 0, 0]),
        ([4.0, 4.0, 1.0, 1.0], [0, 0, 1, 1]),
        ([4.0, 4.0, 1.0, 4.0], [0, 0, 1, 1]),
        ([4.0, 3.0, 3.0, 3.0], [0, 0, 1, 1]),  # known a step later
        ([4.0, 3.0, 3.0, 2.0], [0, 0, 1, 2]),
        ([4.0, 3.0, 2.0, 1.5], [0, 0, 0, 0]),
        ([4.0, 3.0, 2.0, 2.0, 2.0], [0, 0, 0, 0, 0]),
        ([4.0, 4.0, None, None], [0, 0, 1, 1]),
    ],
)
def test_switches_of_one_scale(values, switches):
    scales = GuidanceScales()
    found = []
    for step, value in enumerate(values):
        owner = SimpleNamespace(_guidance_scale=value, guidance_rescale=step)
        found.append(scales.switches(step, scales_of(owner, None)))
        # The second branch of the step has the same.
        assert scales.switches(step, {}) == found[-1]
    assert found == switches


def test_a_switch_of_one_scale_counts_beside_another_that_changes_at_every_step():
    scales = GuidanceScales()
    found = []
    for step in range(4):
        pipe = SimpleNamespace(_guidance_scale=4.0 - step, _true_cfg_scale=3.0)
        guider = SimpleNamespace(guidance_scale=1.0 if step >= 2 else 5.0)
        found.append(scales.switches(step, scales_of(pipe, guider)))
    assert found == [0, 0, 1, 1]


def run(change, letters="DRSKSD", **more):
    def behind(pipe, step, _time, _tensors):
        pipe._guidance_scale = change(pipe._guidance_scale, step)
        return {}

    config = SPARSE.override(listed(letters))
    with chipsparse.enable(tiny_pipeline(), config, strict=True) as handle:
        pipe = handle._runners[0].loop.pipe
        generate(pipe, arguments_of("cogvideox 2b", BASE), callback_on_step_end=behind, **more)
    restarted = [each.step for each in handle.report.steps if each.restarted]
    return letters_of(actions(handle, handle.report.steps[0].branch)), restarted


@pytest.mark.parametrize(
    ("change", "more"),
    [
        (lambda scale, _step: scale, {"use_dynamic_cfg": True, "guidance_scale": 4.0}),
        (lambda scale, _step: 0.9 * scale, {}),
    ],
    ids=["dynamic guidance", "a schedule by a callback"],
)
def test_scales_that_change_at_every_step_restart_nothing(change, more):
    assert run(change, **more) == ("DRSKSD", [])


@pytest.mark.parametrize(("behind", "restarted"), [(0, 2), (2, 3)])
def test_a_switch_restarts_the_branch(behind, restarted):
    def change(scale, step):
        return 3.0 if step == behind else scale

    _, steps = run(change, letters="DDDDDR")
    assert steps == [restarted]
