"""What processes send each other, against sums by hand."""

import pytest
import torch

from chipsparse.config import Action, SparsityConfig
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.parallel.degrees import Parallel
from chipsparse.sparse.cost_model.exchanges import Sharing
from chipsparse.sparse.cost_model.layer_times import Rates
from chipsparse.sparse.plan import SparsityPlan

# 10 blocks of 4 tokens, the last one short, and a prompt behind them.
LAYOUT = ModelLayout((LayerKind("block", 3, 32),), 5, 8, 2, ((1, 3, 13),), text_tokens=3)
SMALL = SparsityConfig().override(
    {
        "mlp.density": 0.3,
        "block_size": 4,
        "layers": [{"index": 0, "attention": "dense", "mlp": "dense"}],
    },
)
PLAN = SparsityPlan(SMALL, LAYOUT, 4)
BF16 = torch.bfloat16


def test_tokens_for_heads_by_hand():
    sharing = Sharing(PLAN, Parallel(ulysses=2), 2, BF16, output_channels=4)
    # 42 tokens are cut in the middle of 11 blocks; 3 and 2 heads.
    sizes = [(rank.layout.own.tokens, rank.layout.own.heads) for rank in sharing.ranks()]
    assert (sizes, sharing.cut.text) == ([(20, 3), (22, 2)], (0, 3))
    token_of_head = 2 * 8 * 2  # batch, head size, bytes
    forth = [token_of_head * 20 * 2, token_of_head * 22 * 3]  # own tokens, the other's heads
    rows = 2 * 20 * 40 * 2  # batch, the most video tokens of a rank, channels, bytes
    layers = 2 * 3  # of two calls
    expected = [layers * (3 * forth[0] + forth[1]) + 2 * rows]
    expected.append(layers * (3 * forth[1] + forth[0]) + 2 * rows)
    for action in (Action.DENSE, Action.REFRESH, Action.SPARSE):
        assert sharing.sent_bytes(action) == expected
    assert sharing.sent_bytes(Action.SKIP) == [0, 0]
    rates = Rates(peer_link=1e6, peer_seconds=1.0)
    seconds = layers * (2 + 4 * forth[1] / 1e6) + 2 * (1 + rows / 1e6)
    assert sharing.seconds(Action.SPARSE, rates) == pytest.approx(seconds)


def test_guidance_branches_by_hand():
    sharing = Sharing(PLAN, Parallel(guidance=2), 2, BF16, output_channels=4)
    assert (sharing.calls, sharing.ranks()) == (1, [(0, LAYOUT), (1, LAYOUT)])
    output = 2 * 39 * 4 * 2  # batch, video tokens, channels, bytes
    columns = 2 * 5 * 11 * 6  # batch, heads, blocks of 4 queries, bits of 42 columns
    for action in (Action.DENSE, Action.SPARSE, Action.SKIP):
        assert sharing.sent_bytes(action) == [output, output]
    assert sharing.sent_bytes(Action.REFRESH) == [output + 2 * columns, output]
    dense = Sharing(PLAN, Parallel(guidance=2), 2, BF16, output_channels=4, dense=[0, 2])
    assert dense.sent_bytes(Action.REFRESH) == [output + columns, output]
    rates = Rates(peer_link=1e3, peer_seconds=0.0)
    assert sharing.seconds(Action.REFRESH, rates) == pytest.approx((output + 2 * columns) / 1e3)
    alone = Sharing(PLAN, Parallel(), 2, BF16, output_channels=4)
    assert (alone.exchanges(Action.REFRESH), alone.ranks()) == ([], [(None, LAYOUT)])
