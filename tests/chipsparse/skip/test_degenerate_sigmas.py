"""Noise levels of 0 before the last one, levels that repeat, and levels that rise again."""

import diffusers
import pytest
import torch

from tests.chipsparse.skip.test_correction import Loop, curved, unknown

# Levels; the letters of a generation (full steps, sparse ones and skipped ones); and the steps that
# are put right: those of gaps whose levels fall and are not 0.
CASES = {
    "two zeros at the end": ([1.0, 0.8, 0.6, 0.3, 0.0, 0.0], "FKFKK", [1]),
    "skipped, then full, at 0": ([1.0, 0.8, 0.5, 0.0, 0.0, 0.0], "FKKKF", []),
    "0 in the middle": ([1.0, 0.7, 0.0, 0.6, 0.3, 0.0], "FKKKF", []),
    "full at 0 in the middle": ([1.0, 0.7, 0.0, 0.6, 0.3, 0.0], "FKFKF", [1]),
    "sparse at 0": ([1.0, 0.7, 0.0, 0.0, 0.3, 0.0], "FKSKF", []),
    "more noise again": ([1.0, 0.5, 0.8, 0.3, 0.2, 0.0], "FKKFF", []),
}


def levels_set(levels):
    def before(scheduler, step, latents):
        if step == 0:
            scheduler.sigmas = torch.tensor(levels)
        return latents

    return before


@pytest.mark.parametrize(("levels", "letters", "corrected"), CASES.values(), ids=CASES)
def test_gaps_without_a_line_stay_as_they_were_skipped(levels, letters, corrected):
    given = {"before": levels_set(levels)}
    loop = Loop(diffusers.FlowMatchEulerDiscreteScheduler())
    found = loop.run(letters, curved, **given)
    assert all(latents.isfinite().all() for latents in found)
    assert loop.told == corrected
    if not corrected:
        plain = Loop(diffusers.FlowMatchEulerDiscreteScheduler())
        expected = plain.run(letters, curved, made=unknown, **given)
        assert all(map(torch.equal, found, expected))


def test_a_level_that_repeats_is_one_place_of_the_line():
    given = {"before": levels_set([1.0, 0.7, 0.7, 0.7, 0.3, 0.0])}
    loop = Loop(diffusers.FlowMatchEulerDiscreteScheduler())
    found = loop.run("FFKKF", curved, **given)
    assert loop.told == [2, 3]
    assert all(latents.isfinite().all() for latents in found)


def test_levels_that_are_exchanged_within_a_gap_end_it():
    def before(scheduler, step, latents):
        if step == 3:
            scheduler.sigmas = 0.9 * scheduler.sigmas
        return latents

    loop = Loop(diffusers.FlowMatchEulerDiscreteScheduler())
    found = loop.run("FFKKF", curved, before=before)
    assert loop.told == []
    plain = Loop(diffusers.FlowMatchEulerDiscreteScheduler())
    assert all(map(torch.equal, found, plain.run("FFKKF", curved, made=unknown, before=before)))
