"""Pipelines that denoise in sections: each is a generation, and the report is of the whole call."""

import itertools

import pytest
import torch

import chipsparse
from chipsparse.config import Action
from tests.pipelines.families.sections import PIPELINES
from tests.pipelines.small_sparse import EXACT, SPARSE, assert_close, error
from tests.variants import slow_unless

ACTIONS = ["dense", "refresh", "skip", "sparse", "refresh", "sparse"]
SKIPPING = SPARSE.override({"schedule.actions": ACTIONS})
DENSE = SPARSE.override({"schedule.actions": ["dense"]})
FAST = ("a lag", "windows with a lag", "framepack")


def made(pipe, call):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # some draw noise without the generator
        generator = torch.Generator().manual_seed(0)
        found = pipe(**call, output_type="latent", generator=generator, return_dict=False)[0]
    return torch.cat(found, dim=2) if isinstance(found, list) else found


@pytest.mark.parametrize("name", slow_unless(FAST, PIPELINES))
def test_every_section_is_a_generation_and_the_report_is_of_all(name):
    make, call, sections = PIPELINES[name]
    pipe = make()
    calls = []
    counting = pipe.transformer.register_forward_pre_hook(lambda *_: calls.append(1))
    stock = made(pipe, call)
    counting.remove()
    for config in (DENSE, EXACT, SKIPPING):
        with chipsparse.enable(pipe, config) as handle:
            found = made(pipe, call)
        report = handle.report
        assert len(report.steps) == len(calls)
        parts = [[*each] for _, each in itertools.groupby(report.steps, lambda r: r.generation)]
        assert len(parts) == sections
        unused = 1 if name == "long ltx" else 0
        ends = [part[0].steps_total - unused for part in parts]
        assert report.actions().total() == sum(ends)
        for part, end in zip(parts, ends, strict=True):
            first = part[0].branch
            steps = [record.step for record in part if record.branch == first]
            assert steps == list(range(end))
            assert len({record.branch for record in part}) * len(steps) == len(part)
            assert part[0].action is Action.DENSE
            if config is SKIPPING:
                actions = [record.action.value for record in part if record.branch == first]
                assert actions[: len(ACTIONS)] == ACTIONS
        if config is DENSE:
            assert torch.equal(found, stock)
        elif config is EXACT:
            assert report.actions()["sparse"] > 0
            assert_close(found, stock, 2e-3)  # later sections start from earlier ones
        else:
            assert 0 < error(found, stock) < 0.4
