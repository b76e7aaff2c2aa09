"""Sigmas of 0 before the last one, sigmas that repeat, and sigmas that rise again."""

from typing import NamedTuple

import diffusers
import pytest
import torch

from tests.chipsparse.skip.test_correction import Loop, curved, ids_of, unknown


class Case(NamedTuple):
    """Sigmas, a generation's full, sparse and skipped steps, and the steps that are corrected."""

    id: str
    sigmas: list[float]
    letters: str
    corrected: list[int]


# Intervals are corrected whose sigmas fall and are not 0.
CASES = [
    Case("two zeros at the end", [1.0, 0.8, 0.6, 0.3, 0.0, 0.0], "FKFKK", [1]),
    Case("skipped, then full, at 0", [1.0, 0.8, 0.5, 0.0, 0.0, 0.0], "FKKKF", []),
    Case("0 in the middle", [1.0, 0.7, 0.0, 0.6, 0.3, 0.0], "FKKKF", []),
    Case("full at 0 in the middle", [1.0, 0.7, 0.0, 0.6, 0.3, 0.0], "FKFKF", [1]),
    Case("sparse at 0", [1.0, 0.7, 0.0, 0.0, 0.3, 0.0], "FKSKF", []),
    Case("more noise again", [1.0, 0.5, 0.8, 0.3, 0.2, 0.0], "FKKFF", []),
    Case("all at 0", [0.0, 0.0, 0.0, 0.0, 0.0, 0.0], "FKKFF", []),
]
SCHEDULERS = {
    "falling": diffusers.FlowMatchEulerDiscreteScheduler,
    "rising": lambda: diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
}


def run(make, sigmas, letters, **options):
    """Return the loop with these sigmas, which rise to 1 if they are inverted, and its latents."""
    loop = Loop(make())
    given = torch.tensor(sigmas)

    def before(scheduler, step, latents):
        if step == 0:
            scheduler.sigmas = 1 - given if scheduler.config.invert_sigmas else given
        return latents

    return loop, loop.run(letters, curved, **{"before": before, **options})


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("case", CASES, ids=ids_of(CASES))
def test_intervals_without_a_line_stay_uncorrected(make, case):
    loop, found = run(make, case.sigmas, case.letters)
    assert all(latents.isfinite().all() for latents in found)
    assert loop.told == case.corrected
    if not case.corrected:
        _, expected = run(make, case.sigmas, case.letters, made=unknown)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_sigma_that_repeats_is_one_point_of_the_line(make):
    loop, found = run(make, [1.0, 0.7, 0.7, 0.7, 0.3, 0.0], "FFKKF")
    assert loop.told == [2, 3]
    assert all(latents.isfinite().all() for latents in found)


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("letters", ["FFKF", "FFSKF", "FFKSF"])
def test_an_interval_of_one_sigma_moves_nothing_and_has_no_slope(make, letters):
    sigmas = [1.0, *[0.7] * (len(letters) - 1), 0.3]
    loop, found = run(make, sigmas, letters)
    _, expected = run(make, sigmas, letters, made=unknown)
    assert loop.told == [step for step in range(len(letters)) if letters[step] in "SK"]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_sigmas_that_are_exchanged_within_an_interval_end_it():
    def before(scheduler, step, latents):
        if step == 3:
            scheduler.sigmas = 0.9 * scheduler.sigmas
        return latents

    make = SCHEDULERS["falling"]
    loop = Loop(make())
    found = loop.run("FFKKF", curved, before=before)
    assert loop.told == []
    plain = Loop(make())
    assert all(map(torch.equal, found, plain.run("FFKKF", curved, made=unknown, before=before)))
