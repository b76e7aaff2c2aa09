"""The process groups of a team."""

from types import SimpleNamespace
from unittest import mock

import torch.distributed as dist

from chipsparse import Parallel
from chipsparse.pipelines.parallel import team


def groups_of(rank, parallel, backend="gloo"):
    """Ranks of the groups of one process, without any; and the options that they were made with."""
    made = []

    def new_group(ranks, pg_options):
        made.append(pg_options)
        return tuple(ranks)

    nccl = SimpleNamespace(Options=lambda **options: options)
    with (
        mock.patch.object(dist, "get_rank", return_value=rank),
        mock.patch.object(dist, "get_backend", return_value=backend),
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.object(dist, "ProcessGroupNCCL", nccl, create=True),
    ):
        return team._sharing_groups(range(parallel.ranks), parallel), made


def test_heads_and_rows_are_shared_by_the_processes_of_one_branch():
    for rank in range(8):
        groups, made = groups_of(rank, Parallel(ulysses=2, ring=2, guidance=2))
        branch, run = rank // 4 * 4, rank // 2 * 2
        assert groups.tokens == (branch, branch + 1, branch + 2, branch + 3)
        assert groups.heads == (run, run + 1)
        assert groups.rows == (branch + rank % 2, branch + rank % 2 + 2)
        assert made == [None] * 10  # every process makes all: 2 of tokens, 4 of heads, 4 of rows


def test_one_group_serves_where_only_heads_or_only_rows_are_shared():
    heads, made = groups_of(1, Parallel(ulysses=3), backend="nccl")
    assert heads.tokens == heads.heads == (0, 1, 2)
    assert heads.rows is None
    assert made == [{"is_high_priority_stream": True}]
    rows, _ = groups_of(1, Parallel(ring=3))
    assert rows.tokens == rows.rows == (0, 1, 2)
    assert rows.heads is None
