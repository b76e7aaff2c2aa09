"""Models that return a video and its sound: one tensor of both, which skipped calls are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any, ClassVar

import torch

from chipsparse.pipelines.adapter import ModelAdapter


class VideoWithSound(ModelAdapter):
    """The part that such models share; comes before another adapter's class."""

    # What they return: a module of `diffusers.models.transformers`, and its class.
    output_class: ClassVar[tuple[str, str]]

    def stream_shapes(self, arguments: dict[str, Any]) -> list[Sequence[int]]:
        """The shapes of a sample's video and, if there is any, of its sound."""
        raise NotImplementedError

    def held_output(self, result: Any) -> torch.Tensor:
        """Both side by side, ``[B, all numbers of a sample]``."""
        streams = result if isinstance(result, tuple) else result.to_tuple()
        return torch.cat([stream.flatten(1) for stream in streams if stream is not None], dim=1)

    def wrap_output(self, output: torch.Tensor, arguments: dict[str, Any]) -> Any:
        shapes = self.stream_shapes(arguments)
        parts = output.split([math.prod(shape) for shape in shapes], dim=1)
        streams = tuple(part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True))
        if not arguments.get("return_dict", True):
            return streams
        # At a call, since the oldest diffusers that we support has not all of them.
        module, name = self.output_class
        return getattr(import_module(f"diffusers.models.transformers.{module}"), name)(*streams)
