"""The shares of several processes in the tokens and heads of a call. Numbers only."""

from __future__ import annotations

import itertools
import math
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
    # Runs of ranks with query rows of their own in attention, those of their tokens; within a run,
    # each rank has some of the heads.
    ring: int = 1

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(self.grid, self.text, strict=True)))

    @property
    def ulysses(self) -> int:
        """Ranks of a run."""
        return len(self.grid) // self.ring

    @property
    def query_rows(self) -> tuple[int, ...]:
        """Tokens of each run."""
        runs = range(0, len(self.grid), self.ulysses)
        return tuple(sum(self.tokens[first : first + self.ulysses]) for first in runs)

    def first(self, rank: int) -> int:
        """The first video or image token of a rank, counted from that of rank 0."""
        return sum(self.grid[:rank])


def shares(total: int, ranks: int) -> tuple[int, ...]:
    """Return how many of ``total`` each rank has, as even as can be; the first ones have more."""
    small, more = divmod(total, ranks)
    return tuple(small + 1 if rank < more else small for rank in range(ranks))


def cut_sequence(
    layout: ModelLayout,
    ranks: int,
    rows: int,
    *,
    ring: int = 1,
    query_rows: int = 1,
) -> SequenceCut:
    """Return a cut where blocks of rows end that share a list of neurons or, in a ring, of columns.

    So the blocks are those of a single process. Only where the text stands in front and fills no
    whole number of blocks of neurons' rows, some feed-forward layers begin their blocks anew on
    each rank: those that do not see the text where others do (FLUX), and in a ring all that do not.

    A block has ``rows`` that share neurons, and ``query_rows`` that share columns. So many pieces,
    or runs of pieces, as the ``ring`` has processes have their own query rows in attention. Raises
    `ValueError` where there are fewer blocks of video or image tokens than ranks.
    """
    grid = layout.grid_tokens
    text = layout.text_tokens
    leading = layout.grid_columns.start
    sees_text = any(kind.mlp_sees_text for kind in layout.kinds)
    offset = leading % rows if sees_text else 0  # rows of the first block that are text
    places = _Places(-offset, rows)
    run = ranks // ring
    ends = [0, grid]
    if ring > 1:
        at_lists = _Places(-leading, query_rows)
        at_both = at_lists.among(places)
        where = at_both or at_lists
        least = -(-run * rows // where.step)  # so that each of a run gets a block
        whole = -leading, layout.tokens - leading
        ends = where.cut(0, grid, ring, whole=whole, least=least)
    pieces: list[int] = []
    for first, last in itertools.pairwise(ends):
        if ring > 1 and at_both is None:
            places = _Places(first, rows)
        whole = -leading if first == 0 else first, layout.tokens - leading if last == grid else last
        inner = places.cut(first, last, run, whole=whole)
        pieces += (end - start for start, end in itertools.pairwise(inner))
    owner = 0 if layout.text_first else ranks - 1
    texts = tuple(text if rank == owner else 0 for rank in range(ranks))
    return SequenceCut(tuple(pieces), texts, ring)


@dataclass(frozen=True)
class _Places:
    """The places where video or image tokens can be cut: every ``step`` from ``anchor`` on."""

    anchor: int
    step: int

    def among(self, other: _Places) -> _Places | None:
        """Return the places of both, None where there are none."""
        step = math.lcm(self.step, other.step)
        for place in range(self.anchor, self.anchor + step, self.step):
            if (place - other.anchor) % other.step == 0:
                return _Places(place, step)
        return None

    def cut(
        self,
        first: int,
        last: int,
        pieces: int,
        *,
        whole: tuple[int, int],
        least: int = 1,
    ) -> list[int]:
        """Return the ends of so many pieces of the tokens from ``first`` to ``last``.

        With the text, ``whole`` from first to last, they are as even as can be. Each has at least
        so many steps.
        """
        before = (first - self.anchor) // self.step  # of the last place that is not inside
        after = -((self.anchor - last) // self.step)
        if after - before < pieces * least:
            blocks = "1 block" if after - before == 1 else f"{after - before} blocks"
            raise ValueError(
                f"{last - first:,} video or image tokens make {blocks} of "
                f"{self.step} rows, fewer than the {pieces * least} that so many processes need; "
                "use fewer processes or a larger size",
            )
        ends, start, end = [first], *whole
        for piece in range(1, pieces):
            wanted = start + (end - start) * piece / pieces
            nearest = round((wanted - self.anchor) / self.step)
            before = min(max(nearest, before + least), after - (pieces - piece) * least)
            ends.append(self.anchor + before * self.step)
        return [*ends, last]


def check_heads(layout: ModelLayout, ranks: int) -> None:
    """Raises `ValueError` where one of the ranks that share heads would be without."""
    if layout.heads < ranks:
        raise ValueError(
            f"this model has {layout.heads} attention heads, fewer than the {ranks} processes that "
            "are to share them; use fewer, or let them share the query rows (ring)",
        )


def on_rank(layout: ModelLayout, cut: SequenceCut, rank: int) -> ModelLayout:
    """Return the layout with the share of a rank.

    What is planned from it must be the same on all ranks, so the sizes are those of the largest
    share, and only the query rows are the rank's own.
    """
    run = rank // cut.ulysses
    rows = layout.all_query_rows
    first = sum(cut.query_rows[:run])
    if cut.ring > 1:
        assert not layout.exact_rows
        rows = range(first, first + cut.query_rows[run])
    share = Share(
        heads=max(shares(layout.heads, cut.ulysses)),
        first_row=rows.start,
        rows=len(rows),
        most_rows=len(rows) if cut.ring == 1 else max(cut.query_rows),
        tokens=max(cut.tokens),
        grid_tokens=max(cut.grid),
    )
    return replace(layout, share=share)
