"""Sparse against dense of the same machine, and both against the golden files.

The check fails where the system is faulty: it could find such a mistake.
"""

import pytest

from tests.regression import faults
from tests.regression.cases import CASES
from tests.regression.check import closeness, violations
from tests.regression.faults import FAULTS, GROSS
from tests.regression.golden import read, strip
from tests.variants import slow

QUICK = faults.rows_off_by_one  # the mildest; the others are slow tests


@pytest.mark.parametrize("name", [slow(n) if case.slow else n for n, case in CASES.items()])
def test_sparse_is_as_close_to_dense_and_to_the_golden_files_as_ever(name, runs, media_regression):
    case = CASES[name]
    dense = runs.dense(case)
    sparse = runs.sparse(case)
    assert sparse.report.fallbacks == []
    assert {"dense", "refresh", "sparse"} <= set(sparse.report.actions())
    for kind, result in (("dense", dense), ("sparse", sparse)):
        picture = strip(result.frames).numpy()
        media_regression.check(picture, kind, min_psnr=case.bounds.golden)
    assert violations(case, closeness(dense.frames, sparse.frames, read(case))) == []


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("flux", QUICK),
        *(slow("flux", fault) for fault in FAULTS if fault is not QUICK),
        *(slow("wan", fault) for fault in FAULTS if fault in GROSS),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_fault_is_seen(name, fault, runs, monkeypatch):
    case = CASES[name]
    dense = runs.dense(case).frames
    golden = read(case)
    right = closeness(dense, runs.sparse(case).frames, golden)
    assert violations(case, right) == []
    fault(monkeypatch)
    faulty = closeness(dense, runs.generate(case, runs.config(case)).frames, golden)
    assert violations(case, faulty) != []
    if fault in GROSS:
        assert violations(case, faulty, half=True) != []
