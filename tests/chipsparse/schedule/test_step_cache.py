"""The adaptive rule against numbers worked out by hand."""

import pytest
import torch

from chipsparse.schedule.step_cache import StepCache


def filled(value):
    return torch.full((2, 3), float(value))


def computed_step(cache, step, latents, output, *, branch="cond", allowed=True):
    """One step of one branch that has to be computed; what was predicted."""
    assert not cache.skips(step, branch, filled(latents), allowed=allowed)
    predicted = cache.predicted
    cache.computed(branch, filled(output))
    return predicted


def skipped_step(cache, step, latents, *, branch="cond"):
    assert cache.skips(step, branch, filled(latents), allowed=True)
    return cache.predicted


def test_the_rule_by_hand():
    cache = StepCache(threshold=0.125, max_skips=10)
    assert computed_step(cache, 0, latents=10, output=1) is None
    assert computed_step(cache, 1, latents=9, output=2) is None  # k = |2 - 1| / |9 - 10| = 1
    assert skipped_step(cache, 2, latents=8.875) == pytest.approx(1 * 0.125 / 2)
    assert skipped_step(cache, 3, latents=8.8125) == pytest.approx(1 * 0.1875 / 2)
    # The change since step 1, not since step 3; and what is not below 0.125 is too much.
    assert computed_step(cache, 4, latents=8.75, output=2.5) == pytest.approx(1 * 0.25 / 2)
    # k = |2.5 - 2| / |8.75 - 9| = 2, of an output of 2.5
    assert skipped_step(cache, 5, latents=8.6875) == pytest.approx(2 * 0.0625 / 2.5)


def test_the_input_is_compared_with_itself_not_with_the_way_it_went():
    cache = StepCache(threshold=0.125, max_skips=10)
    computed_step(cache, 0, latents=10, output=1)
    computed_step(cache, 1, latents=9, output=2)
    assert skipped_step(cache, 2, latents=8.875) == pytest.approx(0.0625)
    assert skipped_step(cache, 3, latents=9.125) == pytest.approx(0.0625)


def test_the_error_of_a_sparse_output_is_no_change():
    cache = StepCache(threshold=0.125, max_skips=10)

    def compute(step, latents, output, *, sparse):
        cache.skips(step, "cond", filled(latents), allowed=False)
        cache.computed("cond", filled(output), sparse=sparse)

    compute(0, 10, 1, sparse=False)
    compute(1, 9, 2, sparse=False)  # k = 1
    compute(2, 8, 4, sparse=True)  # k = 2
    compute(3, 7, 64, sparse=False)  # a jump, which says nothing of the next step
    assert skipped_step(cache, 4, latents=6) == pytest.approx(2 * 1 / 64)
    compute(5, 5, 72, sparse=True)  # k = 8 / 2
    assert skipped_step(cache, 6, latents=4) == pytest.approx(4 * 1 / 72)


def test_mean_absolute_values_count():
    cache = StepCache(threshold=0.0, max_skips=1)
    tensors = [torch.tensor(values) for values in ([1.0, -1.0], [3.0, -2.0], [0.0, -2.0])]
    cache.skips(0, "cond", tensors[0], allowed=False)
    cache.computed("cond", torch.tensor([4.0, -2.0]))
    cache.skips(1, "cond", tensors[1], allowed=False)
    cache.computed("cond", torch.tensor([1.0, -5.0]))
    assert not cache.skips(2, "cond", tensors[2], allowed=True)
    rate = ((3 + 3) / 2) / ((2 + 1) / 2)
    assert cache.predicted == pytest.approx(rate * (3 / 2) / ((1 + 5) / 2))


def test_no_more_than_max_skips_in_a_row():
    cache = StepCache(threshold=1.0, max_skips=2)
    computed_step(cache, 0, latents=10, output=1)
    computed_step(cache, 1, latents=9, output=2)
    skipped_step(cache, 2, latents=9)
    skipped_step(cache, 3, latents=9)
    assert computed_step(cache, 4, latents=8, output=3) is None  # nothing had to be known
    assert skipped_step(cache, 5, latents=8) == 0


def test_steps_that_a_list_skips_count_as_skipped():
    cache = StepCache(threshold=1.0, max_skips=1)
    computed_step(cache, 0, latents=10, output=1)
    computed_step(cache, 1, latents=9, output=2)
    assert not cache.skips(2, "cond", filled(9), allowed=False)  # and nothing is computed
    assert computed_step(cache, 3, latents=9, output=2) is None


def test_the_first_branch_of_a_step_decides_for_all():
    cache = StepCache(threshold=0.125, max_skips=5)
    for step, latents in enumerate((10, 9)):
        for branch, factor in (("cond", 1), ("uncond", 1000)):
            assert not cache.skips(step, branch, filled(latents), allowed=False)
            cache.computed(branch, filled(factor * (step + 1)))
    assert skipped_step(cache, 2, latents=8.875) == pytest.approx(0.0625)
    assert skipped_step(cache, 2, latents=123, branch="uncond") == pytest.approx(0.0625)
    assert not cache.skips(2, "late", filled(8.875), allowed=False)  # it has no output yet
    cache.computed("late", filled(1))
    assert not cache.skips(3, "cond", filled(5), allowed=True)
    assert not cache.skips(3, "uncond", filled(9), allowed=True)


def test_another_first_branch_starts_anew():
    cache = StepCache(threshold=1.0, max_skips=5)
    computed_step(cache, 0, latents=10, output=1)
    computed_step(cache, 1, latents=9, output=2)
    assert computed_step(cache, 2, latents=9, output=2, branch="other") is None
    assert computed_step(cache, 3, latents=8, output=3, branch="other") is None
    skipped_step(cache, 4, latents=8, branch="other")


@pytest.mark.parametrize(("latents", "output"), [(10, 2), (9, float("nan")), (9, 0)])
def test_what_cannot_be_predicted_is_computed(latents, output):
    """An input that stood still, an output that is not finite, and one of zeros."""
    cache = StepCache(threshold=1.0, max_skips=5)
    computed_step(cache, 0, latents=10, output=1)
    computed_step(cache, 1, latents=latents, output=output)
    assert not cache.skips(2, "cond", filled(8), allowed=True)


def test_inputs_may_be_changed_in_place():
    cache = StepCache(threshold=1.0, max_skips=5)
    latents = filled(10)
    cache.skips(0, "cond", latents, allowed=False)
    cache.computed("cond", filled(1))
    latents.fill_(9)
    cache.skips(1, "cond", latents, allowed=False)
    cache.computed("cond", filled(2))
    latents.fill_(8.875)
    assert cache.skips(2, "cond", latents, allowed=True)
    assert cache.predicted == pytest.approx(0.0625)


def test_half_precision_is_measured_in_full():
    cache = StepCache(threshold=0.1, max_skips=5)
    for step, latents in enumerate((60000, 59968)):
        cache.skips(step, "cond", filled(latents).half(), allowed=False)
        cache.computed("cond", filled(step + 1).half())
    assert cache.skips(2, "cond", filled(59968).half(), allowed=True)
    assert not cache.skips(3, "cond", filled(59936).half(), allowed=True)
    assert cache.predicted == pytest.approx(0.5)


def test_a_finished_branch_leaves_the_decision_to_the_others():
    cache = StepCache(threshold=1.0, max_skips=5)
    computed_step(cache, 0, latents=10, output=1)
    computed_step(cache, 1, latents=9, output=2)
    skipped_step(cache, 2, latents=9)
    cache.release()
    skipped_step(cache, 2, latents=9, branch="uncond")
    assert not cache.skips(3, "cond", filled(9), allowed=True)


def test_the_host_waits_once_per_step_at_most(monkeypatch):
    reads = []
    plain = torch.Tensor.__float__
    monkeypatch.setattr(torch.Tensor, "__float__", lambda self: reads.append(1) or plain(self))
    cache = StepCache(threshold=0.1, max_skips=5)
    for step in range(4):
        for branch in ("cond", "uncond"):
            cache.skips(step, branch, filled(10 - step), allowed=step > 1)
            cache.computed(branch, filled(step + 1))
    assert len(reads) == 2  # steps 2 and 3
