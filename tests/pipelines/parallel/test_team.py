"""The process groups of a team."""

import gc
import weakref
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from chipsparse.pipelines.parallel import team


def bare_team():
    bare = object.__new__(team.Team)
    bare.__dict__ |= {"stuck": False, "guidance": None, "_groups": []}
    vars(bare).update(_all=mock.Mock(least=lambda found: (found,)), _exchange=mock.Mock())
    return bare


def test_every_process_makes_all_groups_and_is_in_its_own():
    made = []

    def new_group(ranks, pg_options, group_desc):
        made.append((ranks, pg_options))
        return tuple(ranks)

    nccl = SimpleNamespace(Options=lambda **options: options)
    for rank, backend in ((0, "gloo"), (3, "nccl")):
        with (
            mock.patch.object(dist, "get_rank", return_value=rank),
            mock.patch.object(dist, "get_backend", return_value=backend),
            mock.patch.object(dist, "new_group", new_group),
            mock.patch.object(dist, "ProcessGroupNCCL", nccl, create=True),
        ):
            group = bare_team()._own_group([(0, 1), (2, 3)])
        first, options = (0, None) if rank == 0 else (2, {"is_high_priority_stream": True})
        assert group == (first, first + 1)
        assert made == [([0, 1], options), ([2, 3], options)]
        made.clear()


def test_a_failure_is_told_once_and_what_a_stuck_gpu_may_use_is_not_freed(monkeypatch):
    class OwnError(Exception):
        pass

    error = OwnError("no sum today")
    failed = bare_team()
    cpu = torch.device("cpu")
    told = weakref.ref(error)
    for _ in range(2):
        failed.failed(error, cpu)
    assert failed._all.failed.call_count == failed._exchange.peers.failed.call_count == 1
    failed._exchange.close.assert_not_called()
    failed._all.reset_mock()
    failed._exchange.reset_mock()
    del error
    gc.collect()
    assert told() is None  # and with it all that its frames held
    monkeypatch.setattr(team, "is_stuck", lambda device: True)
    failed.failed(OwnError(), cpu)
    failed._exchange.close.assert_called_once_with(stuck=True)
