"""A generation with the schedule that the size of its video leads to."""

import pytest

import chipsparse
from chipsparse.sparse.cost_model import relative_cost
from tests.pipelines.families import mochi
from tests.pipelines.model_state import actions
from tests.pipelines.small_sparse import SPARSE, generate
from tests.tiny_models import PROMPT, tiny_wan_pipeline

BY_COST = SPARSE.override(
    {
        "mlp.density": "dense",
        "schedule": {
            "by_cost": {
                "mixed": {"full": 0.3, "sparse": 0.4},
                "skipping": {"full": 0.5},
                "at_most": 0.48,
            },
        },
    },
)
SMALL = {"prompt": PROMPT, "height": 32, "width": 32, "num_frames": 5, "max_sequence_length": 16}
SAID = "no step is sparse: at this size one takes"


@pytest.mark.parametrize("cost", [0.47, 0.49])
def test_steps_are_skipped_where_a_sparse_one_is_dear(cost, monkeypatch):
    monkeypatch.setattr(relative_cost, "sparse_cost", lambda *_: cost)
    pipe = tiny_wan_pipeline()
    with chipsparse.enable(pipe, BY_COST) as handle:
        assert "at_most=0.48" in handle.summary()
        generate(pipe, SMALL, num_inference_steps=10)
    assert handle.config == BY_COST
    taken = actions(handle, "cond")
    notes = [note for note in handle.report.notes if note.startswith("no step is sparse")]
    if cost < 0.48:
        assert (taken.count("sparse"), notes) == (4, [])
        assert handle.report.cache_bytes > 0
        return
    assert (taken.count("dense"), taken.count("skip"), taken.count("sparse")) == (5, 5, 0)
    assert len(notes) == 1
    assert notes[0].startswith(SAID)
    assert handle.report.cache_bytes == 0


def test_a_text_of_another_length_has_the_same_schedule():
    """Branches of a call take one action at each step, or guidance would mix two schedules."""
    pipe = mochi.tiny_pipeline()
    prompts = mochi.prompts(7, negative=[3])
    with chipsparse.enable(pipe, BY_COST) as handle:
        generate(pipe, {**mochi.VIDEO, **prompts, "guidance_scale": 4.5})
    branches = {step.branch for step in handle.report.steps}
    assert len({tuple(actions(handle, branch)) for branch in branches}) == 1
