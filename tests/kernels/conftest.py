"""Fixtures of all operation tests: where they run, and memory that is never clean by luck."""

import os
from pathlib import Path

import pytest
import torch

from tests.devices import DEVICES


def pytest_collection_modifyitems(config, items):
    """Kernels are left out on devices that never run them: a third of all cases on a CPU."""
    never = {"gluon", "triton"} if os.environ.get("TRITON_INTERPRET", "0") == "0" else {"gluon"}

    def runs(item):
        chosen = getattr(item, "callspec", None)
        if chosen is None or Path(__file__).parent != item.path.parent:
            return True
        return chosen.params.get("device") != "cpu" or chosen.params.get("backend") not in never

    left_out = [item for item in items if not runs(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = filter(runs, items)


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
