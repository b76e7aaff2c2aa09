"""What the ranks of `test_processes` run; nothing here loads a model."""

import itertools
import time

import torch
import torch.distributed as dist

from chipsparse.parallel.agreement import Together
from chipsparse.parallel.head_exchange import HeadExchange, SharingGroups
from chipsparse.parallel.head_turns import HeadTurns
from chipsparse.parallel.peers import PeerError, Peers
from chipsparse.parallel.sequence_cut import SequenceCut, shares

BATCH, HEADS, WIDTH = 2, 9, 8
TOKENS = (7, 1, 12, 4)


def all_of_it():
    peers = Peers(range(dist.get_world_size()), timeout_s=20)
    return {
        "said": peers.tell(f"I am {peers.rank}"),
        "first": peers.first(0.1 * (1 + peers.rank)),
        "least": peers.least(5 - peers.rank, 3),
        "hosts": peers.on_this_host,
        "room": {
            kind: Together(peers).capacity(90 - peers.rank, 60, torch.device(kind))
            for kind in ("cpu", "cuda")
        },
        "differ": differing(peers),
        "afterwards": peers.tell(peers.rank),
    }


def all_ways():
    """`exchanged` of every way to share, of so many heads as there are parts or more."""
    world = dist.group.WORLD
    pairs, across = _groups([(0, 1), (2, 3)]), _groups([(0, 2), (1, 3)])
    ways = {
        "ulysses": SharingGroups(world, heads=world, rows=None),
        "ring": SharingGroups(world, heads=None, rows=world),
        "both": SharingGroups(world, heads=pairs, rows=across),
    }
    peers = Peers(range(dist.get_world_size()), timeout_s=20)
    return {
        f"{name} {parts}": exchanged(HeadExchange(groups, peers, parts=parts))
        for name, groups in ways.items()
        for parts in (1, 2, 3)
    }


def _groups(members):
    made = [dist.new_group(each) for each in members]
    return next(group for group, each in zip(made, members, strict=True) if dist.get_rank() in each)


def exchanged(exchange):
    """Whether each rank gets all keys and values of its heads, and the output of its tokens."""
    rank, ring = exchange.rank, exchange.groups.ring
    cut = SequenceCut(TOKENS, (0,) * len(TOKENS), ring)
    run, place = divmod(rank, cut.ulysses)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(3, BATCH, sum(TOKENS), HEADS, WIDTH, generator=generator)
    own = whole.split(list(TOKENS), dim=2)[rank]
    # Strided as a model's: heads side by side, between others.
    states = tuple(each.transpose(1, 2).contiguous().transpose(1, 2) for each in own)
    mine = whole.split(list(shares(HEADS, cut.ulysses)), dim=3)[place].transpose(2, 3)
    rows = mine[0].split(list(cut.query_rows), dim=2)[run]
    found = []
    turns = HeadTurns(exchange, states, cut)
    turns.arrive()
    found += map(torch.equal, (turns.query, turns.key, turns.value), (rows, *mine[1:]))
    found.append(torch.equal(turns.finish(2 * turns.query), 2 * own[0].transpose(1, 2)))
    in_turn, seen = HeadTurns(exchange, states, cut), []

    def compute(heads):
        seen.append(
            [
                torch.equal(in_turn.query[:, heads], rows[:, heads]),
                torch.equal(in_turn.key[:, heads], mine[1][:, heads]),
                torch.equal(in_turn.value[:, heads], mine[2][:, heads]),
            ]
        )
        return 2 * in_turn.query[:, heads]

    output = in_turn.each(compute)
    found.append(len(seen) == min(exchange.parts, *shares(HEADS, cut.ulysses)))
    found += itertools.chain(*seen)
    found.append(torch.equal(in_turn.finish(output), 2 * own[0].transpose(1, 2)))
    found.append(torch.equal(exchange.gather(own[0].flatten(2), TOKENS), whole[0].flatten(2)))
    return found


def differing(peers):
    try:
        peers.check_same({"seed": 3, "size": "small" if peers.rank < 2 else "large"})
    except PeerError as error:
        return str(error)
    return None


def failing(how):
    """How long the others take to know that rank 1 failed, and their errors."""
    peers = Peers(range(dist.get_world_size()), timeout_s=3)
    world, start = dist.group.WORLD, time.monotonic()
    exchange = HeadExchange(SharingGroups(world, heads=world, rows=None), peers)
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
