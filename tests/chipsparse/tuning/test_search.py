"""The search, on a lab that makes up what it measures."""

import functools
from dataclasses import replace

import pytest

from chipsparse.config import Action, SparsityConfig
from chipsparse.profiles.tuned_range import TunedTarget
from chipsparse.tuning.forms import DENSITIES, ActionSeconds, Candidate, Form
from chipsparse.tuning.search import Search, Unreachable, halve, least_budget, smallest
from chipsparse.tuning.targets import Pair
from tests.chipsparse.tuning.trajectories import trajectory

STEPS = 20
CALIBRATING = 2
HELD_OUT = 3
FIVE = {"a": [9, 1], "b": [8, 6], "c": [7, 100], "d": [6, 100], "e": [5, 100]}

prompt_trajectory = functools.cache(lambda prompt: trajectory(STEPS, seed=prompt))


class MadeUpLab:
    """Every full step gains 2 dB, a sparse one ``sparse_db``, correction ``corrected_db``.

    Sparse MLPs gain ``mlp_db``. Prompt 4 is 3 dB harder than the others.
    """

    def __init__(
        self,
        *,
        sparse_db=0.5,
        corrected_db=0.0,
        mlp_seconds=0.0,
        mlp_db=0.0,
        measuring=0.0,
    ):
        self.sparse_db = sparse_db
        self.corrected_db = corrected_db
        self.mlp_db = mlp_db
        self.mlp_seconds = mlp_seconds
        self.measuring = measuring
        self.made = {}

    def trajectory(self, prompt):
        return prompt_trajectory(prompt)

    def step_seconds(self):
        sparse = {(keep, False): 0.2 + keep for keep in DENSITIES}
        sparse |= {(keep, True): 0.2 + keep + self.mlp_seconds for keep in DENSITIES}
        times = {"dense": 1.0, "refresh": 1.1, "skipped": 0.01, "other": 0.5}
        return ActionSeconds(sparse=sparse, **times, measuring=self.measuring)

    def pair(self, config, prompt, form):
        tried = Form(density=config.attention.density, sparse_mlp=config.mlp.is_sparse)
        made = Candidate(tried, config, STEPS)
        sparse = made.schedule.actions().count(Action.SPARSE)
        full = STEPS - made.schedule.actions().count(Action.SKIP) - sparse
        psnr = 20 + 2 * full + self.sparse_db * sparse
        if prompt == 4:
            psnr -= 3
        psnr += self.corrected_db * config.schedule.correct + self.mlp_db * config.mlp.is_sparse
        seconds = self.step_seconds().generation(made)
        self.made[config, prompt] = seconds / 20.5
        actions = made.schedule.actions()
        return Pair(psnr, 1 - 10 ** (-psnr / 20), None, seconds, 20.5, actions)


def searched(lab, budget=30, **target):
    prompts = {"calibrating": range(CALIBRATING)}
    prompts |= {"held_out": range(CALIBRATING, CALIBRATING + HELD_OUT)}
    base = SparsityConfig()
    target = TunedTarget(**target)
    return Search(lab, base, STEPS, target, **prompts, budget=budget).run()


def full_count(tried):
    return len(tried.candidate.config.schedule.form.full)


@pytest.mark.parametrize(
    ("target", "count"),
    [
        ({"min_psnr_db": 33.0}, 8),  # 20 + 16 - 3 on the worst prompt
        ({"min_speedup": 2.0}, 9),  # 0.5 + 9 + 0.11 s of 20.5; with 10 it is too slow
        ({"max_seconds": 5.7}, 5),
        ({"min_psnr_db": 33.0, "min_speedup": 2.0}, 8),
    ],
)
def test_a_target_is_met_by_the_number_of_full_steps_that_it_takes(target, count):
    lab = MadeUpLab(sparse_db=0.0)
    result = searched(lab, **target)
    assert (full_count(result), result.candidate.form.sparse_per_full) == (count, 0)
    assert len(result.pairs) == HELD_OUT
    assert min(pair.psnr_db for pair in result.pairs) == 17 + 2 * count
    again = MadeUpLab(sparse_db=0.0)
    assert searched(again, **target) == result  # the same measurements lead the same way
    assert list(again.made) == list(lab.made)


@pytest.mark.parametrize(
    ("target", "count"),
    [
        ({"min_psnr_db": 90.0}, STEPS - 1),
        ({"min_speedup": 50.0}, 2),
        ({"min_psnr_db": 33.0, "min_speedup": 4.0}, 8),
    ],
)
def test_what_cannot_be_met_tells_the_closest_on_all_held_out_prompts(target, count):
    with pytest.raises(Unreachable) as caught:
        searched(MadeUpLab(sparse_db=0.0), budget=60, **target)
    assert (full_count(caught.value.best), len(caught.value.best.pairs)) == (count, HELD_OUT)
    assert not caught.value.out_of_budget


@pytest.mark.parametrize(
    ("made_up", "target", "expected"),
    [
        ({"sparse_db": 1.5}, {"min_psnr_db": 33.0}, (True, False, False, True)),
        ({"sparse_db": 1.5, "mlp_seconds": -0.25}, {"min_speedup": 2.0}, (True, True, True, True)),
        ({"sparse_db": 1.5, "mlp_seconds": 0.1}, {"min_speedup": 2.0}, (True, False, False, True)),
        (
            {"sparse_db": 1.5, "mlp_seconds": -0.25, "mlp_db": -20.0},
            {"min_speedup": 2.0},
            (True, True, False, True),
        ),
        (
            {"sparse_db": 0.0, "corrected_db": -4.0},
            {"min_speedup": 2.0},
            (False, False, False, False),
        ),
    ],
)
def test_what_helps_is_chosen(made_up, target, expected):
    """Many sparse steps, sparse MLPs where they are faster and no worse, and correction.

    Expected are: more sparse steps than full ones, sparse MLPs tried, and taken, and correction.
    """
    lab = MadeUpLab(**made_up)
    result = searched(lab, **target)
    config = result.candidate.config
    sparse = result.pairs[0].actions.count("sparse")
    assert (sparse > full_count(result)) is expected[0]
    assert any(tried.mlp.is_sparse for tried, _ in lab.made) is expected[1]
    assert (config.mlp.is_sparse, config.schedule.correct) == expected[2:]


def test_steps_that_take_longer_than_was_measured_are_made_up_for():
    class Slower(MadeUpLab):
        def pair(self, config, prompt, form):
            made = super().pair(config, prompt, form)
            return replace(made, seconds=1.3 * made.seconds)

    assert full_count(searched(Slower(sparse_db=0.0), min_speedup=2.0)) == 7


@pytest.mark.parametrize(
    ("target", "budget"),
    [({"min_psnr_db": 33.0}, 16), ({"min_speedup": 1.5}, 30), ({"min_ssim": 0.99}, 12)],
)
def test_a_search_ends_within_its_budget(target, budget):
    lab = MadeUpLab(sparse_db=0.7)
    result = searched(lab, budget=budget, **target)
    assert len(result.pairs) == HELD_OUT
    spent = CALIBRATING + HELD_OUT + sum(lab.made.values())
    assert spent <= budget + HELD_OUT  # a candidate that was begun is verified to its end


def test_what_times_the_steps_is_of_the_budget():
    """Six generations of it leave what a budget that is smaller by six has."""
    timing = MadeUpLab(sparse_db=0.7, measuring=6 * 20.5)
    smaller = MadeUpLab(sparse_db=0.7)
    searched(timing, budget=16, min_psnr_db=33.0)
    searched(smaller, budget=10, min_psnr_db=33.0)
    assert list(timing.made) == list(smaller.made)
    searched(more := MadeUpLab(sparse_db=0.7), budget=16, min_psnr_db=33.0)
    assert len(more.made) > len(timing.made)


def test_the_least_budget_comes_close_to_the_fewest_full_steps():
    least = least_budget(CALIBRATING, HELD_OUT)
    result = searched(MadeUpLab(sparse_db=0.0), budget=least, min_psnr_db=33.0)
    assert 8 <= full_count(result) <= 9  # 8 with 30


@pytest.mark.parametrize(
    ("scores", "best", "calls"),
    [
        (FIVE, "c", "a0 b0 c0 d0 e0 a1 b1 c1"),  # half goes on, and the mean decides
        ({"a": [1, 0, 0], "b": [2, 0, 0]}, "b", "a0 b0"),  # the last one is not generated again
        ({"a": [1, 1], "b": [1, 1], "c": [1, 1]}, "a", "a0 b0 c0 a1 b1"),  # of equals the first
    ],
)
def test_halving(scores, best, calls):
    asked = []

    def score(rival, prompt):
        asked.append(f"{rival}{prompt}")
        return scores[rival][prompt]

    prompts = range(len(scores["a"]))
    assert halve([*scores], prompts, score) == best
    assert " ".join(asked) == calls


@pytest.mark.parametrize("start", [2, 5, 11, 30])
@pytest.mark.parametrize("boundary", [2, 3, 10, 18, 19, 25])
def test_the_smallest_that_passes(start, boundary):
    asked = []

    def passes(number):
        asked.append(number)
        return number >= boundary

    expected = boundary if boundary <= 19 else None
    assert smallest(2, 19, start, passes, lambda: True) == expected
    assert len(asked) == len(set(asked)) <= 9
