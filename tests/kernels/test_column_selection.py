import pytest
import torch

from chipsparse.kernels.column_selection import column_selection, reference
from chipsparse.kernels.mask_packing import unpack_mask
from tests.kernels.formulas import backend_names

INF, NAN = float("inf"), float("nan")
# The Triton kernel tells sums apart by 16 bits.
EXACT_DTYPES = {"triton": torch.bfloat16, "reference": torch.float32}


def select(sums, **options):
    """The selection as a bool mask ``[B, H, G, M]``."""
    packed = column_selection(sums, **options)
    assert packed.dtype == torch.uint8
    return unpack_mask(packed, sums.shape[-1])


def kept(row, *, dtype=torch.float32, device="cpu", **options):
    """The columns kept of one row of scores."""
    sums = torch.tensor(row, dtype=dtype, device=device)[None, None, None]
    return select(sums, **options)[0, 0, 0].nonzero().flatten().tolist()


def by_sorting(row, keep_count, static=()):
    """The definition, in plain Python."""
    others = sorted((-score, column) for column, score in enumerate(row) if column not in static)
    chosen = [column for _, column in others[: max(0, keep_count - len(static))]]
    return sorted({*static, *chosen})


def share_of_lower_sums(sums, mask):
    """The share of the kept sums of a row that are below the lowest of an exact choice."""
    kept = sums[mask].float()
    return (kept < sums.float().topk(len(kept)).values[-1]).float().mean().item()


@backend_names(column_selection)
@pytest.mark.parametrize(
    ("columns", "keep_fraction"),
    [(1, 1.0), (7, 0.5), (128, 0.0), (131, 0.1), (1337, 0.5), (1337, 2.0)],
)
@pytest.mark.parametrize("negative", [False, True])
def test_keeps_the_highest_sums(backend, columns, keep_fraction, negative, device):
    generator = torch.Generator().manual_seed(columns)
    sums = torch.randn(2, 1, 2, columns, generator=generator)
    sums = (sums * 4).round() if negative else sums.exp()  # rounding makes many ties
    sums = sums.to(device, EXACT_DTYPES[backend])
    static = torch.rand(2, columns, generator=generator) < 0.05
    keep_count = int(columns * keep_fraction)
    mask = select(sums, keep_count=keep_count, static_columns=static.to(device), backend=backend)
    for b, g in [(0, 0), (0, 1), (1, 1)]:
        columns_kept = mask[b, 0, g].nonzero().flatten().tolist()
        statics = static[g].nonzero().flatten().tolist()
        assert columns_kept == by_sorting(sums[b, 0, g].tolist(), keep_count, statics)


@backend_names(column_selection)
@pytest.mark.parametrize(
    ("row", "keep_count", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], 2, [0, 1]),
        ([1.0, 3.0, 2.0, 3.0, 2.0], 3, [1, 2, 3]),
        ([5.0, INF, 3e38, INF], 3, [1, 2, 3]),
        ([5.0, INF, 3.38e38], 1, [1]),
        ([-1.0, -INF, -2.0, -1e-40], 3, [0, 2, 3]),
        ([-INF, -INF, -INF], 2, [0, 1]),
        ([-0.0, 0.0, -0.0], 2, [0, 1]),
        ([-1.0, 0.0, -0.0, 1.0], 2, [1, 3]),
        ([0.0, 1e-40, 0.0], 1, [1]),
        ([1.0, NAN, 3.0], 1, [0, 1, 2]),
        ([1.0, -NAN, 3.0], 1, [0, 1, 2]),
        ([NAN, NAN], 0, [0, 1]),
        ([1.0, 2.0], 0, []),
        ([1.0, 2.0], 99, [0, 1]),
        ([7.0] * 100, 37, list(range(37))),
        ([-7.0] * 96, 96, list(range(96))),
        ([7.0] * 96, 0, []),
    ],
)
def test_special_rows(backend, row, keep_count, expected, device):
    dtype = EXACT_DTYPES[backend]
    options = {"keep_count": keep_count, "backend": backend, "device": device}
    assert kept(row, dtype=dtype, **options) == expected


@backend_names(column_selection)
def test_static_columns_beyond_the_budget_are_all_kept_and_nothing_else(backend, device):
    static = torch.tensor([True, False, True, False, True], device=device)
    row = [0.0, INF, 0.0, 9.0, 0.0]
    options = {"static_columns": static, "backend": backend, "device": device}
    for keep_count in (0, 1, 3):
        assert kept(row, keep_count=keep_count, **options) == [0, 2, 4]
    assert kept(row, keep_count=4, **options) == [0, 1, 2, 4]
    assert kept(row, keep_count=5, **options) == [0, 1, 2, 3, 4]


@backend_names(column_selection)
def test_static_columns_broadcast_over_batch_heads_and_blocks(backend, device):
    sums = torch.rand(2, 3, 4, 9, device=device)
    generator = torch.Generator().manual_seed(0)
    for shape in [(9,), (4, 9), (3, 1, 9), (2, 1, 1, 9), (2, 3, 4, 9), (4, 1)]:
        static = (torch.rand(shape, generator=generator) < 0.5).to(device)
        mask = select(sums, keep_count=0, static_columns=static, backend=backend)
        assert torch.equal(mask, static.expand_as(sums))


@backend_names(column_selection)
def test_no_rows_and_no_columns(backend, device):
    sums = torch.rand(2, 0, 4, 9, device=device)
    options = {"keep_count": 2, "random_count": 3, "backend": backend}
    assert column_selection(sums, **options).shape == (2, 0, 4, 2)
    assert column_selection(sums.new_zeros(1, 2, 3, 0), **options).shape == (1, 2, 3, 0)


def murmur(x):
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def drawn_in_plain_python(seed, batch, head, block, columns, count, kept=()):
    state = 0
    for part in (seed % 2**32, (seed >> 32) % 2**32, batch, head, block):
        state = murmur((state + 0x9E3779B9) % 2**32 ^ part)
    drawn = []
    for i in range(count):
        first, end = i * columns // count, (i + 1) * columns // count
        start = murmur((state + 0x9E3779B9) % 2**32 ^ i) % (end - first)
        circle = [first + (start + step) % (end - first) for step in range(end - first)]
        drawn += [column for column in circle if column not in kept][:1]
    return sorted(drawn)


@backend_names(column_selection)
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**40 + 3, -5])
def test_random_columns_follow_from_seed_and_position(backend, seed, device):
    sums = torch.zeros(2, 2, 3, 131, device=device)
    mask = select(sums, keep_count=0, random_count=17, seed=seed, backend=backend)
    for b, h, g in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 2)]:
        expected = drawn_in_plain_python(seed, b, h, g, 131, 17)
        assert mask[b, h, g].nonzero().flatten().tolist() == expected


@backend_names(column_selection)
@pytest.mark.parametrize(
    ("columns", "random_count"),
    [(1, 1), (9, 3), (9, 13), (130, 13), (130, 40), (256, 130), (256, 1000)],
)
@pytest.mark.parametrize("keep_fraction", [0.2, 0.9])
def test_random_columns_are_the_next_free_of_each_stratum(
    backend, columns, random_count, keep_fraction, device
):
    # Long runs of kept columns, which a draw has to pass, and whole strata of them.
    sums = (torch.arange(columns, device=device) // 11 * 7919 % 97).float().expand(1, 1, 2, -1)
    options = {"keep_count": int(columns * keep_fraction), "seed": 6, "backend": backend}
    scored = select(sums, **options)
    both = select(sums, random_count=random_count, **options)
    for g in range(2):
        before = scored[0, 0, g].nonzero().flatten().tolist()
        count = min(random_count, columns)
        drawn = drawn_in_plain_python(6, 0, 0, g, columns, count, before)
        assert both[0, 0, g].nonzero().flatten().tolist() == sorted({*before, *drawn})


def test_small_chunks_change_nothing(monkeypatch):
    sums = torch.rand(2, 2, 7, 33)
    options = {"keep_count": 5, "random_count": 4, "static_columns": torch.rand(7, 33) < 0.1}
    expected = column_selection(sums, **options)
    monkeypatch.setattr(reference, "TRANSIENT_BYTES", 33 * 32 * 2)
    assert torch.equal(column_selection(sums, **options), expected)


@backend_names(column_selection)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("static_share", [0.0, 0.05])
def test_long_rows_have_the_exact_count_and_nearly_the_highest_sums(
    backend, dtype, static_share, device
):
    generator = torch.Generator().manual_seed(5)
    sums = torch.randn(1, 1, 6, 40_008, generator=generator)
    sums[..., :4, :] = sums[..., :4, :].mul(2).exp()
    sums[..., 1, :] = 7  # all equal
    sums[..., 2, :100] = INF
    sums[..., 3, 30_000] = NAN
    sums[..., 4, 1000:] = -INF
    sums = sums.to(device, dtype)
    static = (torch.rand(40_008, generator=generator) < static_share).to(device)
    options = {"keep_count": 2801, "static_columns": static}
    mask = select(sums, backend=backend, **options)[0, 0]
    assert mask.sum(-1).tolist() == [2801, 2801, 2801, 40_008, 2801, 2801]
    assert mask[:, static].all()
    for row in (0, 1, 2, 4, 5):
        assert share_of_lower_sums(sums[0, 0, row, ~static], mask[row, ~static]) <= 0.02


@backend_names(column_selection)
def test_views_that_are_not_contiguous(backend, device):
    sums = torch.rand(2, 3, 40, 5, device=device).to(torch.bfloat16).mT
    static = (torch.rand(40, 5, device=device) < 0.1).T
    options = {"keep_count": 9, "random_count": 2, "backend": backend}
    expected = column_selection(
        sums.contiguous(), static_columns=static.contiguous(), **{**options, "backend": "reference"}
    )
    assert torch.equal(column_selection(sums, static_columns=static, **options), expected)


@pytest.mark.gpu
def test_large_sums_on_a_gpu_equal_the_reference():
    generator = torch.Generator(device="cuda").manual_seed(0)
    sums = torch.empty(1, 8, 1200, 119_056 * 2, dtype=torch.bfloat16, device="cuda")  # 2.3e9
    sums.normal_(generator=generator).mul_(2).exp_()
    static = torch.rand(1200, 119_056 * 2, generator=generator, device="cuda") < 0.01
    options = {"keep_count": 16_667, "random_count": 2381, "seed": 3}
    chosen = column_selection(sums, static_columns=static, backend="triton", **options)
    again = column_selection(sums, static_columns=static, backend="triton", **options)
    assert torch.equal(chosen, again)
    scored = column_selection(sums, static_columns=static, keep_count=16_667, backend="triton")
    mask = unpack_mask(scored, 119_056 * 2)
    assert (mask.sum(-1) == 16_667).all()
    for block in (0, 700, 1199):
        others = ~static[block]
        assert share_of_lower_sums(sums[0, -1, block, others], mask[0, -1, block, others]) <= 0.02
    drawn = unpack_mask(chosen ^ scored, 119_056 * 2)
    assert (drawn.sum(-1) == 2381).all()


@backend_names(column_selection)
def test_a_misleading_sample_costs_neither_columns_nor_the_largest_sums(backend, device):
    """Every other byte of columns, which a sample takes, lies a little beside the rest."""
    columns, keep = 40_008, 2800
    generator = torch.Generator().manual_seed(0)
    sums = torch.randn(1, 1, 8, columns, generator=generator).mul_(1.5).exp_()
    beside = torch.tensor([0.5, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 2.0])[:, None]
    sampled = torch.arange(columns) // 8 % 2 == 0
    sums = torch.where(sampled, sums * beside, sums).to(device, torch.bfloat16)
    packed = column_selection(sums, keep_count=keep, backend=backend)
    mask = unpack_mask(packed, columns)
    assert (mask.sum(-1) == keep).all()
    top = sums.topk(keep // 2, dim=-1).indices
    assert mask.gather(-1, top).all()


@backend_names(column_selection)
def test_random_columns_of_some_heads_and_blocks_are_those_of_all(backend, device):
    sums = torch.randn(2, 3, 4, 100, generator=torch.Generator().manual_seed(0)).to(device)
    options = {"keep_count": 5, "random_count": 7, "seed": 3, "backend": backend}
    found = column_selection(sums, **options)
    later = column_selection(sums[:, 1:].contiguous(), first_head=1, **options)
    assert torch.equal(found[:, 1:], later)
    assert not torch.equal(column_selection(sums[:, 1:].contiguous(), **options), later)
    behind = column_selection(sums[:, :, 3:].contiguous(), first_block=3, **options)
    assert torch.equal(found[:, :, 3:], behind)
    assert not torch.equal(column_selection(sums[:, :, 3:].contiguous(), **options), behind)
