"""The sentence about a target that was not met: what it proposes is a command that runs."""

import re
from types import SimpleNamespace

import pytest

from chipsparse.cli.tune.unreachable import unreachable_text
from chipsparse.profiles.tuned_range import TunedTarget
from chipsparse.tuning.search import Unreachable
from chipsparse.tuning.targets import Pair


def said(target, *, seconds, psnr_db=31.27, ssim=0.91239, out_of_budget=False):
    candidate = SimpleNamespace(describe="9 of 50 steps in full")
    pairs = [Pair(psnr_db, ssim, None, seconds, 10.0), Pair(60.0, 0.99, None, seconds, 10.0)]
    error = Unreachable(
        SimpleNamespace(candidate=candidate, pairs=pairs), out_of_budget=out_of_budget
    )
    return unreachable_text(TunedTarget(**target), error, 30)


def options(text):
    found = re.search(r"; run the same command (.*): what was measured is kept$", text)
    return None if found is None else found[1]


@pytest.mark.parametrize(
    ("target", "seconds", "expected"),
    [
        ({"min_psnr_db": 40.0}, 4.0, "with --min-psnr 31.2"),
        ({"min_psnr_db": 30.0, "min_speedup": 4.0}, 4.0, "with --min-psnr 30 --min-speedup 2.5"),
        ({"min_psnr_db": 30.0, "min_speedup": 4.0}, 9.6, "with --min-psnr 30 --min-speedup 1.04"),
        ({"min_ssim": 0.95, "max_seconds": 3.0}, 4.01, "with --min-ssim 0.912 --max-seconds 4.1"),
    ],
)
def test_what_was_reached_is_asked_for(target, seconds, expected):
    assert options(said(target, seconds=seconds)) == expected


def test_nothing_is_asked_for_that_was_reached_only_when_rounded():
    assert (
        options(said({"min_psnr_db": 40.0}, seconds=4.0, psnr_db=31.2999)) == "with --min-psnr 31.2"
    )
    assert options(said({"max_seconds": 3.0}, seconds=4.10004)) == "with --max-seconds 4.2"


def test_a_bound_that_no_command_takes_is_left_out():
    both = {"min_psnr_db": 30.0, "min_speedup": 4.0}
    assert options(said(both, seconds=10.5)) == "with --min-psnr 30"
    assert options(said({"min_speedup": 4.0}, seconds=10.5)) is None
    assert options(said({"min_ssim": 0.9}, seconds=4.0, ssim=-0.1)) is None


def test_a_larger_budget_is_proposed_where_this_one_ended_the_search():
    text = said({"min_speedup": 4.0}, seconds=4.0, out_of_budget=True)
    assert "was not found within --budget 30: " in text
    assert options(text) == "with --min-speedup 2.5, or with a larger --budget"
    slow = said({"min_speedup": 4.0}, seconds=10.5, out_of_budget=True)
    assert options(slow) == "with a larger --budget"
