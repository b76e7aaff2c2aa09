"""What the ranks of `test_exchanges` run: a generation whose exchanges are counted."""

from collections import Counter

import torch
import torch.distributed as dist

import chipsparse
from chipsparse.config import SparsityConfig
from chipsparse.parallel import head_exchange
from tests.tiny_models import PROMPT, tiny_wan_pipeline

CONFIG = SparsityConfig().override(
    {
        "block_size": 16,
        "schedule.actions": ["dense", "refresh", "sparse", "skip"],
        "schedule.first_dense_layers": 1,
    }
)
SIZES = {"height": 48, "width": 64, "num_frames": 9, "max_sequence_length": 16}


def counted(ulysses, guidance):
    """Bytes that this rank sends to others in each step, by its action."""
    sent = Counter()
    _count_exchanges(sent)
    pipe, found = tiny_wan_pipeline(), {}

    def look(_pipe, step, _t, tensors):
        (action,) = {each.action for each in handle.report.steps if each.step == step}
        found[action.value] = sent.pop("bytes", 0)
        return tensors

    with chipsparse.enable(
        pipe, CONFIG, parallel=chipsparse.Parallel(ulysses=ulysses, guidance=guidance)
    ) as handle:
        sent.clear()
        pipe(
            PROMPT,
            **SIZES,
            negative_prompt="",
            guidance_scale=3.0,
            num_inference_steps=4,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
            callback_on_step_end=look,
        )
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
