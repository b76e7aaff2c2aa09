"""HiDream-I1: experts of which one is sparse, and padding that attention sees."""

import pytest
import torch

import chipsparse
from chipsparse.pipelines.hidream import HiDreamAdapter
from tests.pipelines.families import hidream
from tests.pipelines.small_sparse import EXACT, SPARSE, assert_close, error, generate

CALLS = [{**hidream.IMAGE, **each} for each in ({}, *hidream.VARIANTS.values())]


# The rotary embedding turns all channels of a head, or half of them.
@pytest.mark.parametrize("overrides", [{"num_routed_experts": 4}, {"axes_dims_rope": (4, 2, 2)}])
def test_every_call_that_keeps_everything_is_the_dense_one(overrides):
    pipe, dense = hidream.pipeline(**overrides), chipsparse.SparsityConfig.dense()
    for call in CALLS:
        expected = generate(pipe, call)
        with chipsparse.enable(pipe, EXACT) as handle:
            assert_close(generate(pipe, call), expected)
            assert handle.report.actions()["sparse"] > 0
            assert handle.report.fallbacks == []
            said = [note.startswith("the 4 routed experts") for note in handle.report.notes]
            assert said == [True] * ("num_routed_experts" in overrides)
        with chipsparse.enable(pipe, dense):
            assert torch.equal(generate(pipe, call), expected)


def test_the_shared_expert_is_sparse():
    pipe = hidream.experts()
    dense = generate(pipe, hidream.IMAGE)
    with chipsparse.enable(pipe, EXACT.override({"mlp.density": 0.05})) as handle:
        assert error(generate(pipe, hidream.IMAGE), dense) > 1e-4
        kept = [record.mlp_kept for record in handle.report.steps if record.action == "sparse"]
    assert all(0 < each < 0.1 for each in kept)


def test_patches_in_the_place_of_an_image_are_refused():
    pipe, patches = hidream.pipeline(), torch.zeros(1, 64, 16)
    with (
        chipsparse.enable(pipe, SPARSE),
        torch.no_grad(),
        pytest.raises(ValueError, match="images"),
    ):
        pipe.transformer(hidden_states=patches, timesteps=torch.ones(1))


def test_the_released_sizes():
    config = {
        **hidream.experts().transformer.config,
        "attention_head_dim": 128,
        "num_attention_heads": 20,
        "max_resolution": (128, 128),
    }
    layout = HiDreamAdapter.planned_layout(config, latents=(1, 96, 128), text_tokens=128)
    assert layout.grids == ((1, 48, 64), (1, 1, 1024))
    assert layout.text_tokens == 384
    # Neurons of the shared expert; those of two that are chosen are 6,912 each.
    assert {(kind.intermediate_size, kind.projections) for kind in layout.kinds} == {(3584, 21)}
