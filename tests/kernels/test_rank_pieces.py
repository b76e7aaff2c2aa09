import pytest
import torch

from chipsparse.kernels.rank_pieces import pack_pieces, unpack_pieces
from tests.kernels.formulas import DTYPES, backend_names

# Samples, tokens, heads, channels; the pieces of either dimension. A rank may have nothing.
SIZES = [
    ((1, 5, 3, 16), 2, (range(2), range(2, 3))),
    ((2, 7, 4, 24), 1, (range(3), range(3, 3), range(3, 7))),
    ((1, 130, 5, 64), 2, (range(1), range(2, 3), range(4, 5))),
    ((3, 33, 2, 8), 1, (range(16), range(16, 33))),
    ((1, 40, 6, 128), 1, (range(40),)),
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


def element_by_element(tensors, pieces, dim, room=0):
    """The definition, spelt out: of each piece the tensors, samples, tokens, heads, channels."""
    found = []
    for piece in pieces:
        values = []
        for tensor in tensors:
            for sample in tensor.tolist():
                rows = sample[piece.start : piece.stop] if dim == 1 else sample
                for heads in rows:
                    kept = heads[piece.start : piece.stop] if dim == 2 else heads
                    for channels in kept:
                        values += channels
        unit = len(tensors) * tensors[0].numel() // tensors[0].shape[dim]
        found += values + [float("nan")] * max(0, room * unit - len(values))
    return torch.tensor(found, dtype=tensors[0].dtype)


@backend_names(pack_pieces)
@pytest.mark.parametrize(("size", "dim", "pieces"), SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_lie_one_behind_the_other_and_come_back(backend, size, dim, pieces, dtype, device):
    for count in (1, 3):
        tensors = some_tensors(size, dtype, device, count=count)
        packed = pack_pieces(tensors, pieces, dim=dim, backend=backend)
        assert torch.equal(packed.cpu(), element_by_element(tensors, pieces, dim))
        room = max(map(len, pieces)) + 1
        roomy = element_by_element(tensors, pieces, dim, room).to(device)
        for buffer, options in ((packed, {}), (roomy, {"capacity": room})):
            found = tuple(_like(each, torch.full_like(each, 7)) for each in tensors)
            unpack_pieces(buffer, found, pieces, dim=dim, backend=backend, **options)
            inside = torch.tensor([any(i in piece for piece in pieces) for i in range(size[dim])])
            shape = [-1 if place == dim else 1 for place in range(4)]
            inside = inside.view(shape).to(device)
            for each, tensor in zip(found, tensors, strict=True):
                assert torch.equal(each, torch.where(inside, tensor, 7))


@backend_names(pack_pieces)
def test_nothing_is_copied_of_nothing(backend, device):
    empty = torch.zeros(1, 0, 2, 8, device=device)
    packed = pack_pieces((empty,), (range(1), range(1, 2)), dim=2, backend=backend)
    assert packed.shape == (0,)
    unpack_pieces(packed, (empty,), (range(1), range(1, 2)), dim=2, backend=backend)
