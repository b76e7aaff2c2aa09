"""Variants of a test: devices; and a few that show all it is about, the others as slow tests."""

import pytest
import torch

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", GPU] if torch.cuda.is_available() else ["cpu"]


def slow(*values, id=None):
    """A variant among the slow tests; for one argument or several."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def slow_unless(quick, values):
    """Variants for one argument, slow but for those of ``quick``."""
    return [value if value in quick else slow(value) for value in values]
