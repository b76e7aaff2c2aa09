import pytest
import torch

from chipsparse.kernels.column_sparse_attention.check_lists import check_lists


def good_lists():
    """Two heads with two blocks each, of up to three of nine columns."""
    indices = torch.tensor([[[[0, 4, 8], [7, 0, 0]], [[2, 1, 0], [3, 3, 3]]]], dtype=torch.int32)
    return indices, torch.tensor([[[3, 1], [3, 0]]], dtype=torch.int32)


def test_good_lists_pass():
    indices, counts = good_lists()
    check_lists(indices, counts, 9)
    check_lists(indices[..., :0], torch.zeros_like(counts), 9)


@pytest.mark.parametrize(
    ("of_counts", "place", "value", "message"),
    [
        (False, (0, 0, 0, 2), 9, r"indices\[0, 0, 0, 2\] is 9, not within \[0, 9\)"),
        (False, (0, 1, 0, 1), -1, r"indices\[0, 1, 0, 1\] is -1, not within \[0, 9\)"),
        (False, (0, 1, 0, 2), 2, r"the list indices\[0, 1, 0\] repeats column 2"),
        (False, (0, 0, 0, 1), 0, r"the list indices\[0, 0, 0\] repeats column 0"),
        (True, (0, 0, 1), 4, r"counts\[0, 0, 1\] is 4, not within \[0, 3\]"),
        (True, (0, 1, 0), -2, r"counts\[0, 1, 0\] is -2, not within \[0, 3\]"),
        (True, (0, 1, 1), 2, r"the list indices\[0, 1, 1\] repeats column 3"),
    ],
)
def test_bad_indices_and_counts_are_named(of_counts, place, value, message):
    lists = good_lists()
    lists[of_counts][place] = value
    with pytest.raises(ValueError, match=f"column_sparse_attention: {message}"):
        check_lists(*lists, 9)
