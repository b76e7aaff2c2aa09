"""What is told of waits for a device, by a stand-in for PyTorch's own telling."""

import warnings

import pytest
import torch

from chipsparse.cuda_recorder import CudaRecorder

WAITS = "called a synchronizing CUDA operation"


@pytest.fixture
def modes(monkeypatch):
    """The modes that were set, the first of them before."""
    modes = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])

    def change(mode):
        modes.append({"warn": 1}.get(mode, mode))
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", change)
    return modes


@pytest.mark.parametrize("waits", [False, True])
def test_waits_are_told_while_a_call_is_watched(waits, modes):
    during = []

    def call():
        during.append(modes[-1])
        if waits:
            warnings.warn(WAITS, stacklevel=1)
        return "result"

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing of this reaches the user
        assert CudaRecorder().watch(call) == ("result", waits)
    assert during == [1]
    assert modes == [0, 1, 0]


def test_other_warnings_come_through(modes):
    with pytest.warns(FutureWarning, match="this will change"):
        CudaRecorder().watch(lambda: warnings.warn("this will change", FutureWarning, stacklevel=1))


def test_the_mode_is_restored_after_an_error(modes):
    with pytest.raises(KeyError):
        CudaRecorder().watch(lambda: {}["missing"])
    assert modes == [0, 1, 0]


def test_a_mode_that_somebody_else_set_stays(modes):
    modes[0] = 2
    assert CudaRecorder().watch(lambda: modes[-1]) == (2, False)
    assert modes == [2]
