"""How many processes share what of a generation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parallel:
    """Over how many processes a generation is spread, by what.

    Attributes:
        ulysses: processes that share the tokens of a call, and inside of attention its heads
            (Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509).

    Raises:
        ValueError: a degree is no whole number from 1 on.
    """

    ulysses: int = 1

    def __post_init__(self) -> None:
        for name, degree in vars(self).items():
            if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
                raise ValueError(f"{name}: must be a whole number from 1 on, got {degree!r}")

    @property
    def ranks(self) -> int:
        """Processes of them all."""
        return self.ulysses
