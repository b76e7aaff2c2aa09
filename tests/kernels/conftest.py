"""Fixtures of all operation tests: where they run, and memory that is never clean by luck."""

import pytest
import torch


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Skips a test of a kernel that says that it cannot run on the tensors of the test."""
    try:
        return (yield)
    except ValueError as error:
        kernel = pyfuncitem.funcargs.get("backend") in ("gluon", "triton", "library")
        if not kernel or "cannot run here" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fills uninitialized tensors with NaN (or the largest integer), so unwritten parts show."""

    def poison(function):
        def poisoned(*args, **kwargs):
            tensor = function(*args, **kwargs)
            if tensor.is_floating_point():
                return tensor.fill_(torch.nan)
            return tensor.fill_(tensor.dtype == torch.bool or torch.iinfo(tensor.dtype).max)

        return poisoned

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
