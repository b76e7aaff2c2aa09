"""What is said of kept columns, against sums over the masks themselves."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

import chipsparse
from chipsparse.conditioning import Conditioning
from chipsparse.kernels.mask_packing import pack_mask, unpack_mask
from chipsparse.layers.column_budget import static_bits
from chipsparse.layers.tile_order import grids_order
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.report.generation import GenerationReport
from chipsparse.report.kept_columns import read_kept_columns
from chipsparse.session import Session
from chipsparse.step import StepContext
from tests.chipsparse.sessions import CPU, attend
from tests.chipsparse.test_session import CONFIG, LAYOUT, run
from tests.pipelines.changes import at_step
from tests.tiny_models import PROMPT, tiny_flux_pipeline

ROWS = 16
ACTIONS = ["dense", "refresh", "sparse", "sparse"]


@pytest.mark.parametrize("text_first", [True, False])
def test_shares_and_regions(text_first):
    sizes = ModelLayout((LayerKind("block", 1, 8),), 2, 8, 1, ((2, 4, 6),), 5, text_first)
    order = grids_order(sizes.grids, (1, 2, 3))
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(2, 2, 4, 53, generator=generator) < 0.2
    first, text = (5, 0) if text_first else (0, 48)
    raster = torch.zeros(2, 4, 6, dtype=torch.bool)
    raster[1, 2:, 3:] = True  # all lists keep this tile
    mask[..., first : first + 48] |= raster.flatten()[order]
    mask[..., text : text + 5] = True
    mask[..., first + 1] = False
    always = torch.rand(53, generator=generator) < 0.3
    config = chipsparse.SparsityConfig(block_size=ROWS, tile=(1, 2, 3))
    options = {"static": always, "order": order, "where": ("transformer", "cond", 7)}
    result = read_kept_columns(pack_mask(mask), sizes, config, **options)
    assert (result.transformer, result.branch, result.layer) == ("transformer", "cond", 7)
    assert (result.columns, result.lists) == (53, 16)
    kept = int(mask.sum())
    rows = mask.flatten(0, 2)
    own = torch.arange(53) // ROWS == torch.arange(4)[:, None]
    expected = {"kept": kept / mask.numel(), "text": 5 * 16 / kept}
    expected |= {"static": int((mask & always).sum()) / kept}
    expected |= {"local": int((mask & own).sum()) / kept}
    expected |= {"everywhere": int(rows.all(0).sum()) / 53}
    expected |= {"nowhere": int((~rows.any(0)).sum()) / 53}
    assert {name: getattr(result, name) for name in expected} == pytest.approx(expected)
    assert min(result.everywhere, result.nowhere) > 0
    most = result.regions[0]
    assert (most.grid, most.frames, most.rows, most.columns) == (0, (1, 1), (2, 3), (3, 5))
    assert most.kept == pytest.approx(1.0)
    shares = torch.zeros(48)
    shares[order] = rows[:, first : first + 48].float().mean(0)
    means = shares.view(2, 2, 2, 2, 3).mean((2, 4)).flatten()
    expected = means.sort(descending=True).values[:3].tolist()
    assert [region.kept for region in result.regions] == pytest.approx(expected)


@pytest.mark.parametrize("tile", [None, (2, 2, 2)])
@pytest.mark.parametrize("offload", ["never", "always"])
def test_columns_of_the_user_are_kept_at_every_refresh_and_named(tile, offload):
    raster = np.zeros((3, 4, 5), bool)
    raster[1, 1:3, 2:4] = True
    bits = static_bits(raster.ravel())
    config = CONFIG.override({"tile": tile, "memory.offload": offload})
    plain, kept = (Session(config, GenerationReport(), static_bits=own) for own in (None, bits))
    run(plain)
    run(kept)
    results = kept.kept_columns()
    assert [(result.branch, result.layer) for result in results] == [
        (branch, layer) for branch in ("cond", "uncond") for layer in (0, 1)
    ]
    for result, other in zip(results, plain.kept_columns(), strict=True):
        assert result.kept == other.kept == 12 / 60  # they count among the kept ones
        assert (result.static, other.static) == (pytest.approx(4 / 12), 0)
        assert result.everywhere >= 4 / 60
    order = kept._generation.order and kept._generation.order[0].numpy()
    expected = raster.ravel() if order is None else raster.ravel()[order]
    for branch, layer in kept._caches:
        with kept._caches.acquire(branch, layer, "attention", frozenset({"columns"})) as cache:
            assert unpack_mask(cache.columns, 60)[..., expected].all()
    assert [result.layer for result in kept.kept_columns(frozenset({1}))] == [1, 1]


def test_more_columns_of_the_user_than_are_to_be_kept_are_all_kept():
    report = GenerationReport()
    session = Session(CONFIG, report, static_bits=static_bits([True] * 30 + [False] * 30))
    assert session.kept_columns() == []  # before the first refresh
    run(session)
    assert report.fallbacks == []  # the lists are as long as they may be
    assert {result.kept for result in session.kept_columns()} == {0.5}


def test_a_pipeline_keeps_the_columns_of_the_user_and_tells_on_request():
    """Of a model with text before the picture, in the middle of a generation."""
    pipe = tiny_flux_pipeline()
    config = CONFIG.override({"tile": [1, 2, 2], "schedule.actions": ACTIONS})
    size = {"height": 64, "width": 64, "num_inference_steps": 4, "max_sequence_length": 16}
    seen = []
    ask = at_step(2, lambda: seen.extend(handle.kept_columns([0])))
    picture = np.zeros((16, 16), bool)
    picture[12:, 12:] = True
    arguments = {**size, "output_type": "latent", "callback_on_step_end": ask}
    with chipsparse.enable(pipe, config, static_columns=picture.ravel()) as handle:
        pipe(PROMPT, **arguments)
        (kept,) = seen
        assert (kept.transformer, kept.layer, kept.columns) == ("transformer", 0, 272)
        assert kept.everywhere >= (16 + 16) / 272  # text and the user's
        assert kept.static == pytest.approx(16 / (kept.kept * 272))
        assert handle.report.to_dict()["kept_columns"] == [json.loads(json.dumps(asdict(kept)))]
        with pytest.raises(ValueError, match="no columns are kept now; call kept_columns"):
            handle.kept_columns()
        with pytest.raises(ValueError, match="static_columns has 256 columns, but"):
            pipe(PROMPT, **{**arguments, "height": 32, "width": 32})
    with pytest.raises(ValueError, match="expected True or False for each column, got 3"):
        chipsparse.enable(pipe, config, static_columns=[3])
    chipsparse.enable(pipe, config).disable()  # nothing was left behind


@pytest.mark.parametrize("offload", ["never", "always"])
def test_columns_of_a_prompt_before_are_not_kept_any_more(offload):
    report = GenerationReport()
    session = Session(CONFIG.override({"memory.offload": offload}), report)
    bytes_kept = []
    kept = []
    for step, prompt in enumerate([1.0, 1.0, 2.0]):
        for branch in ("cond", "uncond"):
            given = prompt if branch == "cond" else 1.0
            conditions = Conditioning({"encoder_hidden_states": given}, {})
            position = StepContext(1, step, branch, 6)
            session.begin(position, LAYOUT, CPU, conditioning=conditions)
            bytes_kept.append(session.cache_bytes())
            if step == 2:
                kept.append({(each.branch, each.layer) for each in session.kept_columns()})
            for layer in range(LAYOUT.layers):
                attend(session, layer, *torch.randn(3, 1, 2, 60, 8))
            session.end(torch.zeros(1))
    assert kept == [{("uncond", 0), ("uncond", 1)}] * 2
    full = bytes_kept[3]
    dropped = bytes_kept[4]
    assert dropped < full
    assert [record.restarted for record in report.steps[-2:]] == [True, False]
