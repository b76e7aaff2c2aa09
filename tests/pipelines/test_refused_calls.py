"""Calls of a transformer that its adapter refuses in one sentence, or runs as the model itself."""

import functools

import pytest
import torch

import chipsparse
from chipsparse.pipelines.families.cosmos3 import ACTIONS_ALONE
from tests.pipelines.families import cosmos3, hidream, minimax_h3, qwen_image, z_image
from tests.pipelines.model_state import calls_of
from tests.pipelines.small_sparse import SPARSE, first_step, generate
from tests.tiny_models import random


def call_of(pipe, call, **changes):
    """The first call of the transformer, with an entry of each of these arguments changed."""
    run = functools.partial(generate, pipe, call, num_inference_steps=2)
    first = calls_of(pipe.transformer, run)[0]
    for name, (place, value) in changes.items():
        first[name] = first[name].clone()
        first[name][place] = value
    return first


def of_z_image(*images):
    texts = [random(7, z_image.TEXT_DIM, seed=i) for i, _ in enumerate(images)]
    return {"x": list(images), "t": torch.full((len(images),), 0.3), "cap_feats": texts}


def picture(*size):
    return random(z_image.CHANNELS, 1, *size, seed=1)


PATCHES = {"hidden_states": torch.zeros(1, 64, 16), "timesteps": torch.ones(1)}


@pytest.mark.parametrize(
    ("make", "call", "reason"),
    [
        (z_image.pipeline, of_z_image(picture(8, 8), picture(8, 6)), "one size, got"),
        (z_image.pipeline, of_z_image([picture(8, 8)]), "does not serve Z-Image Omni"),
        (hidream.pipeline, PATCHES, "images"),
        (
            minimax_h3.tiny_h3_pipeline,
            lambda pipe: call_of(pipe, minimax_h3.VIDEO, position_ids=(-1, 0.5)),
            "order that is not known",
        ),
    ],
    ids=["images of two sizes", "several images", "patches", "rows"],
)
def test_a_contradiction_is_one_sentence_and_leaves_no_trace(make, call, reason):
    pipe = make()
    call = call(pipe) if callable(call) else call
    with chipsparse.enable(pipe, SPARSE) as handle, torch.no_grad(), first_step(pipe):
        for _ in range(2):
            with pytest.raises(ValueError, match=reason) as raised:
                pipe.transformer(**call)
            assert "\n" not in str(raised.value)
        assert handle.report.cache_bytes == 0


ACTIONS = cosmos3.action("inverse_dynamics", video=list(cosmos3.picture(5, 192, 320)))


@pytest.mark.parametrize(
    ("make", "call", "said"),
    [
        (qwen_image.loop, {**qwen_image.IMAGE21, "keeps": False}, "leave use_kv_cache on"),
        (cosmos3.pipeline, {**cosmos3.VIDEO, **ACTIONS}, f"nothing runs sparse: {ACTIONS_ALONE}"),
    ],
    ids=["no kept keys", "actions alone"],
)
def test_a_call_that_cannot_be_sparse_runs_as_without_chipsparse_and_warns(make, call, said):
    pipe = make()

    def run():
        found = generate(pipe, call, num_inference_steps=3)
        return found[0] if isinstance(found, list) else found

    expected = run()
    warned = pytest.warns(chipsparse.DenseWarning, match=said)
    with chipsparse.enable(pipe, SPARSE) as handle, warned:
        assert torch.equal(run(), expected)
    assert set(handle.report.actions()) == {"dense"}
