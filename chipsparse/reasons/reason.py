"""A fact about a generation that its user should know."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from chipsparse.config import Part

NOTHING_SPARSE = "nothing runs sparse"


class Level(str, enum.Enum):
    """The weight of a reason."""

    NOTE = "note"  # worth knowing: nothing runs denser than asked
    FALLBACK = "fallback"  # something runs denser than asked: an error if the run is strict
    NOTHING = "nothing"  # the whole generation runs dense: a warning, or an error if strict
    QUALITY = "quality"  # the result is further from the dense one than elsewhere: a warning

    __str__ = str.__str__


@dataclass(frozen=True)
class Reason:
    """One sentence to the user, with a code that programs and pages may go by."""

    code: str  # stable, in two parts: ``layers.slower``
    level: Level
    sentence: str
    remedy: str | None = None  # what the user may do about it
    part: Part | None = None  # of the layers below
    layers: tuple[int, ...] = ()  # that it is about; empty: all of them, or none

    @property
    def text(self) -> str:
        """The sentence with its remedy."""
        return self.sentence if self.remedy is None else f"{self.sentence}; {self.remedy}"

    def __str__(self) -> str:
        return self.text


def note(code: str, sentence: str, remedy: str | None = None) -> Reason:
    """Return a reason that is worth knowing."""
    return Reason(code, Level.NOTE, sentence, remedy)


def fallback(code: str, sentence: str, remedy: str | None = None) -> Reason:
    """Return a reason why something runs denser than asked."""
    return Reason(code, Level.FALLBACK, sentence, remedy)


def nothing_sparse(code: str, sentence: str, remedy: str | None = None) -> Reason:
    """Return a reason why the whole generation runs dense; the sentence begins without that."""
    return Reason(code, Level.NOTHING, f"{NOTHING_SPARSE}: {sentence}", remedy)
