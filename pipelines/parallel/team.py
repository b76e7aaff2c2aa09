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
from chipsparse.parallel.degrees import Parallel
from chipsparse.parallel.head_exchange import HeadExchange
from chipsparse.parallel.peers import Peers
from chipsparse.pipelines.parallel.context_parallel import ulysses_group
from chipsparse.pipelines.parallel.split_sequence import SplitSequence


class Team:
    """The processes of one patched pipeline.

    Args:
        group: those that share the tokens of a call.

    Raises:
        PeerError: other processes run other versions, or do not join.
    """

    def __init__(self, group: Any) -> None:
        self._peers = Peers(dist.get_process_group_ranks(group))
        self._exchange = HeadExchange(group, self._peers)
        self._peers.check_same(
            {
                "version of chipsparse": __version__,
                "version of torch": torch.__version__,
                "version of diffusers": diffusers.__version__,
            }
        )

    @property
    def agreement(self) -> Together:
        """What their sessions decide together."""
        return Together(self._peers)

    def split(self, config: SparsityConfig, least_text: int) -> SplitSequence:
        """This process's share of one transformer; see `SplitSequence`."""
        rows = config.mlp.block_size if config.mlp.enabled else 1
        return SplitSequence(self._exchange, self._peers, rows=rows, least_text=least_text)


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
        return Team(named)
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
    return Team(dist.group.WORLD)
