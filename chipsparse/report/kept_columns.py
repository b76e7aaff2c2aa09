"""The columns that layers keep, as the report holds them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KeptRegion:
    """A piece of the video or image whose columns are kept by many query blocks.

    Attributes:
        grid: number of the image or video in the sequence; 0 but where a model sees several.
        frames: first and last, in tokens, as are rows and columns.
        kept: share of the query blocks of all heads that keep one of its columns, on average.
    """

    grid: int
    frames: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int]
    kept: float


@dataclass(frozen=True)
class KeptColumns:
    """The columns that one layer's sparse attention keeps now. Shares are from 0 to 1.

    Attributes:
        columns: how many there are.
        lists: how many choose for themselves: query blocks of all heads and samples.
        kept: mean share of the columns in a list.
        text: share of what all lists keep that are text columns.
        static: the same of the columns that ``static_columns`` names.
        local: the same of a query block's own columns.
        everywhere: share of the columns that every list has.
        nowhere: share of them that none has.
        regions: those that are kept most, the first one most.
    """

    transformer: str
    branch: str
    layer: int
    columns: int
    lists: int
    kept: float
    text: float
    static: float
    local: float
    everywhere: float
    nowhere: float
    regions: tuple[KeptRegion, ...]
