"""Generates the cases of the regression tests; models and dense results are made once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.flux import pipeline_flux

import chipsparse
from chipsparse import SparsityConfig
from chipsparse.profiles.profile import ASSETS, Profile, find_profile
from chipsparse.report.generation import GenerationReport
from tests.regression.cases import Case


@dataclass(frozen=True)
class Result:
    """One generated clip.

    Attributes:
        frames: float32 ``[F, H, W, C]`` in 0..1 on the CPU; an image is a clip of one frame.
        report: what the patched pipeline did, or None for a dense run.
    """

    frames: torch.Tensor
    report: GenerationReport | None


class Workload:
    """A bundled model and its profile."""

    def __init__(self, model: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.pipe: Any = DiffusionPipeline.from_pretrained(str(model), dtype=dtype).to(device)
        self.pipe.set_progress_bar_config(disable=True)
        self.profile: Profile = find_profile(model, type(self.pipe.transformer).__name__)

    def settings(self, **changes: Any) -> dict[str, Any]:
        """Arguments of the pipeline call: the profile's, with changes."""
        return {k: v for k, v in vars(self.profile.generation).items() if v is not None} | changes

    def generate(
        self, config: SparsityConfig | None, prompt: str, *, seed: int, **changes: Any
    ) -> Result:
        """Generates a clip; ``config`` None runs the stock pipeline."""
        arguments = self.settings(**changes) | {
            "prompt": prompt,
            "generator": torch.Generator().manual_seed(seed),
            "output_type": "pt",
            "return_dict": False,
        }
        if arguments.get("true_cfg_scale", 1) > 1:  # without a prompt, guidance would be left out
            arguments["negative_prompt"] = ""
        report = None
        if config is None:
            pixels = self.pipe(**arguments)[0]
        else:
            with chipsparse.enable(self.pipe, config) as handle:
                pixels = self.pipe(**arguments)[0]
                report = handle.report
        frames = pixels[0] if pixels.dim() == 5 else pixels  # of a video, or of one image
        return Result(frames.permute(0, 2, 3, 1).float().cpu(), report)


class Runs:
    """Makes cases on one device in one dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._workloads: dict[str, Workload] = {}
        self._results: dict[tuple[str, str], Result] = {}

    def workload(self, model: str) -> Workload:
        """The model of that folder, with its profile."""
        if model not in self._workloads:
            self._workloads[model] = Workload(ASSETS / model, self._device, self._dtype)
        return self._workloads[model]

    def config(self, case: Case) -> SparsityConfig:
        """That of the published schedule with the changes of the case."""
        published = self.workload(case.model).profile.of_quality("published")
        return published.sparsity.override(dict(case.sparsity))

    def dense(self, case: Case) -> Result:
        """What the stock pipeline makes; remembered."""
        return self._remembered(case, "dense", None)

    def sparse(self, case: Case) -> Result:
        """What the patched pipeline makes; remembered."""
        return self._remembered(case, "sparse", self.config(case))

    def generate(self, case: Case, config: SparsityConfig | None) -> Result:
        """Makes the case anew, dense for None."""
        workload = self.workload(case.model)
        with noise_of_float32():
            return workload.generate(config, case.prompt, seed=case.seed, **case.arguments)

    def _remembered(self, case: Case, kind: str, config: SparsityConfig | None) -> Result:
        if (case.name, kind) not in self._results:
            self._results[case.name, kind] = self.generate(case, config)
        return self._results[case.name, kind]


@contextmanager
def noise_of_float32() -> Iterator[None]:
    """Lets FLUX begin with the same noise in every dtype.

    It draws it in the dtype of the prompt, and PyTorch's normal numbers in half precision are not
    the same in all versions. (Wan always draws in float32.)
    """
    draw = pipeline_flux.randn_tensor

    def drawn(*args: Any, dtype: torch.dtype, **options: Any) -> torch.Tensor:
        return draw(*args, dtype=torch.float32, **options).to(dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_flux, "randn_tensor", drawn)
        yield
