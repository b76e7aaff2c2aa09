import pytest
import torch

from chipsparse.kernels.column_selection import BACKENDS, column_selection, reference
from chipsparse.kernels.mask_packing import unpack_mask
from tests.kernels.formulas import backend_names

INF, NAN = float("inf"), float("nan")


def select(sums, **options):
    """The selection as a bool mask ``[B, H, G, M]``."""
    packed = column_selection(sums, **options)
    assert packed.dtype == torch.uint8
    return unpack_mask(packed, sums.shape[-1])


def kept(row, **options):
    """The columns kept of one row of scores."""
    return (
        select(torch.tensor(row)[None, None, None], **options)[0, 0, 0].nonzero().flatten().tolist()
    )


def by_sorting(row, keep_count, static=()):
    """The definition, in plain Python."""
    others = sorted((-score, column) for column, score in enumerate(row) if column not in static)
    chosen = [column for _, column in others[: max(0, keep_count - len(static))]]
    return sorted({*static, *chosen})


@backend_names(BACKENDS)
@pytest.mark.parametrize("columns", [1, 7, 131, 1337])
@pytest.mark.parametrize("keep_fraction", [0.0, 0.1, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("negative", [False, True])
def test_keeps_the_highest_sums(backend, columns, keep_fraction, negative, device):
    generator = torch.Generator().manual_seed(columns)
    sums = torch.randn(2, 2, 3, columns, generator=generator)
    sums = (sums * 4).round() if negative else sums.exp()  # rounding makes many ties
    static = torch.rand(3, columns, generator=generator) < 0.05
    keep_count = int(columns * keep_fraction)
    mask = select(
        sums.to(device), keep_count=keep_count, static_columns=static.to(device), backend=backend
    )
    for b, h, g in [(0, 0, 0), (0, 1, 2), (1, 1, 1)]:
        columns_kept = mask[b, h, g].nonzero().flatten().tolist()
        statics = static[g].nonzero().flatten().tolist()
        assert columns_kept == by_sorting(sums[b, h, g].tolist(), keep_count, statics)


@pytest.mark.parametrize(
    ("row", "keep_count", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], 2, [0, 1]),
        ([1.0, 3.0, 2.0, 3.0, 2.0], 3, [1, 2, 3]),
        ([5.0, INF, 3e38, INF], 3, [1, 2, 3]),
        ([5.0, INF, 3.4028234663852886e38], 1, [1]),
        ([-1.0, -INF, -2.0, -1e-45], 3, [0, 2, 3]),
        ([-0.0, 0.0, -0.0], 2, [0, 1]),
        ([0.0, 1e-45, 0.0], 1, [1]),
        ([1.0, NAN, 3.0], 1, [0, 1, 2]),
        ([NAN, NAN], 0, [0, 1]),
        ([1.0, 2.0], 0, []),
        ([1.0, 2.0], 99, [0, 1]),
    ],
)
def test_special_rows(row, keep_count, expected):
    assert kept(row, keep_count=keep_count) == expected


def test_nan_keeps_everything_in_its_own_row_only():
    sums = torch.rand(2, 1, 3, 20)
    sums[0, 0, 1, 5] = NAN
    assert select(sums, keep_count=4).sum(-1).flatten().tolist() == [4, 20, 4, 4, 4, 4]


def test_static_columns_beyond_the_budget_are_all_kept_and_nothing_else():
    static = torch.tensor([True, False, True, False, True])
    row = [0.0, INF, 0.0, 9.0, 0.0]
    for keep_count in (0, 1, 3):
        assert kept(row, keep_count=keep_count, static_columns=static) == [0, 2, 4]
    assert kept(row, keep_count=4, static_columns=static) == [0, 1, 2, 4]


def test_static_columns_broadcast_over_batch_heads_and_groups():
    sums = torch.rand(2, 3, 4, 9)
    for shape in [(9,), (4, 9), (3, 1, 9), (2, 1, 1, 9)]:
        mask = select(sums, keep_count=0, static_columns=torch.ones(shape, dtype=torch.bool))
        assert mask.all()


def murmur(x):
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def drawn_in_plain_python(seed, batch, head, group, columns, count):
    state = 0
    for part in (seed % 2**32, (seed >> 32) % 2**32, batch, head, group):
        state = murmur((state + 0x9E3779B9) % 2**32 ^ part)
    hashes = [murmur((state + 0x9E3779B9) % 2**32 ^ column) for column in range(columns)]
    return sorted(sorted(range(columns), key=lambda column: -hashes[column])[:count])


@backend_names(BACKENDS)
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**40 + 3, -5])
def test_random_columns_follow_from_seed_and_position(backend, seed, device):
    sums = torch.zeros(2, 3, 4, 131, device=device)
    mask = select(sums, keep_count=0, random_count=17, seed=seed, backend=backend)
    for b, h, g in [(0, 0, 0), (0, 0, 1), (0, 2, 0), (1, 0, 0), (1, 2, 3)]:
        expected = drawn_in_plain_python(seed, b, h, g, 131, 17)
        assert mask[b, h, g].nonzero().flatten().tolist() == expected


def test_random_columns_ignore_the_global_random_state_and_spare_it():
    sums = torch.zeros(1, 2, 3, 100)
    torch.manual_seed(1)
    first = column_selection(sums, keep_count=0, random_count=20, seed=7)
    after = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(3))
    assert torch.equal(first, column_selection(sums, keep_count=0, random_count=20, seed=7))
    assert not torch.equal(first, column_selection(sums, keep_count=0, random_count=20, seed=8))


def test_random_columns_are_spread_evenly():
    mask = select(torch.zeros(1, 20, 50, 256), keep_count=0, random_count=64)
    share = mask.double().mean((0, 1, 2))
    assert (mask.sum(-1) == 64).all()
    # 1000 rows: a standard deviation of 0.0137 about 0.25.
    assert share.min() > 0.25 - 5 * 0.0137
    assert share.max() < 0.25 + 5 * 0.0137
    together = (mask[..., 0] & mask[..., 1]).double().mean()
    assert abs(together - 0.0625) < 5 * 0.0077


def test_random_columns_come_on_top_of_the_chosen_ones():
    sums = torch.rand(1, 2, 3, 64)
    static = torch.zeros(64, dtype=torch.bool)
    static[[3, 60]] = True
    scored = select(sums, keep_count=10, static_columns=static)
    both = select(sums, keep_count=10, static_columns=static, random_count=5)
    assert (scored.sum(-1) == 10).all()
    assert (both.sum(-1) == 15).all()
    assert (both | scored).equal(both)
    for random_count in (54, 55, 1000):
        assert select(sums, keep_count=10, random_count=random_count).all()


def test_small_chunks_change_nothing(monkeypatch):
    sums = torch.rand(2, 2, 7, 33)
    options = {"keep_count": 5, "random_count": 4, "static_columns": torch.rand(7, 33) < 0.1}
    expected = column_selection(sums, **options)
    monkeypatch.setattr(reference, "DEFAULT_TRANSIENT_BYTES", 33 * 32 * 2)
    assert torch.equal(column_selection(sums, **options), expected)


@backend_names(BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums(backend, dtype, device):
    sums = torch.rand(1, 1, 2, 77, device=device).to(dtype)
    mask = select(sums, keep_count=9, backend=backend)
    for g in range(2):
        columns = mask[0, 0, g].nonzero().flatten().tolist()
        assert columns == by_sorting(sums[0, 0, g].tolist(), 9)


def test_inputs_stay_as_they_were():
    sums = torch.rand(1, 1, 2, 40)
    static = torch.rand(2, 40) < 0.2
    before = sums.clone(), static.clone()
    column_selection(sums, keep_count=5, static_columns=static, random_count=3)
    assert torch.equal(sums, before[0])
    assert torch.equal(static, before[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_count": -1}, "got keep_count=-1, random_count=0"),
        ({"keep_count": 1, "random_count": -2}, "random_count=-2"),
        ({"static_columns": torch.ones(5)}, "static_columns must be torch.bool, got torch.float32"),
        (
            {"static_columns": torch.ones(5, dtype=torch.bool)},
            r"static_columns \[5\] do not broadcast to \[1, 2, 3, 9\]",
        ),
        ({"column_sums": torch.rand(3, 9)}, r"must be \[B, H, G, M\], got \[3, 9\]"),
        ({"column_sums": torch.ones(1, 2, 3, 9, dtype=torch.int32)}, "got torch.int32"),
        ({"backend": "fast"}, "unknown backend 'fast'; it has reference"),
    ],
)
def test_mistakes_are_named(options, message):
    arguments = {"column_sums": torch.rand(1, 2, 3, 9), "keep_count": 3, **options}
    with pytest.raises(ValueError, match=message):
        column_selection(**arguments)
