"""Fixtures of all operation tests: where they run, and memory that is never clean by luck."""

import pytest
import torch


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ]
)
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
