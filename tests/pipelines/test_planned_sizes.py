"""Sizes of models that their configs and the size of the picture tell, beside those of families."""

import pytest

from chipsparse.pipelines.families.flux import FLUX
from chipsparse.pipelines.families.hidream import HIDREAM
from chipsparse.pipelines.families.minimax_h3 import audio_rows
from chipsparse.pipelines.families.stable_diffusion3 import STABLE_DIFFUSION_3
from tests.pipelines.families import hidream, stable_diffusion3
from tests.tiny_models import tiny_flux_pipeline


def test_the_released_sizes_of_hidream():
    config = {
        **hidream.experts().transformer.config,
        "attention_head_dim": 128,
        "num_attention_heads": 20,
        "max_resolution": (128, 128),
    }
    layout = HIDREAM.planned_layout(config, latents=(1, 96, 128), text_tokens=128)
    assert layout.grids == ((1, 48, 64), (1, 1, 1024))
    assert layout.text_tokens == 384
    # Neurons of the shared expert; those of two that are chosen are 6,912 each.
    assert {(kind.intermediate_size, kind.projections) for kind in layout.kinds} == {(3584, 21)}


@pytest.mark.parametrize(
    ("dual", "expected"),
    [((), [("joint", 24, 4)]), (tuple(range(13)), [("dual", 13, 8), ("joint", 11, 4)])],
)
def test_dual_layers_are_a_kind_of_their_own(dual, expected):
    config = {**stable_diffusion3.TRANSFORMER, "patch_size": 2, "num_layers": 24}
    config["dual_attention_layers"] = dual
    layout = STABLE_DIFFUSION_3.planned_layout(config, latents=(1, 128, 128))
    kinds = [(kind.name, kind.layers, kind.projections) for kind in layout.kinds]
    assert kinds == expected
    assert (layout.layers, layout.grid_tokens) == (24, 64 * 64)


def test_the_size_that_pipelines_of_flux_choose():
    assert FLUX.default_latents == tiny_flux_pipeline().default_sample_size


@pytest.mark.parametrize(("latents", "rows"), [(2, 16), (7, 74), (37, 414), (72, 810), (102, 1150)])
def test_rows_of_sound(latents, rows):
    """Frames of a video of 5 n + 2 latents are 17 n + 5; 40 latents of two channels a second."""
    frames = (latents - 2) // 5 * 17 + 5
    assert audio_rows(latents) == rows == 2 * round(frames / 24 * 40)
