"""Tokens for heads and back, around the attention of one layer.

Outside of attention each process has some of the tokens, with all heads. Inside it has some of the
heads (Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509), of all tokens. So attention is that of
a single process, head by head and block by block.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from chipsparse.parallel.head_exchange import Given, HeadExchange, Swap
from chipsparse.parallel.sequence_cut import SequenceCut, shares

# Dimensions of ``[B, N, H, D]``.
TOKENS = 1
HEADS = 2
# Names of windows: what attention reads, and what it gives. Nobody writes to one of them before all
# have read it: query, key and value of a layer follow the output of the one before, and are needed
# for its own.
STATES = "states"
OUTPUT = "output"
# In so many parts heads are exchanged, where each process has as many: the attention of one part
# hides the exchange of the next. Nothing hides the arrival of the first, nor the way of the last
# one's output, so these have few heads. More parts would leave a GPU too few blocks at a time.
PARTS = 3
AT_THE_ENDS = 6  # of so many heads, one in the first part and one in the last
MOST_ROUTES = 16


class HeadChunks:
    """Query, key and value of one layer on their way to this process, and its output back.

    They come some heads at a time, and all parts are under way from the start. Where attention is
    computed part by part as well (`attend`), it begins when the first has come, and the exchanges
    of a part hide behind the attention of others. What is exchanged, and in which order, does not
    depend on how it is computed, so in that processes may differ.

    They start as ``states`` ``[B, n, H, D]`` of this process's tokens. After `receive` the
    attributes are complete: query, key and value ``[B, h, N, D]`` of this process's heads and all
    tokens. They are valid until the next layer's.
    """

    def __init__(
        self,
        exchange: HeadExchange,
        states: Sequence[torch.Tensor],
        cut: SequenceCut,
    ) -> None:
        self._exchange = exchange
        self._route = route = _route(exchange, cut, states[0])
        self.query, self.key, self.value = (state.transpose(1, 2) for state in route.states)
        with exchange.watch():
            self._receipts = deque(
                exchange.start(STATES, states, part.inward) for part in route.parts
            )
        self._sent: list[Callable[[], None]] = []

    def receive(self) -> None:
        """Take all outstanding receipts; the stream then waits for their copies."""
        with self._exchange.watch():
            while self._receipts:
                self._receipts.popleft()()

    def attend(self, compute: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        """Compute the attention ``[B, h', N, D]`` of one part of the heads after the other.

        Returns ``[B, H, n, D]``, of all heads and this process's tokens.
        """
        for part in self._route.parts:
            with self._exchange.watch():
                if self._receipts:
                    self._receipts.popleft()()
            self._send(part, compute(part.own))
        return self._collected()

    def finish(self, output: torch.Tensor) -> torch.Tensor:
        """Send the attention ``[B, h, N, D]`` of all heads; a result of `attend` passes through."""
        if self._sent:
            return output
        for part in self._route.parts:
            self._send(part, output[:, part.own])
        return self._collected()

    def _send(self, part: _Part, output: torch.Tensor) -> None:
        """Begin to send the attention ``[B, h', N, D]`` of one part to the owners of its tokens."""
        with self._exchange.watch():
            self._sent.append(self._exchange.start(OUTPUT, [output.transpose(1, 2)], part.outward))

    def _collected(self) -> torch.Tensor:
        """All heads of this process's tokens ``[B, H, n, D]``."""
        with self._exchange.watch():
            for wait in self._sent:
                wait()
            # Compiled code may go on to use the memory of what an operation gave it.
            return self._route.output.clone().transpose(1, 2)


@dataclass(frozen=True)
class _Part:
    """Some of the heads of every process."""

    own: slice  # this process's, among its own
    inward: Swap  # of query, key and value
    outward: Swap


@dataclass(frozen=True)
class _Route:
    """Where all of it goes, in calls of one kind."""

    states: tuple[torch.Tensor, ...]  # query, key and value ``[B, N, h, D]`` of this process
    output: torch.Tensor  # ``[B, n, H, D]``
    parts: tuple[_Part, ...]


def _route(exchange: HeadExchange, cut: SequenceCut, like: torch.Tensor) -> _Route:
    """The route of states like one ``[B, n, H, D]``."""
    batch, own, heads, width = like.shape
    assert own == cut.tokens[exchange.rank]
    kind = (cut, batch, heads, width, like.dtype, like.device)
    if kind not in exchange.routes:
        if len(exchange.routes) >= MOST_ROUTES:  # a prompt may get longer with every call
            exchange.routes.clear()
        exchange.routes[kind] = _new_route(exchange, cut, like)
    route: _Route = exchange.routes[kind]
    return route


def _new_route(exchange: HeadExchange, cut: SequenceCut, like: torch.Tensor) -> _Route:
    batch, _, heads, width = like.shape
    me = exchange.rank
    ranks = range(exchange.ranks)
    tokens = _ranges(cut.tokens)
    # By rank and part: the heads among those of the process, and among all.
    counts = shares(heads, exchange.ranks)
    parts = min(PARTS, *counts)
    within = [_ranges(_parts(count, parts)) for count in counts]
    of_all = [
        [range(own.start + part.start, own.start + part.stop) for part in within[rank]]
        for rank, own in enumerate(_ranges(counts))
    ]
    every = sum(cut.tokens)
    states = exchange.windows(STATES, [[(batch, every, n, width)] * 3 for n in counts], like)
    outputs = exchange.windows(OUTPUT, [[(batch, n, heads, width)] for n in cut.tokens], like)

    def inward(part: int) -> Swap:
        return Swap(
            HEADS,
            tuple(
                Given(
                    of_all[rank][part],
                    taken=_cut(states[me], tokens[rank], within[me][part]),
                    there=_cut(states[rank], tokens[me], within[rank][part]),
                )
                for rank in ranks
            ),
        )

    def outward(part: int) -> Swap:
        own = range(len(tokens[me]))
        return Swap(
            TOKENS,
            tuple(
                Given(
                    tokens[rank],
                    taken=_cut(outputs[me], own, of_all[rank][part]),
                    there=_cut(outputs[rank], range(len(tokens[rank])), of_all[me][part]),
                )
                for rank in ranks
            ),
        )

    (output,) = outputs[me]
    return _Route(
        tuple(states[me]),
        output,
        tuple(
            _Part(
                slice(within[me][part].start, within[me][part].stop),
                inward(part),
                outward(part),
            )
            for part in range(parts)
        ),
    )


def _parts(heads: int, parts: int) -> Sequence[int]:
    """The numbers of heads in each part of a process's."""
    if parts < PARTS:
        return shares(heads, parts)
    ends = -(-heads // AT_THE_ENDS)
    return ends, heads - 2 * ends, ends


def _cut(
    tensors: Sequence[torch.Tensor],
    tokens: range,
    heads: range,
) -> tuple[torch.Tensor, ...]:
    """These tokens and heads of tensors ``[B, N, H, D]``."""
    return tuple(
        tensor[:, tokens.start : tokens.stop, heads.start : heads.stop] for tensor in tensors
    )


def _ranges(counts: Iterable[int]) -> list[range]:
    ends = list(itertools.accumulate(counts, initial=0))
    return [range(*pair) for pair in itertools.pairwise(ends)]
