import pytest
import torch

from chipsparse.kernels.rank_pieces import pack_pieces, unpack_pieces
from tests.kernels.formulas import DTYPES, backend_names, skip_unless_it_runs

# Samples, tokens, heads, channels; the pieces of either dimension. A rank may have nothing.
SIZES = [
    ((1, 5, 3, 16), 2, (2, 1)),
    ((2, 7, 4, 24), 1, (3, 0, 4)),
    ((1, 130, 5, 64), 2, (2, 2, 1)),
    ((3, 33, 2, 8), 1, (16, 17)),
    ((1, 40, 6, 128), 1, (40,)),
]


def some_tensors(size, dtype, device, *, count=3):
    """Three as models make them: one contiguous, one of heads apart, one beside others."""
    generator = torch.Generator().manual_seed(sum(size))
    batch, tokens, heads, width = size
    first = torch.randn(size, generator=generator)
    second = torch.randn(batch, heads, tokens, width, generator=generator).transpose(1, 2)
    third = torch.randn(batch, tokens, 2 * heads, width, generator=generator)[:, :, heads:]
    made = [first, second, third][:count]
    return tuple(_like(each, each.to(device, dtype)) for each in made)


def _like(strided, tensor):
    result = torch.empty_strided(
        strided.shape, strided.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return result.copy_(tensor)


def element_by_element(tensors, counts, dim):
    """The definition, spelt out: of each piece the tensors, samples, tokens, heads, channels."""
    found, first = [], 0
    for count in counts:
        for tensor in tensors:
            for sample in tensor.tolist():
                rows = sample[first : first + count] if dim == 1 else sample
                for heads in rows:
                    kept = heads[first : first + count] if dim == 2 else heads
                    for channels in kept:
                        found += channels
        first += count
    return torch.tensor(found, dtype=tensors[0].dtype)


@backend_names(pack_pieces)
@pytest.mark.parametrize(("size", "dim", "counts"), SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_lie_one_behind_the_other_and_come_back(backend, size, dim, counts, dtype, device):
    for count in (1, 3):
        tensors = some_tensors(size, dtype, device, count=count)
        skip_unless_it_runs(pack_pieces, backend, *tensors)
        packed = pack_pieces(tensors, counts, dim=dim, backend=backend)
        assert torch.equal(packed.cpu(), element_by_element(tensors, counts, dim))
        rest = [length for place, length in enumerate(size) if place != dim]
        found = unpack_pieces(packed, counts, dim=dim, shape=(count, *rest), backend=backend)
        assert len(found) == count
        for each, tensor in zip(found, tensors, strict=True):
            assert torch.equal(each, tensor)
            assert each.is_contiguous()


@backend_names(pack_pieces)
def test_nothing_is_copied_of_nothing(backend, device):
    empty = torch.zeros(1, 0, 2, 8, device=device)
    skip_unless_it_runs(pack_pieces, backend, empty)
    packed = pack_pieces((empty,), (1, 1), dim=2, backend=backend)
    assert packed.shape == (0,)
    (found,) = unpack_pieces(packed, (1, 1), dim=2, shape=(1, 1, 0, 8), backend=backend)
    assert found.shape == (1, 0, 2, 8)


def test_wrong_arguments_are_refused_with_their_values():
    tensor = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"counts \[1, 2\] do not add up to dimension 1 of"):
        pack_pieces((tensor,), (1, 2), dim=1)
    with pytest.raises(ValueError, match="dim must be 1"):
        pack_pieces((tensor,), (4,), dim=3)
    with pytest.raises(ValueError, match="one to three tensors, got 4"):
        pack_pieces((tensor,) * 4, (4,), dim=1)
    with pytest.raises(ValueError, match="one from 0 on for each rank"):
        pack_pieces((tensor,), (5, -1), dim=1)
    with pytest.raises(ValueError, match="tensors must be"):
        pack_pieces((tensor, tensor[:, :3]), (4,), dim=1)
    with pytest.raises(ValueError, match=r"tensors must be \[B, N, H, D\]"):
        pack_pieces((tensor[0],), (2,), dim=1)
    with pytest.raises(ValueError, match="buffer must have 64 elements"):
        unpack_pieces(torch.zeros(63), (4,), dim=1, shape=(1, 1, 2, 8))
    with pytest.raises(ValueError, match="contiguous"):
        unpack_pieces(torch.zeros(128)[::2], (4,), dim=1, shape=(1, 1, 2, 8))


def test_channels_apart_are_left_to_the_reference():
    apart = torch.zeros(1, 4, 2, 16)[..., ::2]
    reasons = dict(pack_pieces.choose(apart).rejected)
    assert reasons["triton"] == "the head dimension is not contiguous"
