import pytest
import torch

from chipsparse.kernels.piece_copies import copy_pieces
from tests.kernels.formulas import DTYPES, backend_names

# Samples, tokens, heads, channels; the pieces of either dimension. A rank may have nothing.
SIZES = [
    ((1, 5, 3, 16), 2, (range(2), range(2, 3))),
    ((2, 7, 4, 24), 1, (range(3), range(3, 3), range(3, 7))),
    ((1, 130, 5, 64), 2, (range(1), range(2, 3), range(4, 5))),
    ((3, 33, 2, 8), 1, (range(16), range(16, 33))),
    ((1, 300, 6, 128), 1, (range(300),)),
    ((1, 9, 3, 5), 2, (range(1, 3),)),  # no rows of 16 bytes
]


def some_tensors(size, dtype, device, *, count):
    """Up to three as models make them: contiguous, of heads apart, beside others."""
    generator = torch.Generator().manual_seed(sum(size))
    batch, tokens, heads, width = size
    first = torch.randn(size, generator=generator)
    second = torch.randn(batch, heads, tokens, width, generator=generator).transpose(1, 2)
    third = torch.randn(batch, tokens, 2 * heads, width, generator=generator)[:, :, heads:]
    made = [first, second, third][:count]
    return tuple(
        torch.empty_strided(each.shape, each.stride(), dtype=dtype, device=device).copy_(each)
        for each in made
    )


@backend_names(copy_pieces)
@pytest.mark.parametrize(("size", "dim", "pieces"), SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_are_in_their_places_and_nowhere_else(backend, size, dim, pieces, dtype, device):
    batch, tokens, heads, width = size
    for count in (1, 2, 3):
        tensors = some_tensors(size, dtype, device, count=count)
        rooms = []
        places = []
        for piece in pieces:  # in the middle of larger tensors, of another memory each
            room = torch.full((count, batch, tokens + 3, heads + 2, width), 7.0, dtype=dtype)
            rooms.append(room.to(device))
            cut = rooms[-1][:, :, 1 : 1 + tokens, 1 : 1 + heads].narrow(dim + 1, 0, len(piece))
            places.append(cut.unbind(0) if piece else ())
        copy_pieces(tensors, pieces, places, dim=dim, backend=backend)
        for piece, room in zip(pieces, rooms, strict=True):
            expected = torch.full_like(room, 7.0)
            for number, tensor in enumerate(tensors):
                for place, index in enumerate(piece):
                    if dim == 1:
                        expected[number, :, 1 + place, 1 : 1 + heads] = tensor[:, index]
                    else:
                        expected[number, :, 1 : 1 + tokens, 1 + place] = tensor[:, :, index]
            assert torch.equal(room, expected)


@backend_names(copy_pieces)
def test_nothing_is_copied_of_nothing(backend, device):
    empty = torch.zeros(1, 0, 2, 8, device=device)
    cut = (range(1), range(1, 1))
    copy_pieces((empty,), cut, ((empty[:, :, :1],), ()), dim=2, backend=backend)
