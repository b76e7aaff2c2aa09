"""Prompts with their seeds, and the name of the stock model's way to generate."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

DENSE = "dense"


@dataclass(frozen=True)
class Sample:
    """A prompt with its seed and its number, from 0."""

    index: int
    prompt: str
    seed: int
    label: str | None = None  # in messages; None for its number among the others

    @property
    def name(self) -> str:
        """The name in files and measurements, without the prompt's text."""
        return f"{self.seed}-{hashlib.sha256(self.prompt.encode()).hexdigest()[:12]}"
