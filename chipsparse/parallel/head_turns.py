"""Tokens for heads and back, around the attention of one layer.

Outside of attention each process has some of the tokens, with all heads. Inside it has some of the
heads (Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509), of all query rows or, in a ring, of
some, and of these heads all keys and values. So attention is that of a single process, head by head
and block by block. No softmax is put together from parts, as when keys pass from process to process
(Liu et al., "Ring Attention", arXiv 2310.01889): kept columns belong to query rows, and are all
there.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F

from chipsparse.kernels.rank_pieces import pack_pieces, unpack_pieces
from chipsparse.parallel.head_exchange import PARTS, HeadExchange, Pending
from chipsparse.parallel.sequence_cut import SequenceCut, shares

TOKENS, HEADS = 1, 2  # dimensions of ``[B, N, H, D]``


class HeadTurns:
    """Query, key and value of one layer on their way to this process, and its output back.

    They come some heads at a time, and all parts are under way from the start. Where attention is
    computed part by part as well (`attend`), it begins when the first has come, and the exchanges
    of a part hide behind the attention of others. What is exchanged, and in which order, does not
    depend on how it is computed, so in that processes may differ.

    They start as ``states`` ``[B, n, H, D]`` of this process's tokens. After `receive` the
    attributes are complete: query ``[B, h, R, D]`` of this process's heads and query rows, key and
    value ``[B, h, N, D]`` of all tokens.
    """

    def __init__(
        self, exchange: HeadExchange, states: tuple[torch.Tensor, ...], cut: SequenceCut
    ) -> None:
        self._exchange, self._cut, self._heads = exchange, cut, states[0].shape[HEADS]
        run, self._place = divmod(exchange.rank, cut.ulysses)
        first = run * cut.ulysses
        self._tokens = _ranges(cut.tokens[first : first + cut.ulysses])  # of each in this run
        self._rows = cut.query_rows[run]
        assert states[0].shape[TOKENS] == len(self._tokens[self._place])
        counts = shares(self._heads, cut.ulysses)
        parts = min(PARTS, *counts)
        within = [_ranges(shares(count, parts)) for count in counts]
        self._own = within[self._place]  # this process's heads of each part, among its own
        self._of_all = [  # by part, those of each process among all heads
            [
                range(heads.start + own[part].start, heads.start + own[part].stop)
                for heads, own in zip(_ranges(counts), within, strict=True)
            ]
            for part in range(parts)
        ]
        self._receipts: deque[Callable[[], None]] = deque()
        self._sent: list[Pending] = []
        with exchange.watch():
            if cut.ulysses > 1:
                states = self._swap(states)
            if cut.ring > 1:
                states = self._gather(states)
        self.query, self.key, self.value = (state.transpose(1, 2) for state in states)

    def receive(self) -> None:
        with self._exchange.watch():
            while self._receipts:
                self._receipts.popleft()()

    def attend(self, compute: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        """Compute the attention ``[B, h', R, D]`` of one part of the heads after the other.

        Returns ``[B, H, n, D]``, of all heads and this process's tokens.
        """
        outputs = []
        for part, heads in enumerate(self._own):
            with self._exchange.watch():
                if self._receipts:
                    self._receipts.popleft()()
            output = compute(slice(heads.start, heads.stop))
            if self._cut.ulysses == 1:
                outputs.append(output.transpose(1, 2))
            else:
                self._send(part, output)
        return self._collected() if self._sent else torch.cat(outputs, dim=HEADS).transpose(1, 2)

    def finish(self, output: torch.Tensor) -> torch.Tensor:
        """Send the attention ``[B, h, R, D]`` of all heads; a result of `attend` passes through."""
        if self._sent or self._cut.ulysses == 1:
            return output
        for part, heads in enumerate(self._own):
            self._send(part, output[:, heads.start : heads.stop])
        return self._collected()

    def _swap(self, states: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Begin to exchange tokens of this run for heads: ``[B, R, h, D]``."""
        batch, own, _, width = states[0].shape
        unit, heads = len(states) * batch * width, sum(map(len, self._own))
        whole = states[0].new_empty(len(states), batch, self._rows, heads, width).unbind(0)
        for part, mine in zip(self._of_all, self._own, strict=True):
            pending = self._exchange.start_swap(
                pack_pieces(states, part, dim=HEADS),
                [unit * own * len(heads) for heads in part],
                [unit * len(mine) * len(tokens) for tokens in self._tokens],
            )
            places = tuple(tensor[:, :, mine.start : mine.stop] for tensor in whole)
            self._receipts.append(partial(self._unpack, pending, places, self._tokens))
        return whole

    def _gather(self, states: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Begin to collect the keys and values of all runs: ``[B, N, h, D]``."""
        query, *both = states
        batch, _, heads, width = query.shape
        all_rows, most = self._cut.query_rows, max(self._cut.query_rows)
        whole = query.new_empty(2, batch, sum(all_rows), heads, width).unbind(0)
        before, self._receipts = self._receipts, deque()
        for mine in self._own:
            if before:
                before.popleft()()
            own = tuple(tensor[:, :, mine.start : mine.stop] for tensor in both)
            sent = pack_pieces(own, [range(self._rows)], dim=TOKENS)
            spare = 2 * batch * (most - self._rows) * len(mine) * width
            sent = F.pad(sent, (0, spare)) if spare else sent  # all send as much
            pending = self._exchange.start_gather(sent, self._exchange.groups.rows)
            places = tuple(tensor[:, :, mine.start : mine.stop] for tensor in whole)
            self._receipts.append(
                partial(self._unpack, pending, places, _ranges(all_rows), capacity=most)
            )
        return query, *whole

    def _unpack(
        self,
        pending: Pending,
        places: tuple[torch.Tensor, ...],
        pieces: list[range],
        *,
        capacity: int | None = None,
    ) -> None:
        unpack_pieces(self._exchange.wait(pending), places, pieces, dim=TOKENS, capacity=capacity)

    def _send(self, part: int, output: torch.Tensor) -> None:
        """Begin to send the attention ``[B, h', R, D]`` of one part to the owners of its tokens."""
        batch, heads, _, width = output.shape
        unit, own = batch * width, len(self._tokens[self._place])
        with self._exchange.watch():
            self._sent.append(
                self._exchange.start_swap(
                    pack_pieces((output.transpose(1, 2),), self._tokens, dim=TOKENS),
                    [unit * len(tokens) * heads for tokens in self._tokens],
                    [unit * own * len(heads) for heads in self._of_all[part]],
                )
            )

    def _collected(self) -> torch.Tensor:
        """All heads of this process's tokens ``[B, H, n, D]``."""
        batch, _, _, width = self.query.shape
        own = len(self._tokens[self._place])
        whole = self.query.new_empty(batch, own, self._heads, width)
        with self._exchange.watch():
            for part, pending in zip(self._of_all, self._sent, strict=True):
                unpack_pieces(self._exchange.wait(pending), (whole,), part, dim=HEADS)
        return whole.transpose(1, 2)


def _ranges(counts: Iterable[int]) -> list[range]:
    ends = list(itertools.accumulate(counts, initial=0))
    return [range(*pair) for pair in itertools.pairwise(ends)]
