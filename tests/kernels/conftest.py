"""Fixtures of all operation tests: where they run, and memory that is never clean by luck."""

import pytest
import torch

from tests.devices import DEVICES


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fills uninitialized tensors with NaN (or the largest integer), so unwritten parts show."""

    def poison(function):
        def poisoned(*args, **kwargs):
            tensor = function(*args, **kwargs)
            if tensor.is_floating_point():
                return tensor.fill_(torch.nan)
            return tensor.fill_(
                True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max
            )

        return poisoned

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))
