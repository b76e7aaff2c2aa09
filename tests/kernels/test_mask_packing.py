import pytest
import torch

from chipsparse.kernels.mask_packing import pack_mask, packed_to_indices, reference, unpack_mask
from tests.kernels.formulas import backend_names, index_lists, random_mask


def some_mask(columns, device, rows=(2, 3, 5)):
    generator = torch.Generator().manual_seed(columns)
    return (torch.rand(*rows, columns, generator=generator) < 0.3).to(device)


def assert_lists(found, mask):
    indices, counts = found
    expected, expected_counts = index_lists(mask)
    assert indices.dtype == counts.dtype == torch.int32
    assert torch.equal(indices, expected)
    assert torch.equal(counts, expected_counts)


@backend_names(pack_mask)
@pytest.mark.parametrize("columns", [0, 1, 7, 8, 9, 131, 2304])
def test_packs_like_bitarray_and_unpacks(backend, columns, device):
    from bitarray import bitarray

    mask = some_mask(columns, device)
    packed = pack_mask(mask, backend=backend)
    assert (packed.dtype, packed.shape) == (torch.uint8, (2, 3, 5, -(-columns // 8)))
    for row, bits in zip(mask.flatten(0, 2).tolist(), packed.flatten(0, 2).tolist(), strict=True):
        assert bytes(bits) == bitarray(row, endian="little").tobytes()
    restored = unpack_mask(packed, columns, backend=backend)
    assert restored.dtype == torch.bool
    assert torch.equal(restored, mask)
    assert_lists(packed_to_indices(packed, columns, backend=backend), mask)


@backend_names(pack_mask)
def test_views_that_are_not_contiguous(backend, device):
    mask = some_mask(64, device, rows=(20,)).T
    view = pack_mask(mask, backend=backend).T.contiguous().T
    assert not view.is_contiguous()
    assert torch.equal(unpack_mask(view, 20, backend=backend), mask)
    assert_lists(packed_to_indices(view, 20, backend=backend), mask)


@backend_names(packed_to_indices)
def test_rows_start_at_any_byte(backend, device):
    mask = some_mask(4 * 8 + 7, device, rows=(9,))
    packed = pack_mask(mask)
    for lead in range(4):
        buffer = torch.full((lead + packed.numel() + 5,), 0xFF, dtype=torch.uint8, device=device)
        view = buffer[lead : lead + packed.numel()].view_as(packed).copy_(packed)
        assert_lists(packed_to_indices(view, mask.shape[-1], backend=backend), mask)


@backend_names(packed_to_indices)
def test_padding_bits_are_ignored(backend, device):
    packed = torch.full((3, 2), 0xFF, dtype=torch.uint8, device=device)
    indices, counts = packed_to_indices(packed, 11, backend=backend)
    assert (indices.tolist(), counts.tolist()) == ([list(range(11))] * 3, [11] * 3)
    assert torch.equal(unpack_mask(packed, 11), torch.ones(3, 11, dtype=torch.bool, device=device))


@backend_names(packed_to_indices)
@pytest.mark.parametrize("capacity", [0, 1, 10, 131, 140])
def test_lists_are_cut_off_or_filled_up_to_the_capacity(backend, capacity, device):
    """On a CPU the reference raises where it would have to cut off."""
    mask = random_mask(1, 2, 5, 131, 1, device=device)
    expected, expected_counts = index_lists(mask)
    expected = torch.nn.functional.pad(expected, (0, 140 - expected.shape[-1]))[..., :capacity]
    if backend == "reference" and device.type == "cpu":
        lists = reference._lists_without_waiting(mask.flatten(0, 2), capacity)
        assert torch.equal(lists, expected.flatten(0, 2))
        if capacity < expected_counts.max():
            return
    indices, counts = packed_to_indices(pack_mask(mask), 131, capacity=capacity, backend=backend)
    assert torch.equal(indices, expected)
    assert torch.equal(counts, expected_counts.clamp(max=capacity))


@pytest.mark.gpu
@backend_names(pack_mask)
def test_offsets_past_32_bits(backend):
    # Entries are 2.9 GB, bits of the mask 2.4e9.
    rows = 40_000
    columns = 60_000
    capacity = 18_000
    some = torch.rand(4, columns, device="cuda") < 0.25
    packed = pack_mask(some, backend=backend).repeat(rows // 4, 1)
    if backend == "reference":
        pytest.skip("the reference has no offsets of its own")
    indices, counts = packed_to_indices(packed, columns, capacity=capacity, backend=backend)
    expected, expected_counts = index_lists(some)
    assert torch.equal(counts.view(-1, 4), expected_counts.expand(rows // 4, 4))
    longest = expected.shape[-1]
    for first in range(0, rows, 4000):
        chunk = indices[first : first + 4000].view(-1, 4, capacity)
        assert (chunk[..., :longest] == expected).all()
        assert (chunk[..., longest:] == 0).all()
    del indices, chunk
    mask = unpack_mask(packed, columns, backend=backend)
    assert (mask[-4:] == some).all()
    assert torch.equal(pack_mask(mask, backend=backend), packed)


@backend_names(packed_to_indices)
def test_nothing_kept_and_no_rows(backend, device):
    empty = torch.zeros(2, 3, 2, dtype=torch.uint8, device=device)
    indices, counts = packed_to_indices(empty, 16, backend=backend)
    assert (indices.shape, counts.tolist()) == ((2, 3, 0), [[0] * 3] * 2)
    indices, counts = packed_to_indices(empty[:0], 16, backend=backend)
    assert (indices.shape, counts.shape) == ((0, 3, 0), (0, 3))
    indices, counts = packed_to_indices(empty[0, 0] + 2, 16, backend=backend)
    assert (indices.tolist(), counts.item()) == ([1, 9], 2)
    indices, counts = packed_to_indices(empty[..., :0], 0, capacity=3, backend=backend)
    assert indices.eq(0).all()
    assert (indices.shape, counts.tolist()) == ((2, 3, 3), [[0] * 3] * 2)
    assert unpack_mask(empty[:0], 16, backend=backend).shape == (0, 3, 16)
    assert pack_mask(empty[:0].bool(), backend=backend).shape == (0, 3, 1)
