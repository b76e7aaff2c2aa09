"""Sparse against dense of the same machine, and both against the golden files.

The check fails where the system is faulty: it could find such a mistake.
"""

import pytest

from tests.regression import faults
from tests.regression.cases import CASES
from tests.regression.check import closeness, violations
from tests.regression.faults import FAULTS, GROSS
from tests.regression.golden import read

QUICK = faults.rows_off_by_one  # the mildest; the others are slow tests


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * case.slow) for name, case in CASES.items()],
)
def test_sparse_is_as_close_to_dense_and_to_the_golden_files_as_ever(name, runs):
    case = CASES[name]
    dense, sparse = runs.dense(case), runs.sparse(case)
    assert sparse.report.fallbacks == []
    assert {"dense", "refresh", "sparse"} <= set(sparse.report.actions())
    assert violations(case, closeness(dense.frames, sparse.frames, read(case))) == []


PARAMETERS = [
    *(("flux", fault) for fault in FAULTS),
    *(("wan", fault) for fault in FAULTS if fault in GROSS),
]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param(
            name,
            fault,
            marks=[] if name == "flux" and fault is QUICK else [pytest.mark.slow],
            id=f"{name}-{fault.__name__}",
        )
        for name, fault in PARAMETERS
    ],
)
def test_a_fault_is_seen(name, fault, runs, monkeypatch):
    case = CASES[name]
    dense, golden = runs.dense(case).frames, read(case)
    right = closeness(dense, runs.sparse(case).frames, golden)
    assert violations(case, right) == []
    fault(monkeypatch)
    faulty = closeness(dense, runs.generate(case, runs.config(case)).frames, golden)
    assert violations(case, faulty) != []
    if fault in GROSS:
        assert violations(case, faulty, half=True) != []
