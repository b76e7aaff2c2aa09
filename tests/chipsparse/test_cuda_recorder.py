"""Waits for a device that are told, and recordings that break off: by stand-ins for PyTorch's."""

import contextlib
import warnings
from types import SimpleNamespace

import pytest
import torch

from chipsparse import cuda_recorder
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


@pytest.fixture
def cuda(monkeypatch):
    """Names of the stand-in's streams, the current one last; ``breaks`` as PyTorch's recording."""
    cuda = SimpleNamespace(streams=["user"], breaks=False, mended=[])

    @contextlib.contextmanager
    def graph(_graph, *, pool, stream, capture_error_mode):
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        cuda.streams.append(stream.name)
        yield
        if cuda.breaks:  # PyTorch does not go back to the stream before, then
            raise RuntimeError("operation not permitted when stream is capturing")
        cuda.streams.append("user")

    own = SimpleNamespace(name="own")
    for name, value in (
        ("CUDAGraph", lambda: SimpleNamespace(replay="replay")),
        ("graph_pool_handle", lambda: "pool"),
        ("Stream", lambda: own),
        ("current_device", lambda: 1),
        ("current_stream", lambda: cuda.streams[-1]),
        ("set_stream", cuda.streams.append),
        ("graph", graph),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda_recorder, "_mend", lambda *args: cuda.mended.append(args))
    return cuda


def test_a_call_is_recorded_on_a_stream_of_its_own(cuda):
    assert CudaRecorder().record(lambda: cuda.streams[-1]) == ("own", "replay")
    assert (cuda.streams[-1], cuda.mended) == ("user", [])


def test_the_stream_is_the_users_again_where_a_recording_breaks_off(cuda):
    cuda.breaks = True
    with pytest.raises(RuntimeError, match="not permitted"):
        CudaRecorder().record(lambda: None)
    assert (cuda.streams[-1], cuda.mended) == ("user", [(1, "pool")])
