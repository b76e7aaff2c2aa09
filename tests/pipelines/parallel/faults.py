"""Mistakes put into one rank or all, and what the ranks make of them."""

import os
import signal
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist

import chipsparse
from chipsparse.layers.attention import AttentionLayer
from chipsparse.parallel import head_turns
from chipsparse.pipelines.models.wan import WanAdapter
from chipsparse.pipelines.parallel import split_sequence
from chipsparse.plan import Action, SparsityPlan
from tests.pipelines.parallel.equal_bits import (
    BIG,
    generate,
    largest_difference,
    ranks_agree,
    report_of_layers,
    run,
    wan_of,
)
from tests.pipelines.test_families import SPARSE

CALL = {**BIG, "height": 80, "width": 64, "guidance_scale": 1.0}
BOTH = chipsparse.Parallel(ulysses=2)
ROWS = chipsparse.Parallel(ring=2)


def forgotten(offset):
    on_rank = split_sequence.on_rank

    def without(layout, cut, rank):
        part = on_rank(layout, cut, rank)
        return replace(part, share=replace(part.share, **{offset: 0}))

    return mock.patch.object(split_sequence, "on_rank", without)


def forgotten_head_offset():
    return forgotten("first_head")


def forgotten_block_offset():
    return forgotten("first_row")


def rotary_cut_before_ordering():
    def cut(self, _module, _args, output):
        return tuple(self.split.own_grid(part, 1) for part in output)

    return mock.patch.object(WanAdapter, "ordered_rotary", cut)


def swapped_ranks():
    unpack = head_turns.unpack_pieces

    def swapped(received, places, pieces, *, dim, capacity=None):
        if dim == head_turns.TOKENS:
            received = torch.cat(received.chunk(2)[::-1])
        unpack(received, places, pieces, dim=dim, capacity=capacity)

    return mock.patch.object(head_turns, "unpack_pieces", swapped)


WRONG = [forgotten_head_offset, rotary_cut_before_ordering, swapped_ranks]


def skips_alone():
    """Rank 1 skips a step that rank 0 computes."""
    taken = SparsityPlan.taken

    def skipping(self, step, recorded):
        return Action.SKIP if dist.get_rank() == 1 and step == 4 else taken(self, step, recorded)

    return mock.patch.object(SparsityPlan, "taken", skipping)


def refreshes_alone():
    """The layers of rank 1 refresh at every sparse step."""
    decide = AttentionLayer._decide

    def deciding(self, state):
        action = decide(self, state)
        alone = dist.get_rank() == 1 and action is Action.SPARSE
        return Action.REFRESH if alone else action

    return mock.patch.object(AttentionLayer, "_decide", deciding)


def seen():
    """The distance of each mistake from one process, and the errors of ranks that differ."""
    with torch.no_grad():
        alone, _ = run(wan_of(4), CALL, SPARSE, None)
        found = {"right": largest_difference(run(wan_of(4), CALL, SPARSE, BOTH)[0], alone)}
        for fault in WRONG:
            with fault():
                wrong, _ = run(wan_of(4), CALL, SPARSE, BOTH)
            found[fault.__name__] = largest_difference(wrong, alone)
        for fault in (forgotten_block_offset, swapped_ranks):
            with fault():
                wrong, _ = run(wan_of(4), CALL, SPARSE, ROWS)
            found[f"{fault.__name__} of a ring"] = largest_difference(wrong, alone)
        with refreshes_alone():
            for name, parallel in (("heads", BOTH), ("rows", ROWS)):
                result, report = run(wan_of(4), CALL, SPARSE, parallel)
                found[f"refreshes alone, {name}"] = [
                    ranks_agree(result),
                    report_of_layers(report).get("attention sparse", 0),
                    largest_difference(result, alone),
                ]
        with skips_alone():
            found["skips alone"] = said(wan_of(4), CALL)
        found["seed"] = said(wan_of(4), CALL, seed=dist.get_rank())
        prompt = ("a red circle", "a blue square")[dist.get_rank()]
        found["prompt"] = said(wan_of(4), {**CALL, "prompt": prompt})
        config = SPARSE.override({"attention.density": 0.2 + 0.1 * dist.get_rank()})
        found["config"] = said(wan_of(4), CALL, config)
        found["heads"] = said(wan_of(1), CALL)
        found["rows"] = said(
            wan_of(4), {**CALL, "height": 32, "width": 32, "num_frames": 1}, SPARSE, parallel=ROWS
        )
        found["tokens"] = said(wan_of(4), {**CALL, "height": 16, "width": 16, "num_frames": 1})
        found["processes"] = said(wan_of(4), CALL, parallel=chipsparse.Parallel(ulysses=3))
        # The next generation is as if nothing had been.
        found["afterwards"] = largest_difference(run(wan_of(4), CALL, SPARSE, BOTH)[0], alone)
    return found


def said(pipe, call, config=SPARSE, *, parallel=BOTH, seed=0):
    """The error of a generation."""
    try:
        with chipsparse.enable(pipe, config, parallel=parallel):
            generate(pipe, call, seed)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def breaks_off(how, shared):
    """Rank 1 raises, or is killed, within a block of the model."""
    pipe, call = wan_of(4), {**CALL, "guidance_scale": 3.0 if shared == "guidance" else 1.0}

    def broken(*_):
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("no sum today")

    if dist.get_rank() == 1:
        pipe.transformer.blocks[1].register_forward_pre_hook(broken)
    parallel = chipsparse.Parallel(**{shared: 2})
    with torch.no_grad(), chipsparse.enable(pipe, SPARSE, parallel=parallel):
        generate(pipe, call)
