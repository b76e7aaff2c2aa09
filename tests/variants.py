"""Variants of a test: a few show all that it is about, and the others are slow tests."""

import pytest


def slow(*values, id=None):
    """A variant among the slow tests; for one argument or several."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def slow_unless(quick, values):
    """Variants for one argument, slow but for those of ``quick``."""
    return [value if value in quick else slow(value) for value in values]
