"""The process groups of a team."""

from types import SimpleNamespace
from unittest import mock

import torch.distributed as dist

from chipsparse.pipelines.parallel import team


def test_every_process_makes_all_groups_and_is_in_its_own():
    made = []

    def new_group(ranks, pg_options):
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
            group = team._own_group([(0, 1), (2, 3)])
        first, options = (0, None) if rank == 0 else (2, {"is_high_priority_stream": True})
        assert group == (first, first + 1)
        assert made == [([0, 1], options), ([2, 3], options)]
        made.clear()
