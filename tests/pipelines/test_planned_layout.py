"""The sizes that adapters read from configs alone are those of a real call."""

import pytest
import torch

import chipsparse
from chipsparse.config import SparsityConfig
from chipsparse.pipelines.registry import ADAPTERS
from tests.pipelines.model_state import calls_begun
from tests.tiny_models import (
    PROMPT,
    tiny_chroma_pipeline,
    tiny_flux_pipeline,
    tiny_wan_pipeline,
)

TEXT = 16
IMAGE = {"height": 32, "width": 48}
CASES = {
    "wan": (tiny_wan_pipeline, {"height": 64, "width": 48, "num_frames": 9}, (3, 8, 6)),
    "flux": (tiny_flux_pipeline, IMAGE, (1, 16, 24)),
    "chroma": (tiny_chroma_pipeline, IMAGE, (1, 16, 24)),
}


def calls_of(pipe, **arguments):
    """Context and layout of every transformer call of a short generation."""
    with chipsparse.enable(pipe, SparsityConfig()) as handle:
        calls = calls_begun(handle)
        pipe(
            PROMPT,
            num_inference_steps=3,
            max_sequence_length=TEXT,
            output_type="latent",
            generator=torch.Generator().manual_seed(0),
            **arguments,
        )
    return calls, handle.report.fallbacks


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("family", CASES)
def test_sizes_and_branches_of_a_real_call(family, scale):
    make, size, latents = CASES[family]
    pipe = make()
    adapter = ADAPTERS[type(pipe.transformer).__name__]
    guidance = {adapter.guidance_argument: scale, "negative_prompt": "blue"}
    calls, fallbacks = calls_of(pipe, **size, **guidance)
    planned = adapter.planned_layout(pipe.transformer.config, latents=latents, text_tokens=TEXT)
    assert {layout for _, layout in calls} == {planned}
    assert len({context.branch for context, _ in calls}) == (2 if scale > 1 else 1)
    assert fallbacks == [
        f"{part} runs dense: {reason}" for part, reason in adapter.masked_parts.items()
    ]


@pytest.mark.parametrize("family", ["flux", "chroma"])
def test_the_size_that_an_image_pipeline_chooses(family):
    pipe = CASES[family][0]()
    adapter = ADAPTERS[type(pipe.transformer).__name__]
    assert adapter.default_latents == pipe.default_sample_size
