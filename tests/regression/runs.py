"""Generates the cases of the regression tests; models and dense results are made once."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.flux import pipeline_flux

import chipsparse
from chipsparse.profiles.profile import ASSETS, find_profile
from chipsparse.report.generation import GenerationReport


@dataclass(frozen=True)
class Result:
    """One generated clip."""

    frames: torch.Tensor  # float32 [F, H, W, C] in 0..1 on the CPU; an image has one frame
    report: GenerationReport | None  # what the patched pipeline did; None for a dense run


class Runs:
    """Makes cases on one device in one dtype."""

    def __init__(self, device, dtype):
        self._device = device
        self._dtype = dtype
        self._models = {}
        self._results = {}

    def model(self, name):
        if name not in self._models:
            folder = ASSETS / name
            pipe = DiffusionPipeline.from_pretrained(str(folder), dtype=self._dtype)
            pipe.to(self._device).set_progress_bar_config(disable=True)
            self._models[name] = pipe, find_profile(folder, type(pipe.transformer).__name__)
        return self._models[name]

    def config(self, case):
        """That of the published schedule with the changes of the case."""
        _, profile = self.model(case.model)
        return profile.of_quality("chipmunk").sparsity.override(dict(case.sparsity))

    def dense(self, case):
        """What the stock pipeline makes; remembered."""
        return self._remembered(case, "dense", None)

    def sparse(self, case):
        """What the patched pipeline makes; remembered."""
        return self._remembered(case, "sparse", self.config(case))

    def generate(self, case, config):
        """Makes the case anew, dense for None."""
        pipe, profile = self.model(case.model)
        arguments = {k: v for k, v in vars(profile.generation).items() if v is not None}
        arguments |= {**case.arguments, "prompt": case.prompt}
        arguments |= {"output_type": "pt", "return_dict": False}
        arguments["generator"] = torch.Generator().manual_seed(case.seed)
        if arguments.get("true_cfg_scale", 1) > 1:  # without a prompt, guidance would be left out
            arguments["negative_prompt"] = ""
        report = None
        with noise_of_float32():
            if config is None:
                pixels = pipe(**arguments)[0]
            else:
                with chipsparse.enable(pipe, config) as handle:
                    pixels = pipe(**arguments)[0]
                    report = handle.report
        frames = pixels[0] if pixels.dim() == 5 else pixels  # of a video, or of one image
        return Result(frames.permute(0, 2, 3, 1).float().cpu(), report)

    def _remembered(self, case, kind, config):
        if (case.name, kind) not in self._results:
            self._results[case.name, kind] = self.generate(case, config)
        return self._results[case.name, kind]


@contextmanager
def noise_of_float32():
    """Lets FLUX begin with the same noise in every dtype.

    It draws it in the dtype of the prompt, and PyTorch's normal numbers in half precision are not
    the same in all versions. (Wan always draws in float32.)
    """
    draw = pipeline_flux.randn_tensor

    def drawn(*args, dtype, **options):
        return draw(*args, dtype=torch.float32, **options).to(dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_flux, "randn_tensor", drawn)
        yield
