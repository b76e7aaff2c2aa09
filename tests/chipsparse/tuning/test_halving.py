"""Successive halving: who goes on, and what is asked."""

import pytest

from chipsparse.tuning.halving import halve


def asked(scores):
    """A score that writes down what it is asked."""
    calls = []

    def score(rival, prompt):
        calls.append((rival, prompt))
        return scores[rival][prompt]

    return calls, score


def test_half_goes_on_and_the_mean_decides():
    scores = {"a": [9, 1], "b": [8, 6], "c": [7, 100], "d": [6, 100], "e": [5, 100]}
    calls, score = asked(scores)
    assert halve("abcde", [0, 1], score) == "c"
    assert calls == [*((each, 0) for each in "abcde"), *((each, 1) for each in "abc")]


def test_the_last_one_is_not_generated_again():
    calls, score = asked({"a": [1, 0, 0], "b": [2, 0, 0]})
    assert halve("ab", [0, 1, 2], score) == "b"
    assert calls == [("a", 0), ("b", 0)]


@pytest.mark.parametrize("prompts", [[0], [0, 1]])
def test_of_equal_ones_the_first_wins(prompts):
    _, score = asked({"a": [1, 1], "b": [1, 1], "c": [1, 1]})
    assert halve("abc", prompts, score) == "a"
