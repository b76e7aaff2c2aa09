"""Columns that the user names are kept by every query block, in sessions and pipelines."""

import numpy as np
import pytest

import chipsparse
from chipsparse.kernels.mask_packing import unpack_mask
from chipsparse.report.generation import GenerationReport
from chipsparse.sparse.cache.tensors import Kept
from chipsparse.sparse.layers.column_budget import static_bits
from tests.chipsparse.sparse.sessions import Session
from tests.chipsparse.sparse.test_session import CONFIG, run
from tests.pipelines.changes import at_step
from tests.tiny_models import PROMPT, tiny_flux_pipeline

ACTIONS = ["dense", "refresh", "sparse", "sparse"]
COLUMNS = frozenset({Kept.COLUMNS})


def masks_of(session, tokens):
    """The columns that each layer of each branch keeps now, bool ``[B, H, G, N]``."""
    masks = {}
    for branch, layer in session._caches:
        with session._caches.acquire(branch, layer, "attention", COLUMNS) as cache:
            masks[branch, layer] = unpack_mask(cache.columns, tokens)
    return masks


@pytest.mark.parametrize("tile", [None, (2, 2, 2)])
@pytest.mark.parametrize("offload", ["never", "always"])
def test_columns_of_the_user_are_kept_at_every_refresh(tile, offload):
    raster = np.zeros((3, 4, 5), bool)
    raster[1, 1:3, 2:4] = True
    config = CONFIG.override({"tile": tile, "memory.offload": offload})
    session = Session(config, GenerationReport(), static_bits=static_bits(raster.ravel()))
    run(session)
    order = session._generation.order and session._generation.order[0].numpy()
    expected = raster.ravel() if order is None else raster.ravel()[order]
    masks = masks_of(session, 60)
    assert masks.keys() == {(branch, layer) for branch in ("cond", "uncond") for layer in (0, 1)}
    for mask in masks.values():
        assert mask[..., expected].all()
        assert (mask.sum(-1) == 12).all()  # they count among the kept ones


def test_more_columns_of_the_user_than_are_to_be_kept_are_all_kept():
    report = GenerationReport()
    bits = [True] * 30 + [False] * 30
    session = Session(CONFIG, report, static_bits=static_bits(bits))
    run(session)
    assert report.fallbacks == []  # the lists are as long as they may be
    for mask in masks_of(session, 60).values():
        assert (mask == mask.new_tensor(bits)).all()


def test_a_pipeline_keeps_the_columns_of_the_user():
    """Of a model with text before the picture, in the middle of a generation."""
    pipe = tiny_flux_pipeline()
    config = CONFIG.override({"tile": [1, 2, 2], "schedule.actions": ACTIONS})
    size = {"height": 64, "width": 64, "num_inference_steps": 4, "max_sequence_length": 16}
    seen = {}
    look = at_step(2, lambda: seen.update(masks_of(handle._adapters[0].session, 272)))
    picture = np.zeros((16, 16), bool)
    picture[12:, 12:] = True
    arguments = {**size, "output_type": "latent", "callback_on_step_end": look}
    with chipsparse.enable(pipe, config, static_columns=picture.ravel()) as handle:
        pipe(PROMPT, **arguments)
        assert seen != {}
        order = np.lexsort([np.arange(256) % 16 // 2, np.arange(256) // 32])  # tiles of 2x2
        for mask in seen.values():
            assert mask[..., :16].all()  # text
            assert mask[..., 16:][..., picture.ravel()[order]].all()
        with pytest.raises(ValueError, match="static_columns has 256 columns, but"):
            pipe(PROMPT, **{**arguments, "height": 32, "width": 32})
    with pytest.raises(ValueError, match="expected True or False for each column, got 3"):
        chipsparse.enable(pipe, config, static_columns=[3])
    chipsparse.enable(pipe, config).disable()  # nothing was left behind
