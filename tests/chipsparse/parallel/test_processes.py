"""What several processes tell each other, and exchange."""

import pytest

from tests.ranks import run_ranks

MODULE = "tests.chipsparse.parallel.ranks"


def test_three_ranks(tmp_path):
    for ended in run_ranks(3, f"{MODULE}:all_of_it", folder=tmp_path):
        found = ended.result
        assert found["said"] == ["I am 0", "I am 1", "I am 2"]
        assert found["first"] == 0.1
        assert found["least"] == [3, 3]
        assert found["hosts"] == 3
        assert found["room"] == {"cpu": [29, 20], "cuda": [88, 20]}  # a machine's is shared
        assert found["differ"].startswith("rank 0 and rank 2 differ in size: small and large")
        assert found["afterwards"] == [0, 1, 2]


@pytest.mark.slow
def test_four_ranks_exchange_tokens_for_heads_and_query_rows(tmp_path):
    for rank, ended in enumerate(run_ranks(4, f"{MODULE}:all_ways", folder=tmp_path)):
        for way, found in ended.result.items():
            assert all(found), (rank, way, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "rank 1 failed: KeyError: 'broken'"),
        ("hangs", "rank 1 has not got here for 3 s: it is gone, hangs, or makes other calls"),
    ],
)
def test_the_others_know_who_failed(how, said, tmp_path):
    ended = run_ranks(2, f"{MODULE}:failing", how, folder=tmp_path)
    message, seconds = ended[0].result
    assert message == said
    assert seconds < 60
