"""Sparse against dense of the same machine, and both against the golden files."""

import pytest

from tests.regression.cases import CASES
from tests.regression.check import closeness, violations
from tests.regression.golden import read


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
