"""Ranks that differ are told of it, and no rank waits for another."""

import time

import pytest

from tests.ranks import run_ranks

MODULE = "tests.pipelines.parallel.faults"


@pytest.mark.slow
def test_ranks_that_differ_are_seen(tmp_path):
    both = _, second = run_ranks(2, f"{MODULE}:seen", folder=tmp_path, seconds=900)
    for ended in both:
        found = ended.result
        assert found["afterwards"] == 0
        assert found["left"] == [0, 0]  # windows, and new process groups
        agree, sparse, difference = found["refreshes alone"]
        assert agree  # and none waits for the other, though they compute otherwise
        assert (sparse == 0) == (ended is second)
        assert difference > 1e-4
        steps = "step 4 of 'cond', refresh and step 4 of 'cond', dense"
        assert f"differ in what they compute: {steps}" in found["dense alone"]
        for name, what in (("seed", "latents"), ("prompt", "prompt"), ("config", "config")):
            assert found[name].startswith(f"PeerError: rank 0 and rank 1 differ in {what}"), name
        assert found["heads"] == (
            "ValueError: this model has 1 attention heads, fewer than the 2 processes that are to "
            "share them; use fewer"
        )
        assert "1 video or image tokens make 1 block of 16 rows" in found["tokens"]
        assert "needs 3 processes, and there are 2" in found["processes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "shared", "said"),
    [
        ("raises", "ulysses", "rank 1 failed: ArithmeticError: no sum today"),
        ("raises", "guidance", "rank 1 failed: ArithmeticError: no sum today"),
        ("killed", "ulysses", "rank 1 is gone or hangs: an exchange of tensors broke off"),
    ],
)
def test_a_rank_that_breaks_off_ends_the_others_with_its_name(how, shared, said, tmp_path):
    start = time.monotonic()
    alone, broken = run_ranks(
        2,
        f"{MODULE}:breaks_off",
        how,
        shared,
        folder=tmp_path,
        seconds=600,
        check=False,
    )
    assert broken.status != 0
    assert alone.status != 0
    assert f"PeerError: {said}" in alone.text
    assert time.monotonic() - start < 500
