"""Generates the cases of the regression tests; models and dense results are made once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux

from chipsparse import SparsityConfig
from chipsparse.profiles.profile import ASSETS
from chipsparse.report.generation import GenerationReport
from tests.regression.cases import Case
from tests.regression.workload import Workload


@dataclass(frozen=True)
class Result:
    """One generated clip.

    Attributes:
        frames: float32 ``[F, H, W, C]`` in 0..1 on the CPU; an image is a clip of one frame.
        report: what the patched pipeline did, or None for a dense run.
    """

    frames: torch.Tensor
    report: GenerationReport | None


class Runs:
    """Makes cases on one device in one dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._workloads: dict[str, Workload] = {}
        self._results: dict[tuple[str, str], Result] = {}

    def workload(self, model: str) -> Workload:
        """The model of that folder, with its profile."""
        if model not in self._workloads:
            self._workloads[model] = Workload(ASSETS / model, [], self._device, self._dtype)
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
            clip = workload.generate(config, case.prompt, seed=case.seed, **case.arguments)
        return Result(clip.frames.cpu(), clip.report)

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
