"""Models with the blocks of Wan: frames that are put in order by themselves, and masks."""

import pytest
import torch

import chipsparse
from tests.pipelines.families.wan_kin import VIDEO, forced_arguments, skyreels
from tests.pipelines.model_state import calls_begun
from tests.pipelines.small_sparse import EXACT, SPARSE, assert_close, generate


@pytest.fixture(scope="module")
def forced():
    return skyreels(forced_arguments, inject_sample_info=True)


def test_frames_with_timesteps_of_their_own_are_put_in_order_by_themselves(forced):
    expected = generate(forced, VIDEO, branches=("cond",))
    with chipsparse.enable(forced, EXACT) as handle:
        calls = calls_begun(handle)
        found = generate(forced, VIDEO, branches=("cond",))
        assert handle.report.actions()["sparse"] > 0
        assert handle.report.fallbacks == []
    assert {layout.grids for _, layout in calls} == {((1, 4, 3),) * 3}
    assert_close(found, expected)
    with chipsparse.enable(forced, SPARSE):
        sparse = generate(forced, VIDEO, branches=("cond",))
    assert sparse.isfinite().all()
    assert not torch.equal(sparse, expected)


def test_a_model_that_masks_later_frames_keeps_its_attention_dense():
    pipe = skyreels(num_frame_per_block=2)
    call = {**VIDEO, "num_frames": 13, "branches": ("cond",)}
    expected = generate(pipe, call)
    with chipsparse.enable(pipe, EXACT) as handle:
        found = generate(pipe, call)
    assert "attention runs dense: the model masks later blocks of frames" in handle.report.fallbacks
    assert handle.report.actions()["sparse"] > 0  # the MLPs
    assert_close(found, expected)
    unmasked = generate(skyreels(), call)
    assert not torch.allclose(expected, unmasked, rtol=1e-2, atol=1e-3)
