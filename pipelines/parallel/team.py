"""The processes that a pipeline's generation is spread over, and this one's part in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import diffusers
import torch
import torch.distributed as dist

from chipsparse import __version__
from chipsparse.config import SparsityConfig
from chipsparse.parallel.agreement import Together
from chipsparse.parallel.branch_columns import BranchColumns
from chipsparse.parallel.degrees import Parallel
from chipsparse.parallel.head_exchange import HeadExchange
from chipsparse.parallel.peers import PeerError, Peers
from chipsparse.pipelines.parallel.context_parallel import ulysses_group
from chipsparse.pipelines.parallel.guidance import GuidanceSplit
from chipsparse.pipelines.parallel.split_sequence import SplitSequence


class Team:
    """The processes of one patched pipeline.

    Args:
        ranks: their global ranks. Those that share the tokens of a call follow each other.
        guidance: how many guidance branches are on processes of their own.
        group: those that share the tokens, where that is there already and ``guidance`` is 1.

    Raises:
        PeerError: other processes run other versions, or do not join.
    """

    def __init__(self, ranks: Sequence[int], *, guidance: int = 1, group: Any = None) -> None:
        self._all = Peers(ranks)
        self._all.check_same(
            {
                "version of chipsparse": __version__,
                "version of torch": torch.__version__,
                "version of diffusers": diffusers.__version__,
            }
        )
        ulysses = len(ranks) // guidance
        together = [list(ranks[first : first + ulysses]) for first in range(0, len(ranks), ulysses)]
        across = [list(ranks[place::ulysses]) for place in range(ulysses)]
        self._told: BaseException | None = None
        self._exchange: HeadExchange | None = None
        self.guidance: GuidanceSplit | None = None
        columns = None
        if ulysses > 1:
            group, members = (group, together[0]) if group is not None else _own_group(together)
            self._exchange = HeadExchange(group, Peers(members))
        if guidance > 1:
            group, members = _own_group(across)
            peers = Peers(members)
            self.guidance = GuidanceSplit(group, peers)
            columns = BranchColumns(group, peers)
        self.agreement = Together(self._all, columns)

    def split(self, config: SparsityConfig, least_text: int) -> SplitSequence | None:
        """This process's share of one transformer; None where no tokens are shared."""
        if self._exchange is None:
            return None
        rows = config.mlp.block_size if config.mlp.enabled else 1
        return SplitSequence(self._exchange, rows=rows, least_text=least_text)

    def failed(self, error: BaseException) -> None:
        """Tells all others, once, that this process failed; see `Peers.failed`.

        Raises:
            PeerError: where it failed because another one did.
        """
        if error is self._told:
            return
        self._told = error
        found = [self._all]
        found += [] if self._exchange is None else [self._exchange.peers]
        found += [] if self.guidance is None else [self.guidance.peers]
        blamed = None
        for peers in found:
            try:
                peers.failed(error)
            except PeerError as other:
                blamed = blamed or other
        if blamed is not None:
            self._told = blamed
            raise blamed from error


def _own_group(groups: Sequence[list[int]]) -> tuple[Any, list[int]]:
    """The one of these groups that this process is in, and its ranks; all processes make all."""
    own = dist.get_rank()
    made = [(dist.new_group(members), members) for members in groups]
    return next((group, members) for group, members in made if own in members)


def team_of(transformers: Sequence[Any], parallel: Parallel | None) -> Team | None:
    """The processes that run these transformers together; None: this one alone.

    Args:
        transformers: of one pipeline; on all or none of them diffusers' ``enable_parallelism`` was
            called.
        parallel: what `enable` was told instead.

    Raises:
        ValueError: both are there, or one expert is parallel and another is not, or there are no
            such processes.
    """
    groups = [ulysses_group(each) for each in transformers]
    named = next((group for group in groups if group is not None), None)
    if named is not None:
        if parallel is not None:
            raise ValueError(
                f"enable_parallelism was called on this {type(transformers[0]).__name__}, and "
                f"{parallel} is given as well; give one of the two"
            )
        if None in groups:
            raise ValueError(
                "enable_parallelism was called on one of this pipeline's transformers only; call "
                "it on all of them"
            )
        return Team(dist.get_process_group_ranks(named), group=named)
    if parallel is None or parallel.ranks == 1:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"{parallel} needs {parallel.ranks} processes in a process group, and there is none; "
            "start them with torchrun and call torch.distributed.init_process_group() first, or "
            f"use chipsparse generate --gpus {parallel.ranks}"
        )
    if dist.get_world_size() != parallel.ranks:
        raise ValueError(
            f"{parallel} needs {parallel.ranks} processes, and there are {dist.get_world_size()}"
        )
    return Team(range(parallel.ranks), guidance=parallel.guidance)
