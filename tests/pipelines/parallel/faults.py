"""Mistakes put into one rank or all, and what the ranks make of them."""

import gc
import os
import signal
from unittest import mock

import torch
import torch.distributed as dist

import chipsparse
from chipsparse.config import Action
from chipsparse.parallel.windows import Windows
from chipsparse.sparse.layers.state import Shared
from chipsparse.sparse.plan import SparsityPlan
from tests.pipelines.parallel import equal_bits
from tests.pipelines.parallel.equal_bits import BIG, BOTH, run, said, wan_of
from tests.pipelines.small_sparse import generate
from tests.pipelines.test_families import SPARSE

CALL = {**BIG, "height": 80, "width": 64, "guidance_scale": 1.0}


def dense_alone():
    """Rank 1 records nothing at a step that rank 0 refreshes."""
    taken = SparsityPlan.taken

    def recording(self, step, recorded):
        return Action.DENSE if dist.get_rank() == 1 and step == 4 else taken(self, step, recorded)

    return mock.patch.object(SparsityPlan, "taken", recording)


def refreshes_alone():
    """The layers of rank 1 refresh at every sparse step."""
    layer_action = Shared.layer_action

    def refreshing(self, state, layer, part):
        action = layer_action(self, state, layer, part)
        alone = dist.get_rank() == 1 and part == "attention" and action is Action.SPARSE
        return Action.REFRESH if alone else action

    return mock.patch.object(Shared, "layer_action", refreshing)


def seen():
    with torch.no_grad():
        alone, _ = run(wan_of(4), CALL, SPARSE, None)
        found = {}
        with refreshes_alone():
            result, report = run(wan_of(4), CALL, SPARSE, BOTH)
        found["refreshes alone"] = [
            equal_bits.ranks_agree(result),
            equal_bits.report_of_layers(report)["attention sparse"],
            equal_bits.largest_difference(result, alone),
        ]
        with dense_alone():
            found["dense alone"] = said(wan_of(4), CALL)
        found["seed"] = said(wan_of(4), CALL, seed=dist.get_rank())
        prompt = ("a red circle", "a blue square")[dist.get_rank()]
        found["prompt"] = said(wan_of(4), {**CALL, "prompt": prompt})
        config = SPARSE.override({"attention.density": 0.2 + 0.1 * dist.get_rank()})
        found["config"] = said(wan_of(4), CALL, config)
        found["heads"] = said(wan_of(1), CALL)
        found["tokens"] = said(wan_of(4), {**CALL, "height": 16, "width": 16, "num_frames": 1})
        found["processes"] = said(wan_of(4), CALL, parallel=chipsparse.Parallel(ulysses=3))
        # The next generation is as if nothing had been.
        run(wan_of(4), CALL, SPARSE, BOTH)
        groups = len(dist.distributed_c10d._world.pg_map)
        gc.collect()
        gc.disable()
        again, _ = run(wan_of(4), CALL, SPARSE, BOTH)
        windows = sum(isinstance(thing, Windows) for thing in gc.get_objects())
        found["left"] = windows, len(dist.distributed_c10d._world.pg_map) - groups
        found["afterwards"] = equal_bits.largest_difference(again, alone)
    return found


def breaks_off(how, shared):
    """Rank 1 raises, or is killed, within a block of the model."""
    pipe = wan_of(4)
    call = {**CALL, "guidance_scale": 3.0 if shared == "guidance" else 1.0}

    def broken(*_):
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("no sum today")

    if dist.get_rank() == 1:
        pipe.transformer.blocks[1].register_forward_pre_hook(broken)
    parallel = chipsparse.Parallel(**{shared: 2})
    with torch.no_grad(), chipsparse.enable(pipe, SPARSE, parallel=parallel):
        generate(pipe, call)
