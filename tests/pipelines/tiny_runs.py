"""Tiny models and generations with them, for tests of what surrounds a model.

Loops, hooks, caches and memory need one or two models, and no family.
"""

import torch

from tests.pipelines import small_sparse
from tests.tiny_models import PROMPT, tiny_flux_pipeline, tiny_wan_pipeline

STEPS = 7


class TinyRuns:
    """A model with a call of it."""

    def __init__(self, make, prompt, tile, **call):
        self.make = make  # options replace components
        self._prompt = prompt
        self._call = call
        # Dense, refresh, three sparse steps, refresh, sparse; the other one keeps everything.
        self.SPARSE = small_sparse.SPARSE.override(
            {"schedule.periodic.refresh_every": 4, "tile": tile},
        )
        self.EXACT = self.SPARSE.override(small_sparse.EVERYTHING)

    def generate(self, pipe, prompt=None, *, seed=0, **changes):
        """The latents of a call; of several prompts each begins with noise of its own."""
        prompt = self._prompt if prompt is None else prompt
        samples = len(prompt) if isinstance(prompt, list) else 1
        generators = [torch.Generator().manual_seed(seed + i) for i in range(samples)]
        options = {"num_inference_steps": STEPS, "max_sequence_length": 16, **self._call}
        call = {**options, "output_type": "latent", **changes}
        return pipe(prompt=prompt, generator=generators, **call)[0]


FLUX = TinyRuns(tiny_flux_pipeline, "a red circle", [1, 4, 4], height=32, width=48)
VIDEO = {"height": 64, "width": 64, "num_frames": 9, "guidance_scale": 4.0}
WAN = TinyRuns(tiny_wan_pipeline, "a red circle moves left", [2, 2, 4], **VIDEO)
# One frame without guidance; its first five steps are all actions but a skip.
FRAME = {"height": 32, "width": 64, "num_frames": 1, "guidance_scale": 1.0}
STILL = TinyRuns(tiny_wan_pipeline, PROMPT, None, **FRAME, num_inference_steps=5)
MODELS = {"flux": FLUX, "wan": WAN}
