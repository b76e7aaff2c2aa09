import pytest
import torch

from chipsparse.kernels.column_selection import column_selection, reference
from chipsparse.kernels.mask_packing import unpack_mask
from tests.kernels.formulas import backend_names

INF = float("inf")
NAN = float("nan")
# The Triton kernel tells sums apart by 16 bits.
EXACT_DTYPES = {"triton": torch.bfloat16, "reference": torch.float32}


def select(sums, **options):
    packed = column_selection(sums, **options)
    assert packed.dtype == torch.uint8
    return unpack_mask(packed, sums.shape[-1])


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
    [(1, 1.0), (7, 0.5), (128, 0.0), (131, 0.1), (1337, 0.01), (1337, 0.5), (1337, 2.0)],
)
@pytest.mark.parametrize("negative", [False, True])
def test_keeps_the_highest_sums(backend, columns, keep_fraction, negative, device, monkeypatch):
    monkeypatch.setattr(reference, "TRANSIENT_BYTES", 1)  # a row at a time
    generator = torch.Generator().manual_seed(columns)
    sums = torch.randn(2, 1, 2, columns, generator=generator)
    sums = (sums * 4).round() if negative else sums.exp()  # rounding makes many ties
    sums = sums.to(device, EXACT_DTYPES[backend]).mT.contiguous().mT  # views
    static = (torch.rand(2 * columns, generator=generator) < 0.05)[::2].to(device)
    keep_count = int(columns * keep_fraction)
    mask = select(sums, keep_count=keep_count, static_columns=static, backend=backend)
    statics = static.nonzero().flatten().tolist()
    for b, g in [(0, 0), (0, 1), (1, 1)]:
        columns_kept = mask[b, 0, g].nonzero().flatten().tolist()
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
    sums = torch.tensor(row, dtype=EXACT_DTYPES[backend], device=device)[None, None, None]
    mask = select(sums, keep_count=keep_count, backend=backend)
    assert mask[0, 0, 0].nonzero().flatten().tolist() == expected


@backend_names(column_selection)
def test_no_rows_and_no_columns(backend, device):
    sums = torch.rand(2, 0, 4, 9, device=device)
    options = {"keep_count": 2, "backend": backend}
    assert column_selection(sums, **options).shape == (2, 0, 4, 2)
    assert column_selection(sums.new_zeros(1, 2, 3, 0), **options).shape == (1, 2, 3, 0)


@backend_names(column_selection)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("static_share", [0.0, 0.05])
def test_long_rows_have_exact_counts_and_nearly_highest_sums(backend, dtype, static_share, device):
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


@pytest.mark.gpu
def test_large_sums_on_a_gpu_equal_the_reference():
    generator = torch.Generator(device="cuda").manual_seed(0)
    sums = torch.empty(1, 8, 1200, 119_056 * 2, dtype=torch.bfloat16, device="cuda")  # 2.3e9
    sums.normal_(generator=generator).mul_(2).exp_()
    static = torch.rand(119_056 * 2, generator=generator, device="cuda") < 0.01
    options = {"keep_count": 16_667, "static_columns": static, "backend": "triton"}
    chosen = column_selection(sums, **options)
    assert torch.equal(chosen, column_selection(sums, **options))
    mask = unpack_mask(chosen, 119_056 * 2)
    assert (mask.sum(-1) == 16_667).all()
    for block in (0, 700, 1199):
        row = sums[0, -1, block, ~static]
        kept = mask[0, -1, block, ~static]
        assert share_of_lower_sums(row, kept) <= 0.02


@backend_names(column_selection)
def test_a_misleading_sample_costs_neither_columns_nor_the_largest_sums(backend, device):
    """Every other byte of columns, which a sample takes, lies a little beside the rest."""
    columns = 40_008
    keep = 2800
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
