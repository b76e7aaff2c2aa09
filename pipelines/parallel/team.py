"""The processes that a pipeline's generation is spread over, and this one's part in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import diffusers
import torch
import torch.distributed as dist

from chipsparse.common.version import __version__
from chipsparse.config import SparsityConfig
from chipsparse.parallel.agreement import Agreement, BranchColumns
from chipsparse.parallel.degrees import Parallel
from chipsparse.parallel.head_exchange import HeadExchange, SharingGroup
from chipsparse.parallel.peers import PeerError, Peers
from chipsparse.pipelines.parallel.context_parallel import sharing_group
from chipsparse.pipelines.parallel.guidance import GuidanceSplit
from chipsparse.pipelines.parallel.split_sequence import SplitSequence


class Team:
    """The processes of one patched pipeline, by their global ranks.

    Those that share the tokens of a call follow each other, and of these those that share the
    heads. Other versions on some of them raise `PeerError`.
    """

    def __init__(
        self, ranks: Sequence[int], parallel: Parallel, *, group: SharingGroup | None = None
    ) -> None:
        self._all = Peers(ranks)
        self._all.check_same(
            {
                "version of chipsparse": __version__,
                "version of torch": torch.__version__,
                "version of diffusers": diffusers.__version__,
            }
        )
        sharing = parallel.sharing
        self._reported: BaseException | None = None
        self._exchange: HeadExchange | None = None
        self.guidance: GuidanceSplit | None = None
        columns = None
        if sharing > 1:
            together = [ranks[first : first + sharing] for first in range(0, len(ranks), sharing)]
            group = group or SharingGroup(_own_group(together), parallel.ring)
            members = dist.get_process_group_ranks(group.tokens)
            self._exchange = HeadExchange(group, Peers(members))
        if parallel.guidance > 1:
            branches = _own_group([ranks[place::sharing] for place in range(sharing)])
            peers = Peers(dist.get_process_group_ranks(branches))
            self.guidance = GuidanceSplit(branches, peers)
            columns = BranchColumns(branches, peers)
        self.agreement = Agreement(self._all, columns)

    def split(self, config: SparsityConfig, *, needs_text: bool) -> SplitSequence | None:
        """This process's share of one transformer; None where no tokens are shared."""
        if self._exchange is None:
            return None
        return SplitSequence(
            self._exchange,
            rows=config.block_size if config.mlp.is_sparse else 1,
            query_rows=config.block_size if config.attention.is_sparse else 1,
            needs_text=needs_text,
        )

    def failed(self, error: BaseException) -> None:
        """Tells all others, once, that this process failed; see `Peers.failed`."""
        if error is self._reported:
            return
        self._reported = error
        if self._exchange is not None:
            self._exchange.leave()
        groups = [self._all]
        groups += [] if self._exchange is None else [self._exchange.peers]
        groups += [] if self.guidance is None else [self.guidance.peers]
        blamed = None
        for peers in groups:
            try:
                peers.failed(error)
            except PeerError as other:
                blamed = blamed or other
        if blamed is not None:
            self._reported = blamed
            raise blamed from error


def _own_group(groups: Sequence[Sequence[int]]) -> Any:
    """The one of these groups that this process is in."""
    own = dist.get_rank()
    made = [(_new_group(list(members)), members) for members in groups]
    return next(group for group, members in made if own in members)


def _new_group(ranks: list[int]) -> Any:
    """A process group whose exchanges a GPU begins although it has other work before it."""
    options = None
    if dist.get_backend() == "nccl":
        nccl: Any = vars(dist)["ProcessGroupNCCL"]  # builds for CPUs lack it
        options = nccl.Options(is_high_priority_stream=True)
    return dist.new_group(ranks, pg_options=options)


def team_of(transformers: Sequence[Any], parallel: Parallel | None) -> Team | None:
    """The processes that run a pipeline's transformers together; None: this one alone.

    Either diffusers' ``enable_parallelism`` was called on all of them, or `enable` was given
    `parallel`. Raises `ValueError` where both are there, one expert is parallel and another is not,
    or there are no such processes.
    """
    groups = [sharing_group(transformer) for transformer in transformers]
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
        ranks = dist.get_process_group_ranks(named.tokens)
        named_degrees = Parallel(ulysses=len(ranks) // named.ring, ring=named.ring)
        return Team(ranks, named_degrees, group=named)
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
    return Team(range(parallel.ranks), parallel)
