"""What several processes tell each other; `tests/pipelines/parallel` has what they exchange."""

import pytest

from tests.ranks import run_ranks

MODULE = "tests.chipsparse.parallel.ranks"


def test_three_ranks(tmp_path):
    for ended in run_ranks(3, f"{MODULE}:all_of_it", folder=tmp_path):
        result = ended.result
        assert result["said"] == ["I am 0", "I am 1", "I am 2"]
        assert result["first"] == 0.1
        assert result["least"] == [3, 3]
        assert result["hosts"] == 3
        assert result["room"] == {"cpu": [29, 20], "cuda": [88, 20]}  # a machine's is shared
        assert result["differ"].startswith("rank 0 and rank 2 differ in size: small and large")
        assert result["afterwards"] == [0, 1, 2]


@pytest.mark.slow
def test_the_others_know_who_hangs(tmp_path):
    first, _ = run_ranks(2, f"{MODULE}:hanging", folder=tmp_path)
    message, seconds = first.result
    assert message == "rank 1 has not got here for 3 s: it is gone, hangs, or makes other calls"
    assert seconds < 60
