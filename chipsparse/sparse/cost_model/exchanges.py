"""The exchanges between the processes of one generation, and their times: from sizes alone.

In every call of the transformer that computes something, whatever its layers do: around the
attention of each layer query, key and value in one exchange and the output in another, and the
video or image tokens once behind the last layer (`chipsparse.parallel.head_exchange`). Where
guidance branches are on different processes, they swap their outputs at the end of every step, and
at a refresh the first one sends the columns that it chose. Decisions, some bytes each, are left
out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from chipsparse.config import Action
from chipsparse.kernels.checks import block_count
from chipsparse.layout import ModelLayout, Share
from chipsparse.parallel.degrees import Parallel
from chipsparse.parallel.sequence_cut import SequenceCut, cut_sequence, shares
from chipsparse.sparse.cost_model.layer_times import Rates
from chipsparse.sparse.plan import SparsityPlan


@dataclass(frozen=True)
class Exchange:
    """One exchange between all processes at one point of a step."""

    times: int  # in a step
    sent: Sequence[int]  # bytes that leave each process, each time
    received: Sequence[int]  # bytes that come to each process, each time

    def seconds(self, rates: Rates) -> float:
        """All of them, as if nothing was computed meanwhile; the one with the most counts."""
        most = max(*self.sent, *self.received)
        return self.times * (rates.peer_seconds + most / rates.peer_link)


class RankShare(NamedTuple):
    """The share of a generation that one process has."""

    branch: int | None  # the guidance branch that it computes; None where it computes all
    layout: ModelLayout  # of the generation, with its own share of a call's tokens and heads


@dataclass(frozen=True)
class Sharing:
    """A generation that is shared by processes."""

    plan: SparsityPlan  # of the whole generation: its layout has nobody's share
    parallel: Parallel
    branches: int  # transformer calls per step, on all processes
    dtype: torch.dtype  # of the hidden states
    output_channels: int  # that the transformer returns for each video or image token
    dense: Collection[int] = ()  # layers whose attention never runs sparse despite the plan

    @cached_property
    def cut(self) -> SequenceCut:
        """The tokens of those that share a call; `ValueError` for fewer blocks than processes."""
        config = self.plan.config
        rows = config.block_size if config.mlp.is_sparse else 1
        return cut_sequence(self.plan.layout, self.parallel.ulysses, rows)

    @property
    def calls(self) -> int:
        """Transformer calls per step of one process."""
        return max(1, self.branches // self.parallel.guidance)

    def ranks(self) -> list[RankShare]:
        """Return the share of each process; those that share a call follow each other."""
        layouts = [self.plan.layout]
        if self.parallel.ulysses > 1:
            layouts = [self._layout(place) for place in range(self.parallel.ulysses)]
        branches = [None] if self.parallel.guidance == 1 else range(self.parallel.guidance)
        return [RankShare(branch, layout) for branch in branches for layout in layouts]

    def _layout(self, place: int) -> ModelLayout:
        layout = self.plan.layout
        share = Share(
            heads=shares(layout.heads, self.parallel.ulysses)[place],
            tokens=self.cut.tokens[place],
            grid_tokens=self.cut.grid[place],
        )
        return replace(layout, share=share)

    def exchanges(self, action: Action) -> list[Exchange]:
        """Return what the processes send in one step; of a skipped one, no tokens."""
        exchanges = [] if self.parallel.guidance == 1 else self._of_branches(action)
        if self.parallel.ulysses > 1 and action is not Action.SKIP:
            exchanges += self._of_calls()
        return exchanges

    def _of_calls(self) -> list[Exchange]:
        """Return what the processes of a call send, the same for each guidance branch."""
        layout = self.plan.layout
        ranks = self.parallel.ulysses
        groups = self.parallel.guidance
        unit = layout.batch * layout.head_dim * self.dtype.itemsize
        places = list(zip(self.cut.tokens, shares(layout.heads, ranks), strict=True))
        # Each process's own tokens of the others' heads, and the others' tokens of its own heads.
        given = [unit * tokens * (layout.heads - heads) for tokens, heads in places] * groups
        taken = [unit * (layout.tokens - tokens) * heads for tokens, heads in places] * groups
        row = layout.batch * layout.width * self.dtype.itemsize
        gathered = [(ranks - 1) * max(self.cut.grid) * row] * ranks * groups  # all send as much
        layers = self.calls * layout.layers
        return [
            Exchange(layers, [3 * n for n in given], [3 * n for n in taken]),
            Exchange(layers, taken, given),
            Exchange(self.calls, gathered, gathered),
        ]

    def _of_branches(self, action: Action) -> list[Exchange]:
        layout = self.plan.layout
        ranks = self.parallel.ulysses
        output = layout.batch * layout.grid_tokens * self.output_channels * self.dtype.itemsize
        swapped = [output] * self.parallel.ranks
        exchanges = [Exchange(1, swapped, swapped)]
        layers = set(range(layout.layers)) - set(self.dense)
        sparse = sum(self.plan.is_sparse(layer, "attention") for layer in layers)
        if action is Action.REFRESH and sparse:
            chosen = [self._column_bytes(rank.layout) for rank in self.ranks()[:ranks]]
            none = [0] * ranks
            exchanges.append(Exchange(sparse, chosen + none, none + chosen))
        return exchanges

    def _column_bytes(self, layout: ModelLayout) -> int:
        """Bytes of the columns that a layer keeps, a bit for each."""
        blocks = block_count(len(layout.query_rows), self.plan.config.block_size)
        return layout.batch * layout.own.heads * blocks * -(-layout.tokens // 8)

    def sent_bytes(self, action: Action) -> list[int]:
        """Return the bytes that each process sends in one step, by rank."""
        exchanges = self.exchanges(action)
        return [
            sum(exchange.times * exchange.sent[rank] for exchange in exchanges)
            for rank in range(self.parallel.ranks)
        ]

    def seconds(self, action: Action, rates: Rates) -> float:
        """Return the seconds of a step's exchanges, as if none of them was hidden."""
        return sum(exchange.seconds(rates) for exchange in self.exchanges(action))
