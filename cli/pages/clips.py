"""Which videos and images a file of results is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Clips:
    """The files that a record names.

    Attributes:
        names: of the files, by label; there may be none.
        reference: the label of that from which the other's difference is shown.
        joined: whether each file shows several clips side by side.
        beside: whether the names count from the folder of the record alone.
        about: which clips these are, where that has to be said.
        missing: how to get some, where there are none.
    """

    names: Mapping[str, str]
    reference: str | None = None
    joined: bool = False
    beside: bool = False
    about: str = ""
    missing: str = ""
