"""What the ranks of `test_processes` run; nothing here loads a model."""

import time

import torch
import torch.distributed as dist

from chipsparse.parallel.agreement import Together
from chipsparse.parallel.head_exchange import HeadExchange
from chipsparse.parallel.peers import PeerError, Peers
from chipsparse.parallel.sequence_cut import shares

BATCH, HEADS, WIDTH = 2, 5, 8
TOKENS = (7, 1, 12)


def all_of_it():
    peers = Peers(range(dist.get_world_size()), timeout_s=20)
    return {
        "told": peers.tell(f"I am {peers.rank}"),
        "first": peers.first(0.1 * (1 + peers.rank)),
        "agreed": Together(peers).first([[peers.rank, "mlp", "slow"]]),
        "least": peers.least(5 - peers.rank, 3),
        "hosts": peers.on_this_host,
        "there": exchanged(peers),
        "differ": differing(peers),
        "afterwards": peers.tell(peers.rank),
    }


def exchanged(peers):
    """Whether each rank gets all tokens of its heads, and its own tokens back."""
    exchange = HeadExchange(dist.group.WORLD, peers)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(3, BATCH, sum(TOKENS), HEADS, WIDTH, generator=generator)
    rank = peers.rank
    own = whole.split(list(TOKENS), dim=2)[rank]
    counts = shares(HEADS, len(peers))
    # Strided as a model's: heads side by side, between others.
    states = tuple(each.transpose(1, 2).contiguous().transpose(1, 2) for each in own)
    found = exchange.to_heads(states, TOKENS)
    expected = whole.split(list(counts), dim=3)[rank]
    back = exchange.to_tokens(2 * found[0], HEADS, TOKENS)
    gathered = exchange.gather(own[0].flatten(2), TOKENS)
    return [
        all(map(torch.equal, found, expected)),
        torch.equal(back, 2 * own[0]),
        torch.equal(gathered, whole[0].flatten(2)),
    ]


def differing(peers):
    try:
        peers.check_same({"seed": 3, "size": "small" if peers.rank < 2 else "large"})
    except PeerError as error:
        return str(error)
    return None


def failing(how):
    """How long the others take to know that rank 1 failed, and what they are told."""
    peers = Peers(range(dist.get_world_size()), timeout_s=3)
    exchange, start = HeadExchange(dist.group.WORLD, peers), time.monotonic()
    try:
        if peers.rank == 1:
            if how == "raises":
                raise KeyError("broken")
            if how == "hangs":
                time.sleep(8)
                return None
        if how == "in an exchange":
            return lost_in_an_exchange(peers, exchange)
        peers.tell("a call")
    except PeerError as error:
        return [str(error), time.monotonic() - start]
    except KeyError as error:
        peers.failed(error)
    return None


def lost_in_an_exchange(peers, exchange):
    if peers.rank == 1:
        dist.destroy_process_group()
        raise SystemExit(3)
    try:
        exchange.gather(torch.zeros(1, 2, 3), (2, 2))
    except RuntimeError as error:
        peers.failed(error)
    return None
