"""The shares of several processes in the tokens and heads of a call. Numbers only."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from chipsparse.layout import ModelLayout, Share


@dataclass(frozen=True)
class SequenceCut:
    """The tokens of one call that each rank has outside of attention.

    The sequence of attention is cut into pieces, one for each rank in order. The text stays whole,
    on the rank at its end of the sequence, which has the fewer video or image tokens for it. Were
    it on every rank, each would spend time on it, and its copies would drift apart where the rows
    of a block share a choice of neurons.
    """

    grid: tuple[int, ...]  # video or image tokens of each rank
    text: tuple[int, ...]  # text tokens of each rank

    @property
    def tokens(self) -> tuple[int, ...]:
        """Grid and text tokens of each process, by rank."""
        return tuple(map(sum, zip(self.grid, self.text, strict=True)))

    def first(self, rank: int) -> int:
        """The first video or image token of a rank, counted from that of rank 0."""
        return sum(self.grid[:rank])


def shares(total: int, ranks: int) -> tuple[int, ...]:
    """Return how many of ``total`` each rank has, as even as can be; the first ones have more."""
    small, more = divmod(total, ranks)
    return tuple(small + 1 if rank < more else small for rank in range(ranks))


def cut_sequence(layout: ModelLayout, ranks: int, rows: int) -> SequenceCut:
    """Return a cut where blocks of ``rows`` end that share a list of neurons.

    So the blocks are those of a single process. Only where the text stands in front and fills no
    whole number of blocks, some feed-forward layers begin their blocks anew on each rank: those
    that do not see the text where others do (FLUX).

    With the text, the pieces are as even as can be. Raises `ValueError` where there are fewer
    blocks of video or image tokens than ranks.
    """
    grid = layout.grid_tokens
    text = layout.text_tokens
    leading = layout.grid_columns.start
    sees_text = any(kind.mlp_sees_text for kind in layout.kinds)
    offset = leading % rows if sees_text else 0  # rows of the first block that are text
    blocks = -(-(grid + offset) // rows)
    if blocks < ranks:
        counted = "1 block" if blocks == 1 else f"{blocks} blocks"
        raise ValueError(
            f"{grid:,} video or image tokens make {counted} of {rows} rows, fewer than the {ranks} "
            "that so many processes need; use fewer processes or a larger size",
        )
    ends = [0]
    block = 0
    for rank in range(1, ranks):
        wanted = layout.tokens * rank / ranks - leading
        nearest = round((wanted + offset) / rows)
        block = min(max(nearest, block + 1), blocks - (ranks - rank))
        ends.append(block * rows - offset)
    ends.append(grid)
    pieces = tuple(end - start for start, end in itertools.pairwise(ends))
    owner = 0 if layout.text_first else ranks - 1
    return SequenceCut(pieces, tuple(text if rank == owner else 0 for rank in range(ranks)))


def check_heads(layout: ModelLayout, ranks: int) -> None:
    """Raises `ValueError` where one of the ranks would be without a head."""
    if layout.heads < ranks:
        raise ValueError(
            f"this model has {layout.heads} attention heads, fewer than the {ranks} processes that "
            "are to share them; use fewer",
        )


def with_largest_share(layout: ModelLayout, cut: SequenceCut) -> ModelLayout:
    """Return the layout with the largest share that a rank has.

    All ranks plan with it, since what is planned must be the same on all.
    """
    share = Share(
        heads=max(shares(layout.heads, len(cut.grid))),
        tokens=max(cut.tokens),
        grid_tokens=max(cut.grid),
    )
    return replace(layout, share=share)
