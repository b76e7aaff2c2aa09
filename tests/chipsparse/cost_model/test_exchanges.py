"""What processes send each other: against sums by hand, and against what real ones send."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

import chipsparse
from chipsparse.config import SparsityConfig
from chipsparse.cost_model.exchanges import Sharing
from chipsparse.cost_model.layer_times import Rates
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.parallel import head_exchange
from chipsparse.parallel.degrees import Parallel
from chipsparse.plan import Action, SparsityPlan
from tests.pipelines.tiny_runs import WAN
from tests.ranks import run_ranks

# 10 blocks of 4 tokens, the last one short, and a prompt behind them.
LAYOUT = ModelLayout(
    (LayerKind("block", 3, 32),), heads=5, head_dim=8, batch=2, grids=((1, 3, 13),), text_tokens=3
)
SMALL = SparsityConfig().override({"block_size": 4, "schedule.first_dense_layers": 1})
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
    assert sharing.calls == 1
    assert sharing.ranks() == [(0, LAYOUT), (1, LAYOUT)]
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


CONFIG = SparsityConfig().override(
    {
        "block_size": 16,
        "schedule.actions": ["dense", "refresh", "sparse", "skip"],
        "schedule.first_dense_layers": 1,
    }
)


def counted(ulysses, guidance):
    sent = Counter()
    _count_exchanges(sent)
    pipe, found = WAN.make(), {}

    def look(_pipe, step, _t, tensors):
        (action,) = {each.action for each in handle.report.steps if each.step == step}
        found[action.value] = sent.pop("bytes", 0)
        return tensors

    parallel = chipsparse.Parallel(ulysses=ulysses, guidance=guidance)
    with chipsparse.enable(pipe, CONFIG, parallel=parallel) as handle:
        sent.clear()
        WAN.generate(pipe, height=48, num_inference_steps=4, callback_on_step_end=look)
    return found


def _count_exchanges(sent):
    """Lets the collectives that carry tensors count what leaves this rank."""

    def counting(owner, name, nbytes):
        whole = getattr(owner, name)

        def call(*args, group=None, **kwargs):
            others = dist.get_world_size(group) - 1
            sent["bytes"] += nbytes(others, group, *args)
            return whole(*args, group=group, **kwargs)

        setattr(owner, name, call)

    def to_others(_others, group, received, given, _taken, sizes):
        own = sizes[dist.get_rank(group)]
        return (given.numel() - own) * given.element_size()

    def to_all(others, _group, _received, own):
        return others * own.nbytes

    counting(dist, "all_to_all_single", to_others)
    counting(head_exchange, "all_gather_tensor", to_all)
    counting(dist, "all_gather", to_all)
    counting(
        dist,
        "broadcast",
        lambda others, _, tensor, source: others * tensor.nbytes * (source == dist.get_rank()),
    )


@pytest.mark.slow
def test_it_is_what_real_processes_send(tmp_path):
    ended = run_ranks(4, f"{__name__}:counted", 2, 2, folder=tmp_path)
    layout = ModelLayout(
        kinds=(LayerKind("block", 3, 128),), heads=2, head_dim=32, batch=1, grids=((3, 3, 4),)
    )
    plan, parallel = SparsityPlan(CONFIG, layout, 4), Parallel(ulysses=2, guidance=2)
    sharing = Sharing(plan, parallel, 2, torch.float32, output_channels=4 * 4)
    for rank, each in enumerate(ended):
        assert each.result == {
            action.value: sharing.sent_bytes(action)[rank]
            for action in (Action.DENSE, Action.REFRESH, Action.SPARSE, Action.SKIP)
        }
