"""What the ranks of `test_processes` run; nothing here loads a model."""

import time

import torch
import torch.distributed as dist

from chipsparse.parallel.agreement import Agreement
from chipsparse.parallel.peers import PeerError, Peers


def all_of_it():
    peers = Peers(range(dist.get_world_size()), timeout_s=20)
    return {
        "said": peers.gather(f"I am {peers.rank}"),
        "first": peers.first(0.1 * (1 + peers.rank)),
        "least": peers.least(5 - peers.rank, 3),
        "hosts": peers.on_this_host,
        "room": {
            kind: Agreement(peers).capacity(90 - peers.rank, 60, torch.device(kind))
            for kind in ("cpu", "cuda")
        },
        "differ": differing(peers),
        "afterwards": peers.gather(peers.rank),
    }


def differing(peers):
    try:
        peers.check_same({"seed": 3, "size": "small" if peers.rank < 2 else "large"})
    except PeerError as error:
        return str(error)
    return None


def hanging():
    """How long the other takes to know that rank 1 hangs, and its error."""
    peers, start = Peers(range(2), timeout_s=3), time.monotonic()
    if peers.rank == 1:
        time.sleep(8)
        return None
    try:
        peers.gather("a call")
    except PeerError as error:
        return [str(error), time.monotonic() - start]
    return None
