import pytest
import torch

from chipsparse.kernels import token_layout
from chipsparse.kernels.token_layout import empty_token_contiguous, has_padding, with_padding
from tests.kernels.formulas import padding_of, token_contiguous, without_padding

DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "padded"), [(1, 8), (8, 8), (9, 16), (26_381, 26_384)])
def test_tokens_are_padded_to_eight(rows, padded, dtype, device):
    assert token_layout.padded_rows(rows) == padded
    tensor = empty_token_contiguous(torch.empty(0, device=device), 2, rows, 3, dtype=dtype)
    assert (tensor.shape, tensor.stride()) == ((2, rows, 3), (3 * padded, 1, padded))
    assert has_padding(tensor)
    assert with_padding(tensor) is tensor
    assert has_padding(tensor[1:])  # the last neuron's is inside the storage, too
    assert has_padding(tensor[:, :, 1:2])
    assert padding_of(tensor).shape == (2, 3, padded - rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_other_tensors_are_copied(dtype, device):
    tensor = torch.randn(2, 133, 5, device=device).to(dtype)
    assert has_padding(token_contiguous(tensor))
    for part, _ in without_padding(tensor):
        assert token_layout.is_token_contiguous(part)
        assert not has_padding(part)
        copy = with_padding(part)
        assert has_padding(copy)
        assert torch.equal(copy, tensor)
    for other in (tensor, tensor.mT.contiguous().mT):  # neurons, then tokens without gaps
        assert not has_padding(other)
        assert torch.equal(with_padding(other), tensor)


def test_whole_eights_of_a_larger_tensor_need_no_padding(device):
    whole = empty_token_contiguous(torch.empty(0, device=device), 2, 160, 5, dtype=torch.bfloat16)
    assert has_padding(whole[:, 8:144])
    assert has_padding(whole[:, 24:])
    assert not has_padding(whole[:, 4:140])
    assert not has_padding(whole[:, 8:143])


def test_samples_at_odd_distances_are_copied(device):
    """Eight tokens of a sample but the first would not begin at a multiple of 16 bytes."""
    storage = torch.arange(2 * (3 * 16 + 4) + 16, device=device).bfloat16()
    odd = storage.as_strided((2, 13, 3), (3 * 16 + 4, 1, 16))
    assert not has_padding(odd)
    assert torch.equal(with_padding(odd), odd)
    assert has_padding(with_padding(odd))
    assert has_padding(odd[:1])
