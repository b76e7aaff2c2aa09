"""The numbers of processes that share a generation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parallel:
    """The processes of a generation, by what they share.

    Attributes:
        ulysses: processes that share the tokens of a call, and inside of attention its heads
            (Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509).
        guidance: processes that share the guidance branches, 1 or 2; times those of ``ulysses``.

    Raises:
        ValueError: a degree is no whole number from 1 on, or guidance is more than 2.
    """

    ulysses: int = 1
    guidance: int = 1

    def __post_init__(self) -> None:
        for name, degree in vars(self).items():
            if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
                raise ValueError(f"{name}: must be a whole number from 1 on, got {degree!r}")
        if self.guidance > 2:
            raise ValueError(
                f"guidance: pipelines have two branches, with the prompt and without, got "
                f"{self.guidance}",
            )

    @property
    def ranks(self) -> int:
        """Processes of them all."""
        return self.ulysses * self.guidance
