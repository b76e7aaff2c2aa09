"""How the processes of one generation meet, before any of them loads a weight."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import diffusers
import torch
import torch.distributed as dist

import chipsparse
from chipsparse.cli.errors import user_errors
from chipsparse.cli.ranks.gpus import check_exchange, gpu_kind
from chipsparse.cli.ranks.joined import Joined, Meeting
from chipsparse.parallel.peers import TIMEOUT_SECONDS, PeerError, Peers

# How long the others wait for what the first process does alone, such as comparing long videos.
FIRST_SECONDS = 3600.0


def meet(process: Joined, device: torch.device, facts: Mapping[str, Any] | None = None) -> Joined:
    """The process with its peers, for the rest of its life; as it is where it is alone.

    Args:
        facts: what must be equal on all of them, by its name in words, besides versions and GPUs.

    Raises:
        UserError: they cannot meet, or differ in something.
    """
    if process.ranks == 1:
        return process
    check_exchange(device)
    on_gpu = device.type == "cuda"
    if not on_gpu:  # they share the machine's cores
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // process.ranks))
    elif device.index is not None:
        torch.cuda.set_device(device)
    with user_errors(RuntimeError, ValueError, what="the processes could not meet"):
        if not dist.is_initialized():
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                timeout=timedelta(seconds=TIMEOUT_SECONDS),
                **_store(process, process.meeting),
            )
        peers = Peers(range(process.ranks), timeout_s=FIRST_SECONDS)
    with user_errors(PeerError):
        peers.check_same(
            {
                "version of chipsparse": chipsparse.__version__,
                "version of torch": torch.__version__,
                "version of diffusers": diffusers.__version__,
                "device": gpu_kind(torch.cuda.current_device()) if on_gpu else "cpu",
                **(facts or {}),
            }
        )
    return replace(process, peers=peers)


def _store(process: Joined, meeting: Meeting | None) -> dict[str, Any]:
    if meeting is None:
        return {}
    there = dist.TCPStore(meeting.host, meeting.port, is_master=False)
    store = dist.PrefixStore(meeting.name, there)
    return {"store": store, "rank": process.rank, "world_size": process.ranks}
