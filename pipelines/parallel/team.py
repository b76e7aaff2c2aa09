"""The processes that a pipeline's generation is spread over, and this one's part in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import diffusers
import torch
import torch.distributed as dist

from chipsparse.common.machine import is_stuck
from chipsparse.common.version import __version__
from chipsparse.config import SparsityConfig
from chipsparse.parallel.agreement import Agreement, BranchColumns
from chipsparse.parallel.degrees import Parallel
from chipsparse.parallel.head_exchange import HeadExchange
from chipsparse.parallel.peers import PeerError, Peers
from chipsparse.pipelines.parallel.context_parallel import sharing_group
from chipsparse.pipelines.parallel.guidance import GuidanceSplit
from chipsparse.pipelines.parallel.split_sequence import SplitSequence

TOLD = "told_by_chipsparse"  # attribute of an error that the other processes know of
OURS = "chipsparse"  # describes process groups that were made here, and in which nobody failed


class Team:
    """The processes of one patched pipeline, by their global ranks.

    Processes that share the tokens of a call are consecutive in this order. Different versions of
    the libraries raise `PeerError`.
    """

    def __init__(self, ranks: Sequence[int], parallel: Parallel, *, group: Any = None) -> None:
        self._all = Peers(ranks)
        self._all.check_same(
            {
                "version of chipsparse": __version__,
                "version of torch": torch.__version__,
                "version of diffusers": diffusers.__version__,
            },
        )
        sharing = parallel.ulysses
        self.stuck = False  # this GPU waits for a process that failed
        self._groups: list[Any] = []  # of ours
        self._exchange: HeadExchange | None = None
        self.guidance: GuidanceSplit | None = None
        columns = None
        if sharing > 1:
            together = [ranks[first : first + sharing] for first in range(0, len(ranks), sharing)]
            if group is None:
                group = self._own_group(together)
            members = dist.get_process_group_ranks(group)
            self._exchange = HeadExchange(group, Peers(members))
        if parallel.guidance > 1:
            branches = self._own_group([ranks[place::sharing] for place in range(sharing)])
            peers = Peers(dist.get_process_group_ranks(branches))
            self.guidance = GuidanceSplit(branches, peers)
            columns = BranchColumns(branches, peers)
        self.agreement = Agreement(self._all, columns)

    def split(self, config: SparsityConfig, *, needs_text: bool) -> SplitSequence | None:
        """Return this process's shard of one transformer; None where no tokens are shared."""
        if self._exchange is None:
            return None
        return SplitSequence(
            self._exchange,
            rows=config.block_size if config.mlp.is_sparse else 1,
            needs_text=needs_text,
        )

    def failed(self, error: BaseException, device: torch.device) -> None:
        """Tells all others, once, that this process failed; see `Peers.failed`."""
        if TOLD in vars(error):
            return
        vars(error)[TOLD] = True
        for group in self._groups:  # others may have begun an exchange there
            group._set_group_desc("")
        parts = (self._exchange, self.guidance)
        blamed = None
        for peers in (self._all, *(part.peers for part in parts if part is not None)):
            try:
                peers.failed(error)
            except PeerError as other:
                blamed = blamed or other
        self.stuck = self.stuck or is_stuck(device)
        if self._exchange is not None and self.stuck:
            self._exchange.close(stuck=True)
        if blamed is not None:
            vars(blamed)[TOLD] = True
            raise blamed from error

    def close(self) -> None:
        """Frees what others write to."""
        if self._exchange is not None:
            self._exchange.close(stuck=self.stuck)

    def _own_group(self, groups: Sequence[Sequence[int]]) -> Any:
        """The one of these groups that this process is in; that of an earlier team, if all can."""
        place = next(place for place, ranks in enumerate(groups) if dist.get_rank() in ranks)
        # A group of NCCL takes memory and seconds, and could only be destroyed by all together.
        known = [group for group in dist.distributed_c10d._world.pg_map if group.group_desc == OURS]
        found = [g for g in known if dist.get_process_group_ranks(g) == [*groups[place]]]
        if not self._all.least(len(found))[0]:
            for group in found:  # in which another process failed
                group._set_group_desc("")
            found = [_new_group(list(ranks)) for ranks in groups][place:]
        self._groups.append(found[0])
        return found[0]


def _new_group(ranks: list[int]) -> Any:
    """A process group whose exchanges a GPU begins although it has other work before it."""
    options = None
    if dist.get_backend() == "nccl":
        nccl: Any = vars(dist)["ProcessGroupNCCL"]  # builds for CPUs lack it
        options = nccl.Options(is_high_priority_stream=True)
    return dist.new_group(ranks, pg_options=options, group_desc=OURS)


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
                f"{parallel} is given as well; give one of the two",
            )
        if None in groups:
            raise ValueError(
                "enable_parallelism was called on one of this pipeline's transformers only; call "
                "it on all of them",
            )
        ranks = dist.get_process_group_ranks(named)
        return Team(ranks, Parallel(ulysses=len(ranks)), group=named)
    if parallel is None or parallel.ranks == 1:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"{parallel} needs {parallel.ranks} processes in a process group, and there is none; "
            "start them with torchrun and call torch.distributed.init_process_group() first, or "
            f"use chipsparse generate --gpus {parallel.ranks}",
        )
    if dist.get_world_size() != parallel.ranks:
        raise ValueError(
            f"{parallel} needs {parallel.ranks} processes, and there are {dist.get_world_size()}",
        )
    return Team(range(parallel.ranks), parallel)
