"""Tokens for heads and back, between the processes that share a sequence.

Outside of attention each has some of the tokens, with all heads. Inside it has all tokens of some
heads (Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509), so that attention is that of a single
process, head by head. What is sent is known from the sizes: none are exchanged, and no host waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from chipsparse.kernels.rank_pieces import pack_pieces, unpack_pieces
from chipsparse.parallel.peers import Peers
from chipsparse.parallel.sequence_cut import shares

TOKENS, HEADS = 1, 2  # dimensions of ``[B, N, H, D]``


class HeadExchange:
    """The exchanges of one process with the others of its group.

    Every process of the group makes the same ones in the same order.

    Args:
        group: the process group.
        peers: its processes.

    Attributes:
        ranks: how many there are.
        rank: place of this one.
        peers: see above.
    """

    def __init__(self, group: Any, peers: Peers) -> None:
        self._group = group
        self.peers = peers
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def to_heads(
        self, states: tuple[torch.Tensor, ...], tokens: Sequence[int]
    ) -> tuple[torch.Tensor, ...]:
        """All tokens of this rank's heads, of what has this rank's tokens of all heads.

        Args:
            states: query, key and value ``[B, n, H, D]``.
            tokens: how many each rank has; n is one of them.

        Returns:
            Query, key and value ``[B, N, h, D]``.
        """
        batch, own, heads, width = states[0].shape
        assert own == tokens[self.rank]
        counts = shares(heads, self.ranks)
        mine, unit = counts[self.rank], len(states) * batch * width
        received = self._all_to_all(
            pack_pieces(states, counts, dim=HEADS),
            [unit * own * count for count in counts],
            [unit * count * mine for count in tokens],
        )
        return unpack_pieces(received, tokens, dim=TOKENS, shape=(len(states), batch, mine, width))

    def to_tokens(self, output: torch.Tensor, heads: int, tokens: Sequence[int]) -> torch.Tensor:
        """Back: ``[B, N, h, D]`` of this rank's heads as ``[B, n, H, D]`` of its tokens."""
        batch, _, mine, width = output.shape
        counts, own = shares(heads, self.ranks), tokens[self.rank]
        unit = batch * width
        received = self._all_to_all(
            pack_pieces((output,), tokens, dim=TOKENS),
            [unit * count * mine for count in tokens],
            [unit * own * count for count in counts],
        )
        (whole,) = unpack_pieces(received, counts, dim=HEADS, shape=(1, batch, own, width))
        return whole

    def _all_to_all(self, sent: torch.Tensor, given: list[int], taken: list[int]) -> torch.Tensor:
        received = sent.new_empty(sum(taken))
        with self.peers.exchange():
            dist.all_to_all_single(received, sent, taken, given, group=self._group)
        return received

    def gather(self, tensor: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """``[B, N, C]`` on every rank, from the tokens ``[B, n, C]`` of each."""
        batch, own, channels = tensor.shape
        most = max(tokens)  # all ranks send as much
        sent = tensor.new_zeros(most, batch, channels)
        sent[:own] = tensor.transpose(0, 1)
        received = tensor.new_empty(self.ranks * most, batch, channels)
        # Its new name since PyTorch 2.13, which warns of the old one.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with self.peers.exchange():
            gather(received, sent, group=self._group)
        pieces = [part[:count] for part, count in zip(received.split(most), tokens, strict=True)]
        return torch.cat(pieces).transpose(0, 1)
