"""How the tokens and heads of a call are shared out to several processes. Numbers only."""

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

    Attributes:
        grid: video or image tokens of each rank.
        text: text tokens of each rank.
    """

    grid: tuple[int, ...]
    text: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(map(sum, zip(self.grid, self.text, strict=True)))

    def first(self, rank: int) -> int:
        """The first video or image token of a rank, counted from that of rank 0."""
        return sum(self.grid[:rank])


def shares(total: int, ranks: int) -> tuple[int, ...]:
    """How many of ``total`` each rank has, as even as can be; the first ones have more."""
    small, more = divmod(total, ranks)
    return tuple(small + (rank < more) for rank in range(ranks))


def cut_sequence(layout: ModelLayout, ranks: int, rows: int) -> SequenceCut:
    """Cuts where blocks of rows end that share a list of neurons.

    So the blocks are those of a single process. Only where feed-forward layers see text that stands
    in front and fills no whole number of blocks, and others do not see it (FLUX), those others
    begin their blocks anew on each rank.

    Args:
        layout: of the call.
        ranks: how many pieces.
        rows: of a block.

    Raises:
        ValueError: there are fewer blocks of video or image tokens than ranks.
    """
    grid, text = layout.grid_tokens, layout.text_tokens
    leading = text if layout.text_first else 0
    sees_text = any(kind.mlp_sees_text for kind in layout.kinds)
    offset = leading % rows if sees_text else 0  # rows of the first block that are text
    blocks = -(-(grid + offset) // rows)
    if blocks < ranks:
        raise ValueError(
            f"{grid:,} video or image tokens make {blocks} blocks of {rows} rows, fewer than the "
            f"{ranks} processes that are to share them; use fewer processes or a larger size"
        )
    ends, block = [0], 0
    for rank in range(1, ranks):
        wanted = layout.tokens * rank / ranks - leading
        block = min(max(round((wanted + offset) / rows), block + 1), blocks - (ranks - rank))
        ends.append(block * rows - offset)
    pieces = tuple(end - start for start, end in itertools.pairwise([*ends, grid]))
    owner = 0 if layout.text_first else ranks - 1
    return SequenceCut(pieces, tuple(text if rank == owner else 0 for rank in range(ranks)))


def check_heads(layout: ModelLayout, ranks: int) -> None:
    """Raises `ValueError` where a rank would be without a head."""
    if layout.heads < ranks:
        raise ValueError(
            f"this model has {layout.heads} attention heads, fewer than the {ranks} processes that "
            "are to share them"
        )


def on_rank(layout: ModelLayout, cut: SequenceCut, rank: int) -> ModelLayout:
    """The layout with what a rank has of it.

    What is planned from it must be the same on all ranks, so the sizes are those of the largest
    share, and only the first head is the rank's own.
    """
    heads = shares(layout.heads, len(cut.grid))
    share = Share(
        heads=max(heads),
        first_head=sum(heads[:rank]),
        tokens=max(cut.tokens),
        grid_tokens=max(cut.grid),
    )
    return replace(layout, share=share)
