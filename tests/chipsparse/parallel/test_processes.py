"""What several processes tell each other; `tests/pipelines/parallel` has what they exchange."""

import time

import pytest
import torch
import torch.distributed as dist

from chipsparse.parallel.agreement import Agreement
from chipsparse.parallel.peers import PeerError, Peers
from tests.ranks import run_ranks


def all_of_it():
    peers = Peers(range(dist.get_world_size()), timeout_s=20)
    with pytest.raises(PeerError) as differ:
        peers.check_same({"seed": 3, "size": "small" if peers.rank < 2 else "large"})
    return {
        "differ": str(differ.value),
        "said": peers.gather(f"I am {peers.rank}"),
        "first": peers.first(0.1 * (1 + peers.rank)),
        "least": peers.least(5 - peers.rank, 3),
        "hosts": peers.on_this_host,
        "room": {
            kind: Agreement(peers).capacity(90 - peers.rank, 60, torch.device(kind))
            for kind in ("cpu", "cuda")
        },
    }


def hanging():
    """How long the other takes to know that rank 1 hangs, and its error."""
    peers = Peers(range(2), timeout_s=3)
    start = time.monotonic()
    if peers.rank == 1:
        time.sleep(8)
        return None
    with pytest.raises(PeerError) as raised:
        peers.gather("a call")
    return [str(raised.value), time.monotonic() - start]


def test_three_ranks(tmp_path):
    for ended in run_ranks(3, f"{__name__}:all_of_it", folder=tmp_path):
        result = ended.result
        assert result["said"] == ["I am 0", "I am 1", "I am 2"]
        assert result["first"] == 0.1
        assert (result["least"], result["hosts"]) == ([3, 3], 3)
        assert result["room"] == {"cpu": [29, 20], "cuda": [88, 20]}  # a machine's is shared
        assert result["differ"].startswith("rank 0 and rank 2 differ in size: small and large")


@pytest.mark.slow
def test_the_others_know_who_hangs(tmp_path):
    first, _ = run_ranks(2, f"{__name__}:hanging", folder=tmp_path)
    message, seconds = first.result
    assert message == "rank 1 has not got here for 3 s: it is gone, hangs, or makes other calls"
    assert seconds < 60
