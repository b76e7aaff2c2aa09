"""Recordings that break off, one at a time, and what becomes of their memory: by stand-ins."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

from chipsparse.sparse.graphs import cuda_capture
from chipsparse.sparse.graphs.cuda_capture import CudaCapturer


@pytest.fixture
def cuda(monkeypatch):
    """Streams of the stand-in, the current one last; ``breaks`` as PyTorch's recording does."""
    user = SimpleNamespace(name="user", device_index=1)
    own = SimpleNamespace(name="own", device_index=1)
    cuda = SimpleNamespace(streams=[user], breaks=False, mended=[], done=[])

    @contextlib.contextmanager
    def graph(_graph, *, pool, stream, capture_error_mode):
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        cuda.streams.append(stream)
        try:
            yield
        finally:
            if cuda.breaks:  # PyTorch does not go back to the stream before, then
                raise RuntimeError("capture was invalidated")
            cuda.streams.append(user)

    @contextlib.contextmanager
    def on(stream):
        before = cuda.streams[-1]
        cuda.streams.append(stream)
        yield
        cuda.streams.append(before)

    def put(state):  # PyTorch refuses to copy it on a stream that is recorded
        cuda.done.append(f"generator: {state} on {cuda.streams[-1].name}")

    def named(word):
        return lambda: cuda.done.append(word)

    recorded = SimpleNamespace(replay=named("launched"), reset=named("freed"))
    event = SimpleNamespace(record=named("marked"), synchronize=named("waited"))
    for name, value in (
        ("CUDAGraph", lambda: recorded),
        ("Event", lambda: event),
        ("graph_pool_handle", lambda: "pool"),
        ("Stream", lambda: own),
        ("current_device", lambda: 1),
        ("current_stream", lambda: cuda.streams[-1]),
        ("set_stream", cuda.streams.append),
        ("graph", graph),
        ("stream", on),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    generator = SimpleNamespace(clone_state=lambda: "copy", graphsafe_set_state=put)
    monkeypatch.setattr(torch.cuda, "default_generators", [None, generator])
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", named("workspaces"), raising=False)
    monkeypatch.setattr(cuda_capture, "_end_allocation", lambda *args: cuda.mended.append(args))
    return cuda


def test_a_call_is_recorded_on_a_stream_of_its_own_and_freed_behind_the_last_launch(cuda):
    result, recording = CudaCapturer().capture(lambda: cuda.streams[-1].name)
    assert result == "own"
    assert (cuda.streams[-1].name, cuda.mended) == ("user", [])
    recording.replay()
    recording.release()
    recorded = ["workspaces", "generator: copy on user", "workspaces"]
    assert cuda.done == [*recorded, "launched", "marked", "waited", "freed"]


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("it waits"), KeyboardInterrupt(), KeyError("x")])
def test_what_breaks_a_recording_off_is_noted(error, breaks, cuda):
    cuda.breaks = breaks

    def call():
        raise error

    with pytest.raises(type(error)) as raised:
        CudaCapturer().capture(call)
    assert raised.value is error
    assert (cuda.streams[-1].name, cuda.mended) == ("user", [(1, "pool")])
    assert cuda.done == ["workspaces", "generator: copy on user", "workspaces"]


def test_a_recording_that_cannot_be_ended(cuda):
    cuda.breaks = True
    with pytest.raises(RuntimeError, match="was invalidated"):
        CudaCapturer().capture(lambda: None)
    assert (cuda.streams[-1].name, cuda.mended) == ("user", [(1, "pool")])


def test_one_call_of_the_process_is_recorded_at_a_time(cuda):
    order = []
    begun = threading.Event()

    def other():
        begun.set()
        CudaCapturer().capture(lambda: order.append("other"))

    thread = threading.Thread(target=other)

    def call():
        thread.start()
        begun.wait()
        order.append("first")

    CudaCapturer().capture(call)
    thread.join()
    assert order == ["first", "other"]
