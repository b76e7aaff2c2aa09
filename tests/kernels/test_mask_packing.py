import pytest
import torch

from chipsparse.kernels.mask_packing import (
    INDEX_BACKENDS,
    PACK_BACKENDS,
    UNPACK_BACKENDS,
    pack_mask,
    packed_to_indices,
    reference,
    unpack_mask,
)
from tests.kernels.formulas import backend_names, index_lists, random_mask

WIDTHS = [0, 1, 7, 8, 9, 131, 2304]


def some_mask(columns, device, rows=(2, 3, 5)):
    generator = torch.Generator().manual_seed(columns)
    return (torch.rand(*rows, columns, generator=generator) < 0.3).to(device)


@backend_names(PACK_BACKENDS)
@pytest.mark.parametrize("columns", WIDTHS)
def test_packs_like_bitarray(backend, columns, device):
    from bitarray import bitarray

    mask = some_mask(columns, device)
    packed = pack_mask(mask, backend=backend)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, 3, 5, -(-columns // 8))
    for row, bits in zip(mask.flatten(0, 2).tolist(), packed.flatten(0, 2).tolist(), strict=True):
        assert bytes(bits) == bitarray(row, endian="little").tobytes()


@backend_names(PACK_BACKENDS)
def test_bit_order_and_padding(backend, device):
    mask = torch.zeros(2, 11, dtype=torch.bool, device=device)
    mask[0, [0, 3, 9]] = True
    mask[1] = True
    assert pack_mask(mask, backend=backend).tolist() == [[0b1001, 0b10], [0xFF, 0b111]]


@backend_names(UNPACK_BACKENDS)
@pytest.mark.parametrize("columns", WIDTHS)
def test_unpack_inverts_pack(backend, columns, device):
    mask = some_mask(columns, device)
    restored = unpack_mask(pack_mask(mask), columns, backend=backend)
    assert restored.dtype == torch.bool
    assert torch.equal(restored, mask)


def test_packs_views_that_are_not_contiguous(device):
    mask = some_mask(64, device, rows=(20,)).T
    assert torch.equal(unpack_mask(pack_mask(mask), 20), mask)


@backend_names(INDEX_BACKENDS)
@pytest.mark.parametrize("columns", WIDTHS[1:])
def test_indices_of_every_row_ascend(backend, columns, device):
    mask = random_mask(2, 3, 40, columns, 8, device=device)
    indices, counts = packed_to_indices(pack_mask(mask), columns, backend=backend)
    expected, expected_counts = index_lists(mask)
    assert indices.dtype == counts.dtype == torch.int32
    assert torch.equal(indices, expected)
    assert torch.equal(counts, expected_counts)


@backend_names(INDEX_BACKENDS)
def test_padding_bits_are_ignored(backend, device):
    packed = torch.full((3, 2), 0xFF, dtype=torch.uint8, device=device)
    indices, counts = packed_to_indices(packed, 11, backend=backend)
    assert indices.tolist() == [list(range(11))] * 3
    assert counts.tolist() == [11] * 3
    assert torch.equal(unpack_mask(packed, 11), torch.ones(3, 11, dtype=torch.bool, device=device))


@backend_names(INDEX_BACKENDS)
def test_capacity(backend, device):
    mask = torch.zeros(2, 20, dtype=torch.bool, device=device)
    mask[1, [4, 19]] = True
    packed = pack_mask(mask)
    indices, counts = packed_to_indices(packed, 20, capacity=3, backend=backend)
    assert indices.tolist() == [[0, 0, 0], [4, 19, 0]]
    assert counts.tolist() == [0, 2]
    assert packed_to_indices(packed, 20, capacity=2, backend=backend)[0].shape == (2, 2)
    with pytest.raises(ValueError, match="a row keeps 2 columns, the capacity is 1"):
        packed_to_indices(packed, 20, capacity=1, backend=backend)


@backend_names(INDEX_BACKENDS)
def test_nothing_kept_and_no_rows(backend, device):
    empty = torch.zeros(2, 3, 2, dtype=torch.uint8, device=device)
    indices, counts = packed_to_indices(empty, 16, backend=backend)
    assert indices.shape == (2, 3, 0)
    assert counts.tolist() == [[0] * 3] * 2
    indices, counts = packed_to_indices(empty[:0], 16, backend=backend)
    assert (indices.shape, counts.shape) == ((0, 3, 0), (0, 3))
    indices, counts = packed_to_indices(empty[0, 0] + 2, 16, backend=backend)
    assert (indices.tolist(), counts.item()) == ([1, 9], 2)


def test_small_chunks_change_nothing(monkeypatch, device):
    mask = random_mask(1, 4, 400, 131, 8, device=device)
    expected = index_lists(mask)
    monkeypatch.setattr(reference, "DEFAULT_TRANSIENT_BYTES", 131 * 21 * 3)
    indices, counts = packed_to_indices(pack_mask(mask), 131, backend="reference")
    assert torch.equal(indices, expected[0])
    assert torch.equal(counts, expected[1])


def test_mistakes_are_named():
    packed = torch.zeros(4, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"25 columns take 4 bytes a row, packed is \[4, 3\]"):
        packed_to_indices(packed, 25)
    with pytest.raises(ValueError, match="16 columns take 2 bytes a row"):
        unpack_mask(packed, 16)
    with pytest.raises(ValueError, match=r"mask must be torch\.bool, got torch.uint8"):
        pack_mask(packed)
    with pytest.raises(ValueError, match=r"packed must be torch\.uint8, got torch.int32"):
        unpack_mask(packed.int(), 24)
    with pytest.raises(ValueError, match="at least one dimension"):
        pack_mask(torch.tensor(True))
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        pack_mask(packed.bool(), backend="fast")
